"""Scenarios in which rules are broken: an intruder, a bucket restored from a backup, taken names, bits that flip."""

from __future__ import annotations

import asyncio
from typing import Any

from sim.actors import SimPublisher
from sim.bucket import TIMEOUT
from sim.clock import Process
from sim.scenario_run import ScenarioRun, scenario
from sim.scenarios import PUBLISHER, STORE, some_random_faults, take_names
from sim.world import RANK_FAULTS

from dcr_daemon.errors import Fenced
from dcr_daemon.events import Event, Sealed
from dcr_daemon.ledger import names
from dcr_daemon.ledger.records import Epoch, Release

LATEST = 5 * TIMEOUT  #: seconds after which nothing that a dead process has sent arrives any more


@scenario()
async def intruder(run: ScenarioRun) -> None:
    """Another publisher starts on the stream without being told to take over: it is refused, and harms nobody."""
    rng = run.rng
    some_random_faults(run)
    first = run.publisher(updates=5)
    if run.chance(0.4):
        run.trigger("pub1", "step", rng.choice(("kill", "stop")), rng.randint(1, 1500), rng.uniform(10.0, 60.0))
    run.replica(1)
    for number in run.times(1, 2):
        await run.wait(5.0, 40.0)
        run.publisher(role=f"pub{number + 2}", name=f"other{number}", updates=2)
    await run.settled(150.0)
    claims = [record for record in run.watch.records.values() if isinstance(record, Epoch)]
    released = any(isinstance(record, Release) for record in run.watch.records.values())
    was_first = bool(claims) and claims[0].name == first.name
    if was_first and not released and any(isinstance(error, Fenced) for error in first.exits):
        run.world.fail("intruder", f"pub1 was fenced by somebody who may not claim: {first.exits}")
    await run.finish()


@scenario()
async def rolled_back_bucket(run: ScenarioRun) -> None:
    """The ledger is put back to an older state, and everybody restarts: nobody with a memory believes it, and `dcr gc`
    deletes nothing of what is gone. Then it is put right again."""
    rng = run.rng
    publisher = run.publisher(updates=4)
    replica = run.replica(1, directory=run.chance(0.3))
    await run.settled(60.0)
    await run.until(lambda: run.served(replica) == run.watch.head, 300.0, "serving before the roll-back")
    objects, tip = run.world.bucket.objects, run.watch.tip
    assert tip is not None
    publisher.down = True
    run.kill(publisher)
    await asyncio.sleep(10.0)
    oldest = rng.randint(1, max(1, tip.seq - 1))
    gone = {key: body for key, body in objects.items() if key.startswith("ledger/") and int(key[7:-5]) >= oldest}
    for key in gone:
        del objects[key]
    for process in (replica.process, replica.engine.process if replica.engine else None):
        if process and not process.dead and run.chance(0.8):
            run.world.kill(process)
    for _ in range(2):
        run.collect(keep=None, take_over=False)
        await run.wait(10.0, 100.0)
    objects.update(gone)
    replica.down = publisher.down = False
    publisher.left = 1
    publisher.start()
    await run.finish()


