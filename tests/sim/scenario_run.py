"""One run of a scenario: its actors, the faults that hit them, and the end: faults stop and all must recover."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any

from sim.actors import Actor, Collecting, Replica, SimPublisher
from sim.bucket import Fault
from sim.clock import Process
from sim.engines import SimEngine
from sim.invariants import Watch
from sim.ranks import Group, SimRank
from sim.trainer import Trainer, save
from sim.world import Trigger, World

CALM = 1500.0  #: virtual seconds within which everything must be well again
PROMPT = 3  #: calls that may come to nothing after all faults have ended
BUSY = 40  #: requests a second that nobody may exceed when all is done

Scenario = Callable[["ScenarioRun"], Coroutine[Any, Any, None]]
SCENARIOS: dict[str, Scenario] = {}


def scenario(*, publish_seconds: float | None = None) -> Callable[[Scenario], Scenario]:
    """Register a scenario under its function's name. After the function has set up actors and faults, the run waits
    at most `publish_seconds` until the publishers have published everything, and finishes. None: the function
    calls `ScenarioRun.finish` itself.
    """

    def register(play: Scenario) -> Scenario:
        @wraps(play)
        async def complete(run: ScenarioRun) -> None:
            await play(run)
            if publish_seconds is not None:
                await run.settled(publish_seconds)
                await run.finish()

        SCENARIOS[play.__name__] = complete
        return complete

    return register


class ScenarioRun:
    """A world and its actors. Scenarios get one and call its methods."""

    def __init__(self, world: World) -> None:
        self.world, self.rng = world, world.rng
        self.trainer = Trainer(world.rng)
        self.watch = Watch(world, self.trainer.base)
        self.publishers: list[SimPublisher | Group] = []
        self.replicas: list[Replica] = []
        self.operators: list[Actor] = []

    def publisher(self, **options: Any) -> SimPublisher:
        kind = options.pop("kind", SimPublisher)
        actor: SimPublisher = kind(self.world, self.watch, self.trainer, **options)
        self.publishers.append(actor)
        actor.start()
        return actor

    def group(self, **options: Any) -> Group:
        """A process group that publishes together."""
        actor = Group(self.world, self.watch, self.trainer, **options)
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

    def _engine_died(self, engine: SimEngine, process: Process) -> None:
        """Its supervisor starts it again: from the base, from another version, or from weights nobody knows."""
        if process is engine.process:
            self.world.loop.world_later(self.rng.uniform(1.0, 10.0), self._boot, engine)

    def _boot(self, engine: SimEngine) -> None:
        if self.world.ended or engine.alive:
            return
        draw = self.rng.random()
        lanes = self.trainer.base if draw < 0.6 else self.rng.choice(self.watch.versions)
        engine.boot(self.trainer.next("all") if draw > 0.9 else lanes)

    def random_faults(self, level: float) -> None:
        """Random faults of store and engines, at a rate."""
        self.world.store_rates = dict.fromkeys(Fault, level)
        self.world.engine_rate = level / 2
        self.world.rank_rate = level / 2

    def chance(self, probability: float) -> bool:
        """Draw whether something happens."""
        return self.rng.random() < probability

    def times(self, *counts: int) -> range:
        """Draw how often something happens: one of `counts`."""
        return range(self.rng.choice(counts))

    async def wait(self, least: float, most: float) -> None:
        """Let a drawn number of virtual seconds pass."""
        await asyncio.sleep(self.rng.uniform(least, most))

    def kill(self, actor: Actor | Group | SimRank) -> None:
        """Kill the actor's process, if it runs."""
        if actor.alive and actor.process:
            self.world.kill(actor.process)

    def trigger(self, role: str, when: str, what: str, nth: int = 1, seconds: float = 30.0) -> None:
        self.world.triggers.append(Trigger(role, when, what, nth, seconds))

    def hit(
        self, role: str, whens: Sequence[str], whats: Sequence[str], most: int, seconds: Sequence[float] = (30.0,)
    ) -> None:
        """A trigger that is drawn: at one of these places, at its first to `most`-th pass, one of these things."""
        rng = self.rng
        self.trigger(role, rng.choice(whens), rng.choice(whats), rng.randint(1, most), rng.choice(seconds))

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
            proved = engine.core.state.proved
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
        for group in self.publishers:
            if isinstance(group, Group):
                await self.until(group.past_is_over, CALM, f"the end of ranks of {group.role} that were left over")
                if group.failures > PROMPT:
                    world.fail("liveness", f"{group.failures} calls of {group.role} came to nothing without a fault")
        for replica in self.replicas:
            if not any(other.alive for other in self._beside(replica)):
                replica.down = False
                replica.start()
        await self.until(lambda: all(self._there(r) for r in self.replicas), CALM, "converging")
        await asyncio.sleep(20.0)
        began, requests = world.loop.time(), world.outcome.requests
        await asyncio.sleep(30.0)
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

    async def _publish_again(self) -> SimPublisher | Group:
        """The publisher that holds the stream goes on; if none does, an operator takes over for a new one."""
        await asyncio.sleep(40.0)
        owner = self.watch.tip.state.epoch if self.watch.tip else None
        for actor in self.publishers:
            ledger = actor.session.ledger if actor.alive and actor.session else None
            if ledger and owner and ledger.epoch == owner.seq and not owner.released:
                actor.left = max(actor.left, 1)
                return actor
        for actor in self.publishers:
            actor.down = True
            self.kill(actor)
        return self.publisher(role="pub9", name="last", take_over=True, updates=1, kind=SimPublisher)
