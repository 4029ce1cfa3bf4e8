"""Scenarios of single processes. A scenario creates actors and faults from the seed; `ScenarioRun.finish` then ends the
faults and waits for what must come: every replica at the newest version, and a publisher that publishes again.
"""

from __future__ import annotations

from typing import Any

from sim.actors import SimWatcher
from sim.clock import Process
from sim.scenario_run import SCENARIOS, ScenarioRun, scenario
from sim.world import RANK_FAULTS

__all__ = ["SCENARIOS", "ScenarioRun", "scenario"]


def points(*prefixes: str) -> list[str]:
    """Failpoints, by the beginnings of their names; one that is passed more often is hit more often."""
    return [f"point:{prefix}" for prefix in prefixes]


PUBLISHER = points(
    "publish.", "publish.chunk", "publish.base", "publish.anchor", "publish.restore", "publish.uploaded",
    "publish.sealed", "publish.open", "ledger.", "ledger.seal", "ledger.open", "ledger.epoch", "ledger.anchor",
    "ledger.stream", "ledger.abort", "disk.mark", "disk.hint", "disk.spool", "disk.baseline", "disk.name", "retention.",
)  # fmt: skip
SUBSCRIBER = points(
    "subscribe.", "subscribe.staged", "subscribe.prepared", "subscribe.swapped", "subscribe.loaded", "subscribe.serv",
    "subscribe.prefetch", "subscribe.anchor", "subscribe.attached", "subscribe.proved", "disk.mark", "disk.staged",
)  # fmt: skip
DIRECTORY = points(
    "engine.dir.", "engine.dir.journal", "engine.dir.dirty", "engine.dir.hidden", "engine.dir.write",
    "engine.dir.data", "engine.dir.version", "engine.dir.shown", "engine.dir.clean", "engine.dir.move",
    "engine.dir.prepared", "engine.dir.incoming", "disk.journal", "disk.engine", "disk.tensors", "disk.checkpoint",
)  # fmt: skip
RANKS = [
    f"wire:{rank}:{op}"
    for rank in (0, 1)
    for op in ("attach", "start", "join", "approve", "check", "begin", "apply", "apply", "commit", "commit", "rollback")
]
CALLS = [
    f"engine:{call}" for call in ("attach", "prove", "serve", "prepare", "swap", "swap", "load", "settle", "outcome")
]
STORE = [
    f"store:{step}"
    for step in (
        "create:ledger/", "create:ledger/", "create:data/", "create:anchors/", "get:ledger/", "get:data/", "list:",
        "get:anchors/", "create:", "get:", "delete:",
    )
]  # fmt: skip
LOSSES = ("REQUEST_LOST", "ANSWER_LOST", "GHOST")
UNANSWERED = ("answer lost", "no answer", "request lost")


def some_random_faults(run: ScenarioRun) -> None:
    """Mostly none: guided faults show more under a clear sky."""
    run.random_faults(run.rng.choice((0.0, 0.0, 0.02)))


def take_names(run: ScenarioRun, most: int) -> None:
    """One or two of the first `most` names under which somebody creates an object are taken by other bytes."""
    rng, bucket = run.rng, run.world.bucket
    right, left = bucket.act, [rng.randint(1, most) for _ in run.times(1, 2)]

    def act(operation: str, key: str, body: bytes, by: Process) -> Any:
        if operation == "create" and key.startswith(("data/", "anchors/")) and not key.startswith("data/0/"):
            left[:] = [count - 1 for count in left]
            if 0 in left and key not in bucket.objects:
                run.world.outcome.faults["name taken"] += 1
                bucket.objects[key] = rng.choice((b"", body[:-1], body[:-1] + bytes([body[-1] ^ 1]), b"other"))
        return right(operation, key, body, by)

    bucket.act = act  # type: ignore[method-assign]


@scenario(publish_seconds=120.0)
async def first(run: ScenarioRun) -> None:
    """One publisher, one replica, and weather."""
    run.random_faults(run.rng.choice((0.0, 0.01, 0.05)))
    run.publisher(updates=4)
    run.replica(1, directory=run.chance(0.4))


@scenario(publish_seconds=150.0)
async def publisher_dies(run: ScenarioRun) -> None:
    """The publisher dies at a named point, and once more soon after; then it, or somebody else, goes on."""
    rng = run.rng
    some_random_faults(run)
    for _ in run.times(1, 2, 2):
        run.hit("pub1", PUBLISHER, ("kill", "kill", "power", "terminate"), 6)
    run.publisher(updates=4, keep_versions=rng.choice((None, 1, 2)), anchor_every=rng.choice((1, 2, None)))
    run.replica(1)


