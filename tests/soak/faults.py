"""What a soak does to its processes, disks, links and objects: one class per kind, its choices drawn by the seed.

A fault is begun before the versions of a round are written, may act between two of them, and is ended before the round
must heal. Where it strikes is counted in requests of a daemon, or in its named instants, never in seconds.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path
from typing import ClassVar

from soak.daemons import Daemon, forget
from soak.world import World
from support.stores.faulty_proxy import Fault as Answer
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


class Wiped(Fault):
    """A daemon ends and finds its state gone; a replica's directory may be gone as well."""

    name = "wiped state"
    shown = ("what",)

    def choose(self, draw: random.Random) -> None:
        everything = ["state"] if self.target == "holder" else ["state", "state current", "current", "staging"]
        self.what = draw.choice(everything)

    async def strike(self, world: World) -> None:
        daemon = world.daemon(self.target)
        await world.end(daemon)
        forget(*(daemon.home / place for place in self.what.split()))
        daemon.start()
        self.struck = True


class Stale(Fault):
    """A daemon ends and finds its state, or a replica's directory, as it was some versions before."""

    name = "stale state"
    shown = ("what",)

    def choose(self, draw: random.Random) -> None:
        everything = ["state"] if self.target == "holder" else ["state", "state current", "current"]
        self.what = draw.choice(everything).split()

    async def begin(self, world: World) -> None:
        await super().begin(world)
        await world.end(self.daemon)
        self.copies = world.home / f"copies-{self.daemon.name}"
        forget(self.copies)
        for place in self.what:
            if (self.daemon.home / place).exists():
                shutil.copytree(self.daemon.home / place, self.copies / place, symlinks=True)
        self.daemon.start()

    async def end(self, world: World) -> None:
        await world.end(self.daemon)
        for place in self.what:
            if (self.copies / place).exists():
                forget(self.daemon.home / place)
                shutil.copytree(self.copies / place, self.daemon.home / place, symlinks=True)
        if not self.daemon.ousted:
            self.daemon.start()
        self.struck = True


class DamagedDirectory(Fault):
    """One byte of a replica's files changes, while the replica runs or not."""

    name = "damaged served file"
    targets = REPLICAS
    shown = ("running",)

    def choose(self, draw: random.Random) -> None:
        self.where, self.running = draw.random(), draw.random() < 0.4

    async def strike(self, world: World) -> None:
        daemon = world.daemon(self.target)
        if not self.running:
            await world.end(daemon)
        files = sorted((daemon.home / "current").glob("*.safetensors"))
        if files:
            file = files[int(self.where * len(files))]
            flip(file, self.where)
            self.struck = True
        daemon.start()


def flip(file: Path, where: float) -> None:
    """Another byte at this place of the tensors."""
    with file.open("r+b") as bytes_:
        header = int.from_bytes(bytes_.read(8), "little") + 8
        at = header + int(where * (file.stat().st_size - header))
        bytes_.seek(at)
        byte = bytes_.read(1)
        bytes_.seek(at)
        bytes_.write(bytes([byte[0] ^ 0x10]))


class FullDisk(Fault):
    """A daemon's file system has no room, or nearly none, from some step on until the round heals."""

    name = "full disk"
    codes: ClassVar[set[int]] = {14}
    shown = ("leave",)

    def choose(self, draw: random.Random) -> None:
        self.leave = draw.choice((0, 4096, 20_000, 150_000, 600_000))

    async def strike(self, world: World) -> None:
        self.daemon = world.daemon(self.target)
        self.daemon.expected |= self.codes
        assert self.daemon.disk is not None
        self.daemon.disk.fill(self.leave)
        self.struck = True


class BadAnswers(Requested):
    """One to a few requests are refused, lost, cut, stalled or starved."""

    name = "bad answers"
    codes: ClassVar[set[int]] = {15}
    kinds: ClassVar[tuple[Answer, ...]] = (
        Answer.RESET_BEFORE, Answer.RESET_AFTER, Answer.TRUNCATE, Answer.UNAVAILABLE, Answer.SLOW_DOWN,
    )  # fmt: skip
    shown = ("request", "times", "answer")

    def choose(self, draw: random.Random) -> None:
        super().choose(draw)
        self.kind, self.times = draw.choice(self.kinds), draw.choice((1, 1, 2, 5, 12))
        self.answer = self.kind.name.lower()

    def plan(self, daemon: Daemon) -> Planned:
        return Planned(nth=self.request, times=self.times, fault=self.kind)


class SlowAnswers(BadAnswers):
    """Requests stall, trickle, or vanish, until the round heals."""

    name = "stalled answers"
    kinds = (Answer.STALL, Answer.TRICKLE, Answer.BLACK_HOLE)


class Misread(Requested):
    """An object's bytes come with one other byte; the bucket is sound."""

    name = "misread object"
    places: ClassVar[tuple[str, ...]] = ("/data/", "/anchors/")
    furthest = 8
    shown = ("request", "times")

    def choose(self, draw: random.Random) -> None:
        super().choose(draw)
        self.times, self.where = draw.choice((1, 1, 1, 2)), draw.random()

    def plan(self, daemon: Daemon) -> Planned:
        return Planned(matches=self._matches, nth=self.request, times=self.times, edit=self._edit)

    def _matches(self, method: str, path: str) -> bool:
        return method == "GET" and any(place in path for place in self.places)

    def _edit(self, body: bytes) -> bytes:
        at = int(self.where * len(body))
        return body[:at] + bytes([body[at] ^ 0x04]) + body[at + 1 :]


class StoreKilled(Fault):
    """The store dies with whatever it is doing, and comes back."""

    name = "killed store"
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
