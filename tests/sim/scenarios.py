"""What is played. A scenario sets a stage and its faults from the seed; `finish` then takes the faults away and waits
for what must come: everybody at the newest version, and a publisher that publishes again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from sim.actors import Actor, Collecting, Replica, SimPublisher, SimWatcher
from sim.bucket import Fault
from sim.engines import SimEngine
from sim.invariants import Watch
from sim.trainer import Trainer, save
from sim.world import Trigger, World

CALM = 1500.0  #: virtual seconds within which everything must be well again
BUSY = 40  #: requests a second that nobody may exceed when all is done

Play = Callable[["Stage"], Coroutine[Any, Any, None]]
SCENARIOS: dict[str, Play] = {}


def scenario(play: Play) -> Play:
    SCENARIOS[play.__name__] = play
    return play


class Stage:
    """A world with its actors."""

    def __init__(self, world: World) -> None:
        self.world, self.rng = world, world.rng
        self.trainer = Trainer(world.rng)
        self.watch = Watch(world, self.trainer.base)
        self.publishers: list[SimPublisher] = []
        self.replicas: list[Replica] = []
        self.operators: list[Actor] = []

    def publisher(self, **options: Any) -> SimPublisher:
        kind = options.pop("kind", SimPublisher)
        actor: SimPublisher = kind(self.world, self.watch, self.trainer, **options)
        self.publishers.append(actor)
        actor.start()
        return actor

    def replica(self, number: int = 1, *, directory: bool = False, **options: Any) -> Replica:
        """A subscriber with an engine of its own, which holds the base."""
        machine = f"replica{number}"
        engine = None
        if not directory:
            engine = SimEngine(self.world, f"engine{number}", self.world.machine(machine), self.trainer.base)
            self.watch.engines.append(engine)
            self.world.at_kill.append(lambda process: self._engine_died(engine, process))
        replica = Replica(self.world, self.watch, f"sub{number}", engine=engine, machine=machine, **options)
        if directory:
            save(self.trainer.base, replica.directory)
            replica.machine.keep_all()
        self.replicas.append(replica)
        replica.start()
        return replica

    def beside(self, replica: Replica, role: str) -> Replica:
        """One more subscriber on the same engine."""
        other = Replica(self.world, self.watch, role, engine=replica.engine, machine=replica.machine.name)
        self.replicas.append(other)
        other.start()
        return other

    def collect(self, *, keep: int | None, take_over: bool) -> None:
        """Somebody runs `dcr gc`, if nobody does."""
        if not any(actor.alive for actor in self.operators):
            self.operators.append(Collecting(self.world, self.watch, keep=keep, take_over=take_over))
            self.operators[-1].start()

    def _engine_died(self, engine: SimEngine, process: Any) -> None:
        """Its supervisor starts it again: from the base, from another version, or from weights nobody knows."""
        if process is engine.process:
            self.world.loop.world_later(self.rng.uniform(1.0, 10.0), self._boot, engine)

    def _boot(self, engine: SimEngine) -> None:
        if self.world.ended or engine.alive:
            return
        draw = self.rng.random()
        lanes = self.trainer.base if draw < 0.6 else self.rng.choice(self.watch.versions)
        engine.boot(self.trainer.next("all") if draw > 0.9 else lanes)

    def weather(self, level: float) -> None:
        """Random faults of store and engines, at a rate."""
        self.world.store_rates = dict.fromkeys(Fault, level)
        self.world.engine_rate = level / 2
        self.world.rank_rate = level / 2

    def trigger(self, role: str, when: str, what: str, nth: int = 1, seconds: float = 30.0) -> None:
        self.world.triggers.append(Trigger(role, when, what, nth, seconds))

    async def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait; in vain is a violation."""
        deadline = self.world.loop.time() + seconds
        while not condition():
            if self.world.loop.time() > deadline:
                self.world.fail("liveness", f"not within {seconds:.0f} s: {what}; {self._where()}")
                await asyncio.sleep(1.0)
            await asyncio.sleep(1.0)

    def _where(self) -> str:
        replicas = [
            f"{r.role} {'alive' if r.alive else 'down'} served {self.served(r)} {r.exits[-1:]}" for r in self.replicas
        ]
        publishers = [
            f"{p.role} {'alive' if p.alive else 'down'} {p.left} left {p.exits[-1:]}" for p in self.publishers
        ]
        return f"head {self.watch.head}; {'; '.join([*replicas, *publishers])}"

    def served(self, replica: Replica) -> int:
        """The version that it serves now, -1 for none."""
        engine = replica.engine
        if engine is not None:
            proved = engine.core.proved
            return proved if engine.serving and proved is not None else -1
        return self.watch.serving.get(replica.process.name, -1) if replica.process and replica.alive else -1

    async def settled(self, seconds: float) -> None:
        """Until the publishers have published what they meant to, or for so long."""
        for _ in range(int(seconds)):
            if all(p.left <= 0 or p.down for p in self.publishers):
                return
            await asyncio.sleep(1.0)

    async def finish(self) -> None:
        """No more faults: everything must come to its goal, and stay quiet there."""
        world = self.world
        world.healed = True
        world.triggers.clear()
        world.partitioned.clear()
        world.down_until = 0.0
        world.note("healed")
        for machine in world.machines.values():
            machine.full = False
        for process in world.processes:
            world.thaw(process)
        final = await self._publish_again()
        await self.until(lambda: final.left <= 0, CALM, "publishing again")
        for replica in self.replicas:
            if not any(other.alive for other in self._beside(replica)):
                replica.down = False
                replica.start()
        await self.until(lambda: all(self._there(r) for r in self.replicas), CALM, "converging")
        await asyncio.sleep(20.0)
        began, requests = world.loop.time(), world.outcome.requests
        await asyncio.sleep(60.0)
        rate = (world.outcome.requests - requests) / (world.loop.time() - began)
        if rate > BUSY:
            world.fail("hot loop", f"{rate:.0f} requests a second with nothing to do")
        for replica in self.replicas:
            if replica.engine is not None:
                self.watch.engine(replica.engine)
            else:
                self.watch.directory(replica)
        self.watch.way_in()

    def _beside(self, replica: Replica) -> list[Replica]:
        """All subscribers of its engine, itself among them."""
        return [r for r in self.replicas if r.engine is replica.engine and r.machine is replica.machine]

    def _there(self, replica: Replica) -> bool:
        return any(self.served(r) == self.watch.head for r in self._beside(replica))

    async def _publish_again(self) -> SimPublisher:
        """The publisher that holds the stream goes on; if none does, an operator takes over for a new one."""
        await asyncio.sleep(90.0)
        owner = self.watch.tip.state.epoch if self.watch.tip else None
        for actor in self.publishers:
            ledger = actor.session.ledger if actor.alive and actor.session else None
            if ledger and owner and ledger.epoch == owner.seq and not owner.released:
                actor.left = max(actor.left, 1)
                return actor
        for actor in self.publishers:
            actor.down = True
            if actor.alive and actor.process:
                self.world.kill(actor.process)
        return self.publisher(role="pub9", name="last", take_over=True, updates=1, kind=SimPublisher)


