"""Scenarios of many ranks that publish one stream (musts P1 to P3, P7), with faults of some of them."""

from __future__ import annotations

import asyncio
from typing import Any

from sim.ranks import LAG, Group
from sim.scenario_run import ScenarioRun, scenario
from sim.scenarios import LOSSES, PUBLISHER, STORE, points, some_random_faults, take_names

LEADER = PUBLISHER + points(
    "publish.declared", "publish.verdict", "publish.joined", "publish.uploaded", "publish.part",
    "publish.anchor.shared",
)  # fmt: skip
MEMBER = points(
    "publish.", "publish.member", "publish.member.open", "publish.member.fate", "publish.declared", "publish.part",
    "publish.sums", "publish.uploaded", "publish.chunk", "publish.baseline", "publish.restore", "publish.failed",
    "publish.anchor", "disk.hint", "disk.baseline", "disk.mark", "disk.spool",
)  # fmt: skip


def any_rank(run: ScenarioRun, *, leader: float = 0.3) -> tuple[str, list[str]]:
    """A role, and the instants that it passes."""
    if run.chance(leader):
        return "rank0", LEADER
    return f"rank{run.rng.choice((1, 1, 2, 3))}", MEMBER


@scenario(publish_seconds=150.0)
async def ranks(run: ScenarioRun) -> None:
    """A group of ranks, a replica, and weather."""
    run.random_faults(run.rng.choice((0.0, 0.01, 0.04)))
    run.group(updates=4, worlds=(2, 3, 4, 5))
    run.replica(1, directory=run.chance(0.4))


@scenario(publish_seconds=200.0)
async def rank_dies(run: ScenarioRun) -> None:
    """A rank dies at a named point, and once more later; the group starts anew, with another world and other cuts."""
    rng = run.rng
    some_random_faults(run)
    for _ in run.times(1, 2, 3):
        role, where = any_rank(run)
        run.hit(role, where, ("kill", "kill", "power", "terminate"), 6)
    run.group(
        updates=4, keep_versions=rng.choice((None, 1, 2)), anchor_every=rng.choice((1, 2, None)),
        steady=run.chance(0.4),
    )  # fmt: skip
    run.replica(1, directory=run.chance(0.4))


@scenario(publish_seconds=200.0)
async def rank_lags(run: ScenarioRun) -> None:
    """Ranks are stopped at a chosen step while the others go on, and an answer is lost beside it."""
    rng = run.rng
    some_random_faults(run)
    for _ in run.times(1, 2, 3):
        role, where = any_rank(run, leader=0.2)
        run.hit(role, where + STORE, ("stop", "stop", "partition"), 8, (5.0, 20.0, 60.0, 300.0))
    if run.chance(0.4):
        run.hit(any_rank(run)[0], STORE, LOSSES, 12)
    run.group(updates=5, anchor_every=rng.choice((1, 3, None)), keep_versions=rng.choice((None, 1)))
    run.replica(1, directory=run.chance(0.4))


@scenario(publish_seconds=150.0)
async def leftover_rank(run: ScenarioRun) -> None:
    """A rank sleeps through the end of its group, unnoticed, and wakes when the next one has the stream."""
    rng = run.rng
    some_random_faults(run)
    group = run.group(updates=5, keep_versions=rng.choice((None, 1)), anchor_every=rng.choice((1, 2, 3)))
    run.replica(1)
    await run.wait(0.0, 20.0)
    for _ in run.times(1, 1, 2):
        await until_started(group)
        number = rng.randrange(len(group.ranks)) if group.ranks else 0
        group.leave_over(number)
        where = LEADER if number == 0 else MEMBER
        run.hit(f"rank{number}", where + STORE, ("stop",), 5, (15.0, 30.0, 60.0, 120.0))
        other = rng.choice([n for n in range(4) if n != number])
        run.hit(f"rank{other}", ("step",), ("kill",), 600)
        await run.wait(10.0, 40.0)
        for rank in [r for r in group.ranks if r.number != number and r.alive and r.process][:1]:
            run.kill(rank)
        await run.wait(10.0, 40.0)


async def until_started(group: Group) -> None:
    for _ in range(60):
        if len(group.ranks) > 1 and all(rank.alive and rank.session for rank in group.ranks):
            return
        await asyncio.sleep(1.0)


@scenario(publish_seconds=200.0)
async def rank_disagrees(run: ScenarioRun) -> None:
    """A rank leaves calls out, publishes other steps, or has not all of its tensors: nothing of that is published."""
    rng = run.rng
    lag = rng.choice((LAG, 1e6))  # who says that he fails is not waited for, however much patience there is
    if lag == LAG:
        some_random_faults(run)
    group = run.group(updates=5, anchor_every=rng.choice((1, 3)), lag=lag)
    run.replica(1, directory=run.chance(0.4))
    await run.wait(0.0, 10.0)
    for _ in run.times(1, 2, 3):
        await until_started(group)
        for rank in group.ranks[:1] if run.chance(0.2) else group.ranks[1:]:
            call = rank.calls + rng.randint(1, 3)
            kind = rng.choice(("skips", "breaks", "shifts", "runs ahead", "nothing"))
            run.world.outcome.faults[f"rank {kind}"] += 1
            if kind == "skips":
                rank.skipped |= set(range(call, call + rng.randint(1, 3)))
            elif kind == "breaks":
                rank.broken.add(call)
            elif kind == "shifts":
                rank.of.shift[rank.number] = rng.randint(1, 2)
            elif kind == "runs ahead":
                rank.calls += rng.randint(1, 2)
        await run.wait(5.0, 30.0)
        if group.of:
            group.of.shift.clear()


