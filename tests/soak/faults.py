"""What a soak does to its processes; what all faults have in common: one class per kind, its choices drawn by the seed.

A fault is begun before the versions of a round are written, may act between two of them, and is ended before the round
must heal. Where it strikes is counted in requests of a daemon, or in its named instants, never in seconds.
"""

from __future__ import annotations

import asyncio
import random
from typing import ClassVar

from soak.daemons import Daemon
from soak.world import World
from support.stores.faulty_proxy import Planned

PUBLISHERS, REPLICAS = ("holder",), ("r1", "r2", "r3")


class Fault:
    """One fault of a round. `struck`: whether it came to anything; `codes`: exit codes that it may cause."""

    name: ClassVar[str]
    codes: ClassVar[set[int]] = set()
    targets: ClassVar[tuple[str, ...]] = ("holder", "holder", *REPLICAS)

    def __init__(self, draw: random.Random, steps: int) -> None:
        self.target = draw.choice(self.targets)
        self.at = draw.randrange(steps)  #: before which step, for what is done between two
        self.struck = False
        self.choose(draw)

    def choose(self, draw: random.Random) -> None:
        """Draw what is particular to the kind."""

    def __str__(self) -> str:
        more = ", ".join(f"{key} {value}" for key, value in vars(self).items() if key in self.shown)
        return f"{self.name} of {self.target}" + (f" ({more})" if more else "")

    shown: ClassVar[tuple[str, ...]] = ()

    async def begin(self, world: World) -> None:
        self.daemon = world.daemon(self.target)
        self.daemon.expected |= self.codes

    async def before_step(self, world: World, step: int) -> None:
        if step == self.at:
            await self.strike(world)

    async def strike(self, world: World) -> None:
        """Act before step `at`."""

    async def end(self, world: World) -> None:
        """Stop acting; take back what the world does not take back from everybody when it heals."""

    async def repair(self, world: World) -> None:
        """Do what an operator must do, once everybody runs again."""


class Requested(Fault):
    """A fault of one request, or of a few, of one daemon."""

    furthest: ClassVar[int] = 60

    def choose(self, draw: random.Random) -> None:
        self.request = 1 + int(self.furthest * draw.random() ** 2)

    shown = ("request",)

    async def begin(self, world: World) -> None:
        await super().begin(world)
        self.planned = self.daemon.network.plan(self.plan(self.daemon))

    def plan(self, daemon: Daemon) -> Planned:
        raise NotImplementedError

    async def end(self, world: World) -> None:
        self.struck = self.planned.met


class Kill(Requested):
    """SIGKILL at a request: before the store has seen it, or after."""

    name = "kill -9 at a request"

    def choose(self, draw: random.Random) -> None:
        super().choose(draw)
        self.when = draw.choice(("before", "after"))

    shown = ("request", "when")

    def plan(self, daemon: Daemon) -> Planned:
        return Planned(nth=self.request, **{self.when: daemon.kill})  # type: ignore[arg-type]


class KillInstant(Fault):
    """SIGKILL at a named instant of a fresh start, or of what comes after it."""

    name = "kill -9 at an instant"
    shown = ("instant",)

    def choose(self, draw: random.Random) -> None:
        self.instant = 1 + int(160 * draw.random() ** 2)

    async def strike(self, world: World) -> None:
        self.daemon = world.daemon(self.target)
        await world.end(self.daemon)
        self.daemon.start(f"*:{self.instant}")
        self.deaths = self.daemon.deaths

    async def end(self, world: World) -> None:
        self.struck = self.daemon.deaths > self.deaths


class Stop(Requested):
    """SIGSTOP at a request; it goes on before a later step, or when all else heals."""

    name = "SIGSTOP, SIGCONT"

    def plan(self, daemon: Daemon) -> Planned:
        return Planned(nth=self.request, before=daemon.stop)

    async def strike(self, world: World) -> None:
        self.daemon.resume()


class TakeOver(Fault):
    """The other publisher takes the stream from one that runs, is stopped, was killed or has released it."""

    name = "take-over"
    targets = PUBLISHERS
    shown = ("former",)

    def choose(self, draw: random.Random) -> None:
        self.former = draw.choice(("running", "running", "stopped", "killed", "released"))

    async def strike(self, world: World) -> None:
        old = world.holder
        if self.former == "stopped":
            old.stop()
        elif self.former == "killed":
            await world.end(old)
        elif self.former == "released":
            old.terminate()
            await world.within(20.0, lambda: not old.running)
        await world.take_over()
        self.struck = True


class StoreKilled(Fault):
    """The store dies with whatever it is doing, and comes back."""

    name = "killed store"
    targets = ("the store",)
    codes: ClassVar[set[int]] = {15}
    shown = ("after",)

    def choose(self, draw: random.Random) -> None:
        self.after = round(draw.random() * 0.6, 2)

    async def begin(self, world: World) -> None:
        for daemon in world.daemons:
            daemon.expected |= self.codes

    async def before_step(self, world: World, step: int) -> None:
        if step == self.at + 1:
            await self.strike(world)

    async def end(self, world: World) -> None:
        if not self.struck:
            await self.strike(world)

    async def strike(self, world: World) -> None:
        world.write()
        await asyncio.sleep(self.after)
        world.weed.kill()
        await asyncio.to_thread(world.weed.restart)
        self.struck = True