def pick(stage: Stage, options: list[Any]) -> Any:
    return stage.rng.choice(options)


#: prefixes of failpoints; one that is passed more often is hit more often
PUBLISHER_POINTS = [
    "publish.", "publish.chunk", "publish.base", "publish.anchor", "publish.restore", "publish.uploaded",
    "publish.sealed", "publish.open", "ledger.", "ledger.seal", "ledger.open", "ledger.epoch", "ledger.anchor",
    "ledger.stream", "ledger.abort", "disk.mark", "disk.hint", "disk.spool", "disk.baseline", "disk.name", "retention.",
]  # fmt: skip
SUBSCRIBER_POINTS = [
    "subscribe.", "subscribe.staged", "subscribe.prepared", "subscribe.swapped", "subscribe.loaded", "subscribe.serv",
    "subscribe.prefetch", "subscribe.anchor", "subscribe.attached", "subscribe.proved", "disk.mark", "disk.staged",
]  # fmt: skip
DIRECTORY_POINTS = [
    "engine.dir.", "engine.dir.journal", "engine.dir.dirty", "engine.dir.hidden", "engine.dir.write",
    "engine.dir.data", "engine.dir.version", "engine.dir.shown", "engine.dir.clean", "engine.dir.move",
    "engine.dir.prepared", "engine.dir.incoming", "disk.journal", "disk.engine", "disk.tensors", "disk.checkpoint",
]  # fmt: skip
RANK_STEPS = ["attach", "start", "join", "approve", "check", "begin", "apply", "apply", "commit", "commit", "rollback", "close"]
ENGINE_CALLS = ["attach", "prove", "serve", "prepare", "swap", "swap", "load", "settle", "outcome", "status"]
STORE_STEPS = [
    "create:ledger/", "create:ledger/", "create:data/", "create:anchors/", "get:ledger/", "get:data/", "list:",
    "get:anchors/", "create:", "get:", "delete:",
]  # fmt: skip
LOSSES = ["REQUEST_LOST", "ANSWER_LOST", "GHOST"]


