"""What a soak does to state directories, served directories and checkpoints, and to the disk below them."""

from __future__ import annotations

import contextlib
import random
import shutil
from pathlib import Path
from typing import ClassVar

import numpy as np
from soak.daemons import Failed, forget
from soak.faults import REPLICAS, Fault
from soak.world import LAYOUT, SHARD, World

from dcr_daemon.checkpoint.directory import write_checkpoint


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


class LinkedFiles(Fault):
    """A replica finds its directory made of links to a cache that others use, which must stay as it is."""

    name = "served files that are links"
    targets = REPLICAS
    shown = ("how",)

    def choose(self, draw: random.Random) -> None:
        self.how = draw.choice(("hard", "symbolic"))

    async def strike(self, world: World) -> None:
        daemon = world.daemon(self.target)
        await world.end(daemon)
        served, caches = daemon.home / "current", daemon.home / "caches"
        self.cache = caches / str(len(list(caches.glob("*"))))  # the links of earlier rounds lead to their own
        with contextlib.suppress(OSError):  # nothing is there, or there is no room for a cache
            shutil.copytree(served, self.cache, ignore=shutil.ignore_patterns(".dcr"))
            self.bytes = {path: path.read_bytes() for path in self.cache.iterdir()}
            for path in self.cache.iterdir():
                (served / path.name).unlink(missing_ok=True)
                if self.how == "hard":
                    (served / path.name).hardlink_to(path)
                else:
                    (served / path.name).symlink_to(path)
            self.struck = True
        daemon.start()

    async def repair(self, world: World) -> None:
        await world.within(20.0, world.arrived)
        if self.struck and self.bytes != {path: path.read_bytes() for path in self.cache.iterdir()}:
            raise Failed(f"{self.target} has written through {self.how} links")


class HalfCheckpoint(Fault):
    """A trainer that died has left a checkpoint that is not whole; no version may be made of it."""

    name = "half a checkpoint"
    targets = ("watcher",)
    shown = ("lacks",)

    def choose(self, draw: random.Random) -> None:
        self.lacks, self.where = draw.choice(("shards", "an end", "content")), draw.random()

    async def strike(self, world: World) -> None:
        random_bits = np.random.default_rng(int(self.where * 1e9))
        made = world.home / "half"
        bits = {s.name: random_bits.integers(0, 256, s.nbytes, "u1").view(f"<u{s.width}") for s in LAYOUT}
        write_checkpoint(made, LAYOUT, bits_of=bits.__getitem__, shard_bytes=SHARD)
        shards = sorted(made.glob("*.safetensors"))
        kept = 1 + int(self.where * (len(shards) - 1))
        for number, shard in enumerate(shards):
            if number >= kept:
                self._spoil(shard)
        place = world.stream.watch / f"step_{10_000 + int(self.where * 1e9)}"
        place.mkdir()
        for path in sorted(made.iterdir()):
            if path.suffix == ".safetensors":
                path.rename(place / path.name)
        forget(made)
        self.struck = True

    def _spoil(self, shard: Path) -> None:
        size = shard.stat().st_size
        if self.lacks == "shards":
            shard.unlink()
            return
        with shard.open("r+b") as file:
            header = int.from_bytes(file.read(8), "little") + 8
            file.truncate(header + int(0.8 * self.where * (size - header)))
            if self.lacks == "content":
                file.truncate(size)
