"""Scenarios of single records: one is lost behind a sleeping publisher, one wrong answer about a remembered one."""

from __future__ import annotations

import asyncio
from typing import Any

from sim.actors import Replica, SimPublisher
from sim.adversarial_scenarios import LATEST
from sim.clock import Process
from sim.scenario_run import ScenarioRun, scenario
from sim.scenarios import some_random_faults

from dcr_daemon.errors import DcrError
from dcr_daemon.ledger import names


@scenario()
async def zombie_at_a_hole(run: ScenarioRun) -> None:
    """A publisher sleeps while another takes over, and the first record of that is lost. When it wakes it writes
    nothing in its place; once the record is restored it is fenced."""
    world, watch, objects = run.world, run.watch, run.world.bucket.objects
    some_random_faults(run)
    zombie = run.publisher(updates=100, pause=run.rng.choice((2.0, 6.0)), anchor_every=run.rng.choice((1, None)))
    run.replica(1, directory=run.chance(0.3))
    await run.wait(10.0, 60.0)
    await run.until(lambda: _at_rest(run, zombie), 300.0, "a publisher between two requests to its ledger")
    assert zombie.process is not None
    assert watch.tip is not None
    slot = watch.tip.seq + 1
    world.stop(zombie.process, 10_000.0)
    run.publisher(role="pub2", name="other", take_over=True, updates=2)
    await run.until(lambda: watch.tip is not None and watch.tip.seq > slot + 1, 300.0, "a take-over")
    await asyncio.sleep(LATEST)
    lost = objects.pop(names.record(slot))
    world.note(f"record {slot} vanishes")
    world.outcome.faults["records lost"] += 1
    world.thaw(zombie.process)
    await run.wait(20.0, 60.0)
    if names.record(slot) in objects:
        world.fail("hole", f"somebody wrote in the place of record {slot}, which was lost")
    objects[names.record(slot)] = lost
    await run.until(lambda: zombie.down, 300.0, "the publisher that slept is fenced")
    await run.settled(150.0)
    await run.finish()


def _at_rest(run: ScenarioRun, publisher: SimPublisher) -> bool:
    """Whether it has published, and has no request to the ledger under way."""
    ledger = publisher.session.ledger if publisher.alive and publisher.session else None
    return bool(ledger and run.watch.head and ledger.holds and not ledger.undecided and not ledger._lock.locked())


@scenario()
async def misread_mark(run: ScenarioRun) -> None:
    """A daemon starts again, and one answer about a record that it remembers is wrong: another record, or none. One
    wrong answer ends nobody."""
    publisher = run.publisher(updates=4, anchor_every=run.rng.choice((1, None)))
    replica = run.replica(1, directory=run.chance(0.4))
    await run.until(lambda: run.watch.head > 0 and run.served(replica) > 0, 300.0, "serving")
    for _ in run.times(1, 2, 3):
        await run.wait(1.0, 20.0)
        actor: SimPublisher | Replica = run.rng.choice((publisher, replica))
        ends = len(actor.exits)
        run.kill(actor)
        _answer_wrongly(run, actor.role)
        await run.wait(20.0, 40.0)
        if ended := [error for error in actor.exits[ends:] if isinstance(error, DcrError)]:
            run.world.fail("misread", f"one wrong answer has ended {actor.role}: {ended[0]}")
    await run.settled(150.0)
    await run.finish()


def _answer_wrongly(run: ScenarioRun, role: str) -> None:
    """The next process of this role gets one wrong answer about the first or the second record that it asks for."""
    bucket, rng = run.world.bucket, run.rng
    right, left, before = bucket.act, [rng.choice((1, 2))], {one.name for one in run.world.processes}

    def act(operation: str, key: str, body: bytes, by: Process) -> Any:
        found = right(operation, key, body, by)
        if by.role != role or by.name in before or operation != "get" or not key.startswith("ledger/"):
            return found
        left[0] -= 1
        if left[0] != 0:
            return found
        run.world.outcome.faults["wrong record"] += 1
        others = [name for name in bucket.objects if name.startswith("ledger/") and name not in (key, names.record(0))]
        return bucket.objects[rng.choice(others)] if key != names.record(0) and rng.random() < 0.6 else None

    bucket.act = act  # type: ignore[method-assign]