def some_weather(stage: Stage) -> None:
    """Mostly none: guided faults show more under a clear sky."""
    stage.weather(stage.rng.choice((0.0, 0.0, 0.02)))


@scenario
async def first(stage: Stage) -> None:
    """One publisher, one replica, and weather."""
    stage.weather(stage.rng.choice((0.0, 0.01, 0.05)))
    stage.publisher(updates=4)
    stage.replica(1, directory=stage.rng.random() < 0.4)
    await stage.settled(120.0)
    await stage.finish()


@scenario
async def publisher_dies(stage: Stage) -> None:
    """The publisher dies at a named point, and once more soon after; then it, or somebody else, goes on."""
    rng = stage.rng
    some_weather(stage)
    for _ in range(rng.choice((1, 2, 2))):
        what = rng.choice(("kill", "kill", "power", "terminate"))
        stage.trigger("pub1", f"point:{rng.choice(PUBLISHER_POINTS)}", what, rng.randint(1, 6))
    stage.publisher(updates=4, keep_versions=rng.choice((None, 1, 2)), anchor_every=rng.choice((1, 2, None)))
    stage.replica(1)
    await stage.settled(150.0)
    await stage.finish()


@scenario
async def subscriber_dies(stage: Stage) -> None:
    """The subscriber dies at a named point, twice in a row, over a live engine or a directory."""
    rng, directory = stage.rng, stage.rng.random() < 0.6
    some_weather(stage)
    points = SUBSCRIBER_POINTS + (DIRECTORY_POINTS * 2 if directory else [])
    for _ in range(rng.choice((1, 2, 3))):
        what = rng.choice(("kill", "kill", "power", "terminate"))
        stage.trigger("sub1", f"point:{rng.choice(points)}", what, rng.randint(1, 5))
    stage.publisher(updates=4, anchor_every=rng.choice((1, 3, None)))
    stage.replica(1, directory=directory)
    await stage.settled(150.0)
    await stage.finish()


