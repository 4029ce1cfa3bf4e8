"""What is played. A scenario sets a stage and its faults from the seed; `finish` then takes the faults away and waits
for what must come: everybody at the newest version, and a publisher that publishes again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from sim.actors import Actor, Replica, SimPublisher
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
        return self.watch.served.get(replica.role, -1) if replica.alive else -1

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
            replica.down = False
            replica.start()
        await self.until(lambda: all(self.served(r) == self.watch.head for r in self.replicas), CALM, "converging")
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

    async def _publish_again(self) -> SimPublisher:
        """The publisher that holds the stream goes on; if none does, an operator takes over for a new one."""
        await asyncio.sleep(90.0)
        for actor in self.publishers:
            if actor.alive and not actor.down:
                actor.left = max(actor.left, 1)
                return actor
        return self.publisher(role="pub9", name="last", take_over=True, updates=1, kind=SimPublisher)


def pick(stage: Stage, options: list[Any]) -> Any:
    return stage.rng.choice(options)


@scenario
async def first(stage: Stage) -> None:
    """One publisher, one replica, and weather."""
    stage.weather(stage.rng.choice((0.0, 0.01, 0.05)))
    stage.publisher(updates=4)
    stage.replica(1, directory=stage.rng.random() < 0.4)
    await stage.settled(120.0)
    await stage.finish()


#: prefixes of failpoints; one that is passed more often is hit more often
PUBLISHER_POINTS = [
    "publish.", "publish.chunk", "publish.base", "publish.anchor", "publish.restore", "publish.uploaded",
    "publish.sealed", "publish.open", "ledger.", "ledger.seal", "ledger.open", "ledger.epoch", "ledger.anchor",
    "ledger.stream", "ledger.abort", "disk.mark", "disk.hint", "disk.spool", "disk.baseline", "disk.name",
]  # fmt: skip
SUBSCRIBER_POINTS = [
    "subscribe.", "subscribe.staged", "subscribe.prepared", "subscribe.swapped", "subscribe.loaded", "subscribe.serv",
    "subscribe.prefetch", "subscribe.anchor", "subscribe.attached", "subscribe.proved", "disk.mark", "disk.staged",
]  # fmt: skip
DIRECTORY_POINTS = [
    "engine.dir.", "engine.dir.journal", "engine.dir.dirty", "engine.dir.hidden", "engine.dir.write",
    "engine.dir.data", "engine.dir.version", "engine.dir.shown", "engine.dir.clean", "engine.dir.move",
    "engine.dir.prepared", "engine.dir.incoming", "disk.journal", "disk.engine", "disk.tensors",
]  # fmt: skip


@scenario
async def publisher_dies(stage: Stage) -> None:
    """The publisher dies at a named point, and once more soon after; then it, or somebody else, goes on."""
    rng = stage.rng
    stage.weather(rng.choice((0.0, 0.0, 0.02)))
    for _ in range(rng.choice((1, 2, 2))):
        stage.trigger(
            "pub1", f"point:{rng.choice(PUBLISHER_POINTS)}", rng.choice(("kill", "kill", "power")), rng.randint(1, 4)
        )
    stage.publisher(updates=4)
    stage.replica(1)
    await stage.settled(150.0)
    await stage.finish()


@scenario
async def subscriber_dies(stage: Stage) -> None:
    """The subscriber dies at a named point, twice in a row, over a live engine or a directory."""
    rng, directory = stage.rng, stage.rng.random() < 0.6
    stage.weather(rng.choice((0.0, 0.0, 0.02)))
    points = SUBSCRIBER_POINTS + (DIRECTORY_POINTS * 2 if directory else [])
    for _ in range(rng.choice((1, 2, 2))):
        stage.trigger("sub1", f"point:{rng.choice(points)}", rng.choice(("kill", "kill", "power")), rng.randint(1, 4))
    stage.publisher(updates=4)
    stage.replica(1, directory=directory)
    await stage.settled(150.0)
    await stage.finish()


def everybody(stage: Stage) -> list[Actor]:
    return [*stage.publishers, *stage.replicas]