@scenario(publish_seconds=200.0)
async def rank_is_damaged(run: ScenarioRun) -> None:
    """Bits flip in what ranks hold, and what they find at a restart is not what they left: none of it is published."""
    rng = run.rng
    flips = rng.choice((0.0, 0.3))  # found by the anchor after the seal, which nothing else may keep from being written
    if not flips:
        some_random_faults(run)
        for _ in run.times(1, 2, 3):
            role, where = any_rank(run)
            run.hit(role, where, ("kill", "kill", "power"), 12)
    run.group(updates=5, flips=flips, lies=rng.choice((0.3, 0.6)), anchor_every=1, steady=True)
    run.replica(1, directory=run.chance(0.4))


@scenario(publish_seconds=200.0)
async def twin_rank(run: ScenarioRun) -> None:
    """Two processes believe to be one rank, for a while."""
    rng = run.rng
    some_random_faults(run)
    group = run.group(updates=5, worlds=(2, 3))
    run.replica(1, directory=run.chance(0.4))
    await run.wait(0.0, 15.0)
    await until_started(group)
    twin = group.twin(rng.randrange(1, 2))
    if run.chance(0.5):
        run.hit("rank1", MEMBER + STORE, ("stop",), 6, (10.0, 30.0))
    await run.wait(10.0, 60.0)
    if twin:
        run.kill(twin)
    for rank in group.ranks[:1]:  # whoever sees two processes starts all anew
        run.kill(rank)


@scenario(publish_seconds=200.0)
async def worlds(run: ScenarioRun) -> None:
    """A group, then one process, then a group again, each of another size; some end kindly, some are taken over."""
    rng = run.rng
    some_random_faults(run)
    run.replica(1, directory=run.chance(0.4))
    keep, every = rng.choice((None, 1)), rng.choice((1, 2))
    first = run.group(updates=3, worlds=(4, 5), keep_versions=keep, anchor_every=every)
    await run.settled(60.0)
    first.end(kindly=run.chance(0.6))
    await run.wait(0.0, 10.0)
    one = run.publisher(role="pub1", name="main", updates=2, take_over=True, keep_versions=keep, anchor_every=every)
    if run.chance(0.4):
        run.hit("pub1", PUBLISHER, ("kill", "stop"), 5, (20.0,))
    await run.settled(40.0)
    one.down = True
    if one.alive and one.process and one.process.main and run.chance(0.5):
        one.process.main.cancel()
    same: dict[str, Any] = {"name": "main"} if run.chance(0.5) else {"name": "other", "take_over": True}
    run.group(role="group2", updates=2, worlds=(2, 3), keep_versions=keep, anchor_every=every, **same)
    if run.chance(0.4):
        role, where = any_rank(run)
        run.hit(role, where, ("kill", "stop"), 5, (20.0,))


@scenario(publish_seconds=150.0)
async def ranks_squatted(run: ScenarioRun) -> None:
    """Names that a rank is about to use are taken, its disk is full, its answers are lost: the attempt is given up."""
    rng = run.rng
    some_random_faults(run)
    take_names(run, 30)
    for _ in run.times(1, 2):
        run.hit(any_rank(run)[0], STORE, LOSSES, 12)
    if run.chance(0.5):
        run.hit(any_rank(run)[0], points("disk.spool", "disk.hint", "disk.baseline"), ("full",), 8, (5.0, 20.0))
    run.group(updates=4, keep_versions=rng.choice((None, 1)), anchor_every=rng.choice((1, 2)))
    run.replica(1, directory=run.chance(0.3))


@scenario(publish_seconds=200.0)
async def ranks_and_anything(run: ScenarioRun) -> None:
    """A group, other publishers, collectors, and everything at random."""
    rng = run.rng
    run.random_faults(rng.choice((0.01, 0.03)))
    whats = ("kill", "power", "stop", "stop", "terminate", "partition", "full")
    for _ in range(rng.randint(2, 6)):
        run.hit(rng.choice(("rank0", "rank1", "rank2", "sub1", "pub2")), ("step",), whats, 1500, (5.0, 30.0, 90.0))
    run.group(updates=5, keep_versions=rng.choice((None, 1, 3)), anchor_every=rng.choice((1, 2, 4)), lies=0.2)
    run.replica(1, directory=run.chance(0.5), lag=rng.choice((0.0, 10.0)))
    await run.wait(5.0, 60.0)
    if run.chance(0.3):
        run.publisher(role="pub2", name="other", take_over=True, updates=2)
    if run.chance(0.4):
        run.collect(keep=rng.choice((None, 1, 2)), take_over=run.chance(0.3))