@scenario
async def answer_is_lost(stage: Stage) -> None:
    """One request or answer of a chosen step is lost or late, and then somebody dies: two faults in a row."""
    rng = stage.rng
    some_weather(stage)
    for _ in range(rng.choice((1, 2, 3))):
        role, step = rng.choice(("pub1", "pub1", "sub1")), rng.choice(STORE_STEPS)
        stage.trigger(role, f"store:{step}", rng.choice(LOSSES), rng.randint(1, 12))
        if rng.random() < 0.5:
            stage.trigger(role, f"store:{rng.choice(STORE_STEPS)}", "kill", rng.randint(1, 20))
    if rng.random() < 0.3:
        stage.trigger("pub1", f"store:{rng.choice(STORE_STEPS)}", "down", rng.randint(1, 20), rng.choice((10.0, 45.0, 120.0)))
    stage.publisher(updates=5, keep_versions=rng.choice((None, 2)))
    stage.replica(1, directory=rng.random() < 0.3, lag=rng.choice((0.0, 0.0, 20.0)))
    await stage.settled(250.0)
    await stage.finish()


@scenario
async def take_over(stage: Stage) -> None:
    """A second publisher takes over while the first is stopped at a chosen step; then the zombie wakes."""
    rng = stage.rng
    some_weather(stage)
    steps = [f"point:{point}" for point in PUBLISHER_POINTS] + [f"store:{step}" for step in STORE_STEPS]
    stage.trigger("pub1", rng.choice(steps), "stop", rng.randint(1, 8), rng.uniform(20.0, 90.0))
    if rng.random() < 0.4:
        stage.trigger("pub2", rng.choice(steps), rng.choice(("kill", "stop", *LOSSES)), rng.randint(1, 6), 40.0)
    if rng.random() < 0.4:
        stage.trigger("pub1", f"store:{rng.choice(STORE_STEPS)}", rng.choice(LOSSES), rng.randint(1, 12))
    stage.publisher(updates=5, keep_versions=rng.choice((None, 1)))
    stage.replica(1)
    await asyncio.sleep(rng.uniform(5.0, 60.0))
    same_name = rng.random() < 0.4
    stage.publisher(
        role="pub2", name="main" if same_name else "other", take_over=not same_name, updates=3,
        keep_versions=rng.choice((None, 1)),
    )  # fmt: skip
    if rng.random() < 0.3:
        await asyncio.sleep(rng.uniform(1.0, 30.0))
        stage.publisher(role="pub3", name="third", take_over=True, updates=2)
    await stage.settled(150.0)
    await stage.finish()


@scenario
async def engine_dies(stage: Stage) -> None:
    """The engine dies, or hangs, inside a chosen call or between two steps of its ranks; what it boots from varies."""
    rng = stage.rng
    some_weather(stage)
    for _ in range(rng.choice((1, 2, 3))):
        where = f"wire:{rng.randrange(2)}:{rng.choice(RANK_STEPS)}" if rng.random() < 0.6 else f"engine:{rng.choice(ENGINE_CALLS)}"
        stage.trigger("engine1", where, rng.choice(("kill", "kill", "power", "stop")), rng.randint(1, 4), rng.choice((20.0, 90.0)))
    if rng.random() < 0.4:
        stage.trigger("sub1", f"point:{rng.choice(SUBSCRIBER_POINTS)}", "kill", rng.randint(1, 4))
    stage.publisher(updates=5, anchor_every=rng.choice((1, 2, 4)))
    stage.replica(1)
    await stage.settled(200.0)
    await stage.finish()


@scenario
async def rank_fails(stage: Stage) -> None:
    """A rank fails in a step of a change, once or twice, and the subscriber or an answer is lost beside it."""
    rng = stage.rng
    some_weather(stage)
    for _ in range(rng.choice((1, 2, 3, 4))):
        stage.trigger("engine1", f"wire:{rng.randrange(2)}:{rng.choice(RANK_STEPS)}", "fails", rng.randint(1, 4))
    if rng.random() < 0.5:
        stage.trigger("engine1", f"engine:{rng.choice(ENGINE_CALLS)}", rng.choice(("answer lost", "no answer", "request lost")), rng.randint(1, 3))
    if rng.random() < 0.5:
        stage.trigger("sub1", f"point:{rng.choice(SUBSCRIBER_POINTS)}", rng.choice(("kill", "stop")), rng.randint(1, 4), 50.0)
    stage.publisher(updates=5, anchor_every=rng.choice((1, 2, 4)))
    stage.replica(1)
    await stage.settled(200.0)
    await stage.finish()