@scenario()
async def lost_records(run: ScenarioRun) -> None:
    """Records vanish under later ones, anywhere, and a publisher comes back without its state, killed at any instant:
    nobody writes or deletes until they are restored. The hole is of a width that GETs find if the LIST is old."""
    rng, world, watch = run.rng, run.world, run.watch
    some_random_faults(run)
    run.hit("pub1", PUBLISHER + STORE, ("kill",), 10)
    first = run.publisher(
        updates=rng.choice((2, 4, 6)), keep_versions=rng.choice((None, 1)), anchor_every=rng.choice((1, 2))
    )
    replica = run.replica(1, directory=run.chance(0.3))
    await run.wait(5.0, 60.0)
    await run.until(lambda: watch.tip is not None and watch.tip.seq > 1, 300.0, "a ledger")
    first.down = True
    run.kill(first)
    await asyncio.sleep(LATEST)
    assert watch.tip is not None
    tip, objects = watch.tip.seq, world.bucket.objects
    width = rng.randint(1, rng.choice((1, 1, (tip + 1) // 2)))
    lowest = rng.randint(0, tip + 1 - 2 * width)
    gone = {names.record(seq): objects.pop(names.record(seq)) for seq in range(lowest, lowest + width)}
    world.note(f"records {lowest} to {lowest + width - 1} of {tip} vanish")
    world.outcome.faults["records lost"] += width
    if run.chance(0.5):
        run.kill(replica)
    second = run.publisher(role="pub2", name="main", updates=2, keep_versions=1, anchor_every=1)
    run.replica(2, directory=run.chance(0.3))
    for _ in range(2):
        run.collect(keep=rng.choice((None, 1)), take_over=True)
        await run.wait(10.0, 30.0)
    if second.session or watch.tip.seq != tip:
        world.fail("hole", f"somebody wrote to a ledger without records {lowest} to {lowest + width - 1} of {tip}")
    objects.update(gone)
    await run.settled(150.0)
    await run.finish()


@scenario(publish_seconds=150.0)
async def squatter(run: ScenarioRun) -> None:
    """Somebody has put other bytes under names that a publisher is about to use (that attempt is given up), and rubbish
    where a replica tells of itself."""
    rng, bucket = run.rng, run.world.bucket
    some_random_faults(run)
    take_names(run, 12)
    run.publisher(updates=4)
    run.replica(1, directory=run.chance(0.3))
    await run.until(lambda: run.watch.tip is not None, 300.0, "the stream")
    bucket.objects["replicas/sub1.json"] = rng.choice((b"", b"{", b"{}", b"\xff" * 100))


class Forgetful(SimPublisher):
    """Bits flip in its baseline, now and then, right after a seal."""

    def emit(self, process: Process) -> Any:
        right, rng = super().emit(process), self.world.rng

        def tell(event: Event) -> None:
            right(event)
            if isinstance(event, Sealed) and self.session and not self.world.healed and rng.random() < 0.5:
                block = rng.randrange(len(self.session.context.baseline.blocks))
                bits = self.session.context.baseline[block]
                if bits.size:
                    self.world.outcome.faults["baseline bit flipped"] += 1
                    bits[rng.randrange(bits.size)] ^= bits.dtype.type(1 << rng.randrange(8 * bits.itemsize))

        return tell


@scenario(publish_seconds=150.0)
async def damaged_baseline(run: ScenarioRun) -> None:
    """A bit of a publisher's baseline flips between a seal and its anchor: it never gets into the bucket."""
    some_random_faults(run)
    run.publisher(kind=Forgetful, updates=5, anchor_every=1)
    run.replica(1, directory=run.chance(0.3))


@scenario()
async def flipped_bits(run: ScenarioRun) -> None:
    """Bits flip in an engine's memory, where nobody can see it: no version is built on them, and a scrub finds them."""
    rng = run.rng
    some_random_faults(run)
    run.publisher(updates=5, anchor_every=rng.choice((1, 2)))
    replica = run.replica(1, scrub_every=10.0)
    for _ in run.times(1, 2):
        await run.wait(3.0, 30.0)
        if replica.engine and replica.engine.alive:
            replica.engine.flip()
    await run.settled(150.0)
    await run.finish()
    engine = replica.engine
    await run.until(lambda: engine is not None and not engine.flips, 600.0, "a scrub finds what flipped")


@scenario(publish_seconds=150.0)
async def rank_fails_again(run: ScenarioRun) -> None:
    """What is tried twice fails twice, on an engine that serves or has never been ready: its change is taken back, or
    left begun."""
    rng = run.rng
    op = rng.choice(("apply", "apply", "commit"))
    ops = [op, "rollback"] if op == "apply" and run.chance(0.3) else [op]
    rank, nth = rng.randrange(2), rng.choice((1, 1, 3))
    for one in ops:
        for again in range(2):
            run.trigger("engine1", f"wire:{rank}:{one}", rng.choice(RANK_FAULTS), nth + again)
    # Without anchors an engine that comes late has nothing but the chain to go by.
    run.publisher(updates=5, anchor_every=rng.choice((None, None, 1)), anchor_share=None)
    await asyncio.sleep(rng.choice((0.0, 20.0, 40.0)))
    run.replica(1)
    await asyncio.sleep(30.0)  # the faults are for its first changes


@scenario(publish_seconds=200.0)
async def late_seal(run: ScenarioRun) -> None:
    """A seal is sent, not acknowledged, and arrives when its publisher has long looked elsewhere; patience is short."""
    rng = run.rng
    for nth in rng.sample(range(3, 20), rng.choice((2, 4))):
        run.trigger("pub1", "store:create:ledger/", "GHOST", nth)
    run.publisher(updates=5, patience=rng.choice((1.0, 5.0)), pause=rng.choice((3.0, 15.0)), anchor_every=None)
    run.replica(1)


@scenario()
async def lenient_store(run: ScenarioRun) -> None:
    """The store accepts If-None-Match and overwrites all the same: no publisher has anything to do with it."""
    bucket = run.world.bucket
    right = bucket.act

    def act(operation: str, key: str, body: bytes, by: Process) -> Any:
        if operation == "create" and bucket.objects.pop(key, None) is not None:
            run.world.outcome.faults["overwritten"] += 1
        return right(operation, key, body, by)

    bucket.act = act  # type: ignore[method-assign]
    publishers = [run.publisher(updates=3), run.publisher(role="pub2", name="other", take_over=True, updates=3)]
    await run.wait(30.0, 90.0)
    bucket.act = right  # type: ignore[method-assign]
    if any(key.startswith("ledger/") for key in bucket.objects):
        run.world.fail("lenient", "a ledger was begun in a store that overwrites")
    for publisher in publishers:
        publisher.down = True
    run.replica(1)
    await run.finish()


@scenario(publish_seconds=100.0)
async def second_owner(run: ScenarioRun) -> None:
    """A second subscriber attaches to an engine that has one: the first stops by itself, and does not come back."""
    some_random_faults(run)
    run.publisher(updates=4)
    first = run.replica(1)
    await run.until(lambda: run.served(first) >= 0, 300.0, "serving")
    second = run.beside(first, "sub2")
    await run.until(lambda: run.served(second) >= 0, 300.0, "the second owner serves")
    await run.until(lambda: any(isinstance(error, Fenced) for error in first.exits), 300.0, "the first is fenced")


@scenario(publish_seconds=150.0)
async def fenced_collector(run: ScenarioRun) -> None:
    """A publisher is stopped while it plans what to delete; another takes over; then it wakes, and deletes nothing."""
    rng = run.rng
    some_random_faults(run)
    run.trigger(
        "pub1", f"store:{rng.choice(('list:', 'get:anchors/'))}", "stop", rng.randint(1, 5), rng.uniform(30, 60)
    )
    run.publisher(updates=6, keep_versions=1, anchor_every=1)
    run.replica(1)
    await run.wait(10.0, 30.0)
    run.publisher(role="pub2", name="other", take_over=True, updates=2, anchor_every=None, keep_versions=None)


def misread(run: ScenarioRun, role: str, nth: int, times: int) -> None:
    """The `nth` record that this role reads reaches it with other text that still parses, and so do the next reads of
    it by the same process: `times` in all."""
    bucket, rng = run.world.bucket, run.rng
    right, passed, spoiled = bucket.act, [0], dict[tuple[str, str], int]()

    def act(operation: str, key: str, body: bytes, by: Process) -> Any:
        found = right(operation, key, body, by)
        if operation != "get" or not key.startswith("ledger/") or by.role != role or found is None or run.world.healed:
            return found
        passed[0] += 1
        if passed[0] == nth:
            spoiled[by.name, key] = times
        left = spoiled.get((by.name, key), 0)
        if left == 0:
            return found
        spoiled[by.name, key] = left - 1
        run.world.outcome.faults["record misread"] += 1
        return other_text(found, rng.choice((b'"at":"', b'"version":', b'"changed":', b'"nonce":"')))

    bucket.act = act  # type: ignore[method-assign]


def other_text(body: bytes, field: bytes) -> bytes:
    """A record with another character in its last such field, or in its time."""
    at = body.rfind(field) if field in body else body.rfind(b'"at":"')
    at = body.index(b":", at) + (2 if field.endswith(b'"') or field not in body else 1)
    return body[:at] + (b"7" if body[at : at + 1] != b"7" else b"6") + body[at + 1 :]


@scenario(publish_seconds=150.0)
async def misread_records(run: ScenarioRun) -> None:
    """Records reach one process with other text that still parses, once or many times, also at the instant at which a
    publisher without its state begins. Nobody builds on them, and a few misreads end nobody."""
    rng = run.rng
    some_random_faults(run)
    times = rng.choice((1, 1, 2, 5, 30))
    for role in rng.sample(("pub1", "pub2", "sub1"), rng.choice((1, 2, 3))):
        misread(run, role, rng.randint(1, 30), times)
    if run.chance(0.4):
        run.hit(rng.choice(("pub1", "sub1")), ["step"], ("kill", "power"), 800)
    first = run.publisher(updates=4, anchor_every=rng.choice((1, 2, None)))
    replica = run.replica(1, directory=run.chance(0.3))
    await run.settled(120.0)
    first.down = True
    run.kill(first)
    run.publisher(role="pub2", updates=3, keep_versions=rng.choice((None, 1)))  # the same name, another machine
    await run.settled(120.0)
    changed = [error for error in replica.exits if "does not extend" in str(error)]
    if changed and times <= 2:
        run.world.fail("misread", f"a replica took a misread record for another ledger: {changed[0]}")