@scenario(publish_seconds=150.0)
async def subscriber_dies(run: ScenarioRun) -> None:
    """The subscriber dies at a named point, twice in a row, over a live engine or a directory."""
    rng, directory = run.rng, run.chance(0.6)
    some_random_faults(run)
    for _ in run.times(1, 2, 3):
        places = SUBSCRIBER + (DIRECTORY * 2 if directory else [])
        run.hit("sub1", places, ("kill", "kill", "power", "terminate"), 5)
    run.publisher(updates=4, anchor_every=rng.choice((1, 3, None)))
    run.replica(1, directory=directory)


@scenario(publish_seconds=250.0)
async def answer_is_lost(run: ScenarioRun) -> None:
    """One request or answer of a chosen step is lost or late, and then somebody dies: two faults in a row."""
    rng = run.rng
    some_random_faults(run)
    for _ in run.times(1, 2, 3):
        role = rng.choice(("pub1", "pub1", "sub1"))
        run.hit(role, STORE, LOSSES, 12)
        if run.chance(0.5):
            run.hit(role, STORE, ("kill",), 20)
    if run.chance(0.3):
        run.hit("pub1", STORE, ("down",), 20, (10.0, 45.0, 120.0))
    run.publisher(updates=5, keep_versions=rng.choice((None, 2)))
    run.replica(1, directory=run.chance(0.3), lag=rng.choice((0.0, 0.0, 20.0)))


@scenario(publish_seconds=150.0)
async def take_over(run: ScenarioRun) -> None:
    """A second publisher takes over while the first is stopped at a chosen step; then the zombie wakes."""
    rng = run.rng
    some_random_faults(run)
    run.hit("pub1", PUBLISHER + STORE, ("stop",), 8, (20.0, 40.0, 90.0))
    if run.chance(0.4):
        run.hit("pub2", PUBLISHER + STORE, ("kill", "stop"), 6, (40.0,))
    if run.chance(0.4):
        run.hit(rng.choice(("pub1", "pub2")), STORE, LOSSES, 12)
    run.publisher(updates=5, keep_versions=rng.choice((None, 1)))
    run.replica(1)
    await run.wait(5.0, 60.0)
    same = run.chance(0.4)  # the same configured name: it may claim by itself
    keep = rng.choice((None, 1))
    run.publisher(role="pub2", name="main" if same else "other", take_over=not same, updates=3, keep_versions=keep)
    if run.chance(0.3):
        await run.wait(1.0, 30.0)
        run.publisher(role="pub3", name="third", take_over=True, updates=2)


@scenario(publish_seconds=200.0)
async def engine_dies(run: ScenarioRun) -> None:
    """The engine dies, or hangs, inside a chosen call or between two steps of its ranks; what it boots from varies."""
    rng = run.rng
    some_random_faults(run)
    for _ in run.times(1, 2, 3):
        run.hit("engine1", RANKS if run.chance(0.6) else CALLS, ("kill", "kill", "power", "stop"), 4, (20.0, 90.0))
    if run.chance(0.4):
        run.hit("sub1", SUBSCRIBER, ("kill",), 4)
    run.publisher(updates=5, anchor_every=rng.choice((1, 2, 4)))
    run.replica(1)


@scenario(publish_seconds=200.0)
async def rank_fails(run: ScenarioRun) -> None:
    """A rank fails in a step of a change, once or twice, and the subscriber or an answer is lost beside it."""
    rng = run.rng
    some_random_faults(run)
    for _ in run.times(1, 2, 3, 4):
        run.hit("engine1", RANKS, RANK_FAULTS, 4)
    if run.chance(0.5):
        run.hit("engine1", CALLS, UNANSWERED, 3)
    if run.chance(0.5):
        run.hit("sub1", SUBSCRIBER, ("kill", "stop"), 4, (50.0,))
    run.publisher(updates=5, anchor_every=rng.choice((1, 2, 4)))
    run.replica(1)


@scenario(publish_seconds=150.0)
async def two_subscribers(run: ScenarioRun) -> None:
    """Two subscribers on one engine: one is fenced, a stopped one wakes after it, both die now and then."""
    rng, directory = run.rng, run.chance(0.4)
    some_random_faults(run)
    for role in ("sub1", "sub2"):
        if run.chance(0.7):
            run.hit(role, SUBSCRIBER + DIRECTORY * directory, ("kill", "stop", "stop"), 5, (5.0, 20.0, 60.0))
    if not directory and run.chance(0.5):
        run.hit("engine1", RANKS, (*RANK_FAULTS, "kill"), 5)
    run.publisher(updates=5, anchor_every=rng.choice((1, 3)))
    one = run.replica(1, directory=directory)
    await run.wait(1.0, 60.0)
    run.beside(one, "sub2")


@scenario(publish_seconds=120.0)
async def watched_directory(run: ScenarioRun) -> None:
    """`--watch`: the watcher dies at a chosen point while its trainer writes checkpoints."""
    some_random_faults(run)
    for _ in run.times(1, 2):
        run.hit("pub1", [*PUBLISHER, *points("publish.shard", "publish.remembered")], ("kill", "kill", "terminate"), 6)
    run.publisher(kind=SimWatcher, updates=4)
    run.replica(1, directory=run.chance(0.5))