@scenario
async def two_subscribers(stage: Stage) -> None:
    """Two subscribers on one engine: one is fenced, a stopped one wakes after it, both die now and then."""
    rng, directory = stage.rng, stage.rng.random() < 0.4
    some_weather(stage)
    points = SUBSCRIBER_POINTS + (DIRECTORY_POINTS if directory else [])
    for role in ("sub1", "sub2"):
        if rng.random() < 0.7:
            stage.trigger(role, f"point:{rng.choice(points)}", rng.choice(("kill", "stop", "stop")), rng.randint(1, 5), rng.uniform(5, 60))
    if not directory and rng.random() < 0.5:
        stage.trigger("engine1", f"wire:{rng.randrange(2)}:{rng.choice(RANK_STEPS)}", rng.choice(("fails", "kill")), rng.randint(1, 5))
    stage.publisher(updates=5, anchor_every=rng.choice((1, 3)))
    one = stage.replica(1, directory=directory)
    await asyncio.sleep(rng.uniform(1.0, 60.0))
    stage.beside(one, "sub2")
    await stage.settled(150.0)
    await stage.finish()


@scenario
async def watched_directory(stage: Stage) -> None:
    """`--watch`: the watcher dies at a chosen point while its trainer writes checkpoints."""
    rng = stage.rng
    some_weather(stage)
    points = [*PUBLISHER_POINTS, "publish.shard", "publish.remembered"]
    for _ in range(rng.choice((1, 2))):
        stage.trigger("pub1", f"point:{rng.choice(points)}", rng.choice(("kill", "kill", "terminate")), rng.randint(1, 6))
    stage.publisher(kind=SimWatcher, updates=4)
    stage.replica(1, directory=rng.random() < 0.5)
    await stage.settled(120.0)
    await stage.finish()


@scenario
async def disk_is_full(stage: Stage) -> None:
    """A disk is full for a while, from a chosen write on."""
    rng, directory = stage.rng, stage.rng.random() < 0.6
    some_weather(stage)
    stage.trigger("pub1", f"point:disk.{rng.choice(('mark', 'spool', 'hint', 'baseline', 'name', ''))}", "full", rng.randint(1, 8), rng.uniform(5, 60))
    stage.trigger("sub1", f"point:disk.{rng.choice(('mark', 'staged', 'engine', 'journal', 'tensors', ''))}", "full", rng.randint(1, 8), rng.uniform(5, 60))
    if rng.random() < 0.4:
        stage.trigger(rng.choice(("pub1", "sub1")), "point:disk.", rng.choice(("kill", "power")), rng.randint(1, 30))
    stage.publisher(updates=4)
    stage.replica(1, directory=directory)
    await stage.settled(150.0)
    await stage.finish()


@scenario
async def late_replica(stage: Stage) -> None:
    """A replica begins, or comes back, many versions behind, while retention deletes; its engine takes little at once."""
    rng = stage.rng
    some_weather(stage)
    stage.world.stage_cap = rng.choice((1 << 20, 6000, 12000))
    if rng.random() < 0.6:
        stage.trigger("sub1", f"point:{rng.choice(SUBSCRIBER_POINTS)}", rng.choice(("kill", "stop")), rng.randint(1, 4), rng.uniform(10, 60))
    if rng.random() < 0.5:
        stage.trigger("pub1", f"point:{rng.choice(('retention.', 'publish.anchor', 'ledger.floor'))}", "kill", rng.randint(1, 3))
    stage.publisher(updates=7, pause=2.0, keep_versions=rng.choice((1, 2)), anchor_every=rng.choice((1, 2, 3)))
    if rng.random() < 0.5:
        stage.replica(2, directory=rng.random() < 0.5)
    await asyncio.sleep(rng.uniform(10.0, 60.0))
    stage.replica(1, directory=rng.random() < 0.3, staging_limit=rng.choice((1 << 20, 4000)))
    await stage.settled(150.0)
    await stage.finish()