@scenario(publish_seconds=150.0)
async def disk_is_full(run: ScenarioRun) -> None:
    """A disk is full for a while, from a chosen write on."""
    rng, directory = run.rng, run.chance(0.6)
    some_random_faults(run)
    for role, files in (
        ("pub1", ("mark", "spool", "hint", "baseline", "name", "")),
        ("sub1", ("mark", "staged", "engine", "journal", "tensors", "")),
    ):
        run.hit(role, points(*(f"disk.{name}" for name in files)), ("full",), 8, (5.0, 20.0, 60.0))
    if run.chance(0.4):
        run.hit(rng.choice(("pub1", "sub1")), points("disk."), ("kill", "power"), 30)
    run.publisher(updates=4)
    run.replica(1, directory=directory)


@scenario(publish_seconds=150.0)
async def late_replica(run: ScenarioRun) -> None:
    """A replica comes many versions behind, while retention deletes; its engine takes little at once."""
    rng = run.rng
    some_random_faults(run)
    run.world.stage_cap = rng.choice((1 << 20, 6000, 12000))
    if run.chance(0.6):
        run.hit("sub1", SUBSCRIBER, ("kill", "stop"), 4, (10.0, 60.0))
    if run.chance(0.5):
        run.hit("pub1", points("retention.", "publish.anchor", "ledger.floor"), ("kill",), 3)
    run.publisher(updates=7, pause=2.0, keep_versions=rng.choice((1, 2)), anchor_every=rng.choice((1, 2, 3)))
    if run.chance(0.5):
        run.replica(2, directory=run.chance(0.5))
    await run.wait(10.0, 60.0)
    run.replica(1, directory=run.chance(0.3), staging_limit=rng.choice((1 << 20, 4000)))


@scenario(publish_seconds=150.0)
async def power_cut(run: ScenarioRun) -> None:
    """Machines lose power at any step."""
    rng, directory = run.rng, run.chance(0.7)
    some_random_faults(run)
    for _ in run.times(1, 2, 3):
        role = rng.choice(("pub1", "sub1", "sub1"))
        if run.chance(0.7):
            run.hit(role, PUBLISHER if role == "pub1" else SUBSCRIBER + DIRECTORY, ("power",), 6)
        else:
            run.hit(role, ("step",), ("power",), 800)
    run.publisher(updates=4, anchor_every=rng.choice((1, 3)))
    run.replica(1, directory=directory)


@scenario(publish_seconds=150.0)
async def foreign_write(run: ScenarioRun) -> None:
    """Somebody writes to an engine's weights through another door, at any time."""
    rng = run.rng
    some_random_faults(run)
    run.publisher(updates=5, anchor_every=rng.choice((1, 2)))
    replica = run.replica(1)
    if run.chance(0.4):
        run.hit("sub1", SUBSCRIBER, ("kill",), 4)
    for _ in run.times(1, 2):
        await run.wait(3.0, 30.0)
        if replica.engine and replica.engine.alive:
            replica.engine.write_foreign()


@scenario(publish_seconds=150.0)
async def operator(run: ScenarioRun) -> None:
    """Somebody runs `dcr gc` beside it all, with and without a claim."""
    rng = run.rng
    some_random_faults(run)
    run.hit("pub1", PUBLISHER, ("kill", "stop", "terminate"), 6, (40.0,))
    run.hit("gc1", points("retention.", "ledger."), ("kill", "stop"), 4, (40.0,))
    run.publisher(updates=6, keep_versions=rng.choice((None, 2)), anchor_every=rng.choice((1, 2)))
    run.replica(1, directory=run.chance(0.3))
    for _ in range(3):
        await run.wait(5.0, 30.0)
        run.collect(keep=rng.choice((None, 1, 2)), take_over=run.chance(0.3))


@scenario(publish_seconds=200.0)
async def anything(run: ScenarioRun) -> None:
    """Everybody, and everything at random."""
    rng = run.rng
    run.random_faults(rng.choice((0.01, 0.03)))
    whats = ("kill", "kill", "power", "stop", "terminate", "partition", "full")
    for _ in range(rng.randint(2, 8)):
        run.hit(rng.choice(("pub1", "pub2", "sub1", "sub2", "engine1")), ("step",), whats, 1500, (5.0, 30.0, 90.0))
    run.publisher(updates=5, keep_versions=rng.choice((None, 1, 3)), anchor_every=rng.choice((1, 2, 4)))
    run.replica(1)
    run.replica(2, directory=run.chance(0.5), lag=rng.choice((0.0, 10.0)))
    if run.chance(0.5):
        await run.wait(5.0, 60.0)
        run.publisher(role="pub2", name="other", take_over=True, updates=3)