@scenario
async def power_cut(stage: Stage) -> None:
    """Machines lose power at any step."""
    rng, directory = stage.rng, stage.rng.random() < 0.7
    some_weather(stage)
    for _ in range(rng.choice((1, 2, 3))):
        role = rng.choice(("pub1", "sub1", "sub1"))
        points = PUBLISHER_POINTS if role == "pub1" else SUBSCRIBER_POINTS + DIRECTORY_POINTS
        when = f"point:{rng.choice(points)}" if rng.random() < 0.7 else "step"
        stage.trigger(role, when, "power", rng.randint(1, 6) if when != "step" else rng.randint(1, 800))
    stage.publisher(updates=4, anchor_every=rng.choice((1, 3)))
    stage.replica(1, directory=directory)
    await stage.settled(150.0)
    await stage.finish()


@scenario
async def foreign_write(stage: Stage) -> None:
    """Somebody writes to an engine's weights through another door, at any time."""
    rng = stage.rng
    some_weather(stage)
    stage.publisher(updates=5, anchor_every=rng.choice((1, 2)))
    replica = stage.replica(1)
    if rng.random() < 0.4:
        stage.trigger("sub1", f"point:{rng.choice(SUBSCRIBER_POINTS)}", "kill", rng.randint(1, 4))
    for _ in range(rng.choice((1, 2))):
        await asyncio.sleep(rng.uniform(3.0, 30.0))
        if replica.engine and replica.engine.alive:
            replica.engine.write_foreign()
    await stage.settled(150.0)
    await stage.finish()


@scenario
async def operator(stage: Stage) -> None:
    """Somebody runs `dcr gc` beside it all, with and without a claim."""
    rng = stage.rng
    some_weather(stage)
    stage.trigger("pub1", f"point:{rng.choice(PUBLISHER_POINTS)}", rng.choice(("kill", "stop", "terminate")), rng.randint(1, 6), 40.0)
    stage.trigger("gc1", f"point:{rng.choice(('retention.', 'ledger.'))}", rng.choice(("kill", "stop")), rng.randint(1, 4), 40.0)
    stage.publisher(updates=6, keep_versions=rng.choice((None, 2)), anchor_every=rng.choice((1, 2)))
    stage.replica(1, directory=rng.random() < 0.3)
    for _ in range(3):
        await asyncio.sleep(rng.uniform(5.0, 30.0))
        stage.collect(keep=rng.choice((None, 1, 2)), take_over=rng.random() < 0.3)
    await stage.settled(150.0)
    await stage.finish()


@scenario
async def anything(stage: Stage) -> None:
    """Everybody, and everything at random."""
    rng = stage.rng
    stage.weather(rng.choice((0.01, 0.03)))
    roles = ["pub1", "pub2", "sub1", "sub2", "engine1"]
    for _ in range(rng.randint(2, 8)):
        what = rng.choice(("kill", "kill", "power", "stop", "terminate", "partition", "full"))
        stage.trigger(rng.choice(roles), "step", what, rng.randint(1, 1500), rng.uniform(5.0, 90.0))
    stage.publisher(updates=5, keep_versions=rng.choice((None, 1, 3)), anchor_every=rng.choice((1, 2, 4)))
    stage.replica(1)
    stage.replica(2, directory=rng.random() < 0.5, lag=rng.choice((0.0, 10.0)))
    if rng.random() < 0.5:
        await asyncio.sleep(rng.uniform(5.0, 60.0))
        stage.publisher(role="pub2", name="other", take_over=True, updates=3)
    await stage.settled(200.0)
    await stage.finish()
