"""Scenarios of a watched directory whose one checkpoint is written again and again, over its own files."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from sim.actors import SimWatcher
from sim.clock import Process
from sim.scenario_run import ScenarioRun, scenario
from sim.scenarios import PUBLISHER, points, some_random_faults
from sim.trainer import Lanes, same
from support.vllm.toy_model import LAYOUT

from dcr_daemon.checkpoint.directory import INDEX
from dcr_daemon.checkpoint.safetensors import pack_safetensors

SHARDS = 3
EPOCH = 1_700_000_000  #: the files' times are virtual, too


class RewrittenDirectory(SimWatcher):
    """A trainer on the same machine, which lives on when the publisher dies, saves to `latest`, file by file.

    `indexed`: it writes an index after the files. `given_up`: how many times it begins a save and gives it up.
    """

    def __init__(self, *args: Any, indexed: bool, given_up: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.indexed, self.given_up = indexed, given_up
        self.writing: asyncio.Task[None] | None = None
        self.last: Lanes | None = None

    async def main(self, process: Process) -> None:
        if self.writing is None:
            self.writing = self.world.loop.spawn(None, self._train())
        await self._watch(process)

    async def _train(self) -> None:
        rng, out = self.world.rng, self.place / "latest"
        while True:
            await asyncio.sleep(self.pause * rng.uniform(0.5, 2.0))
            if self.left <= 0 or (self.last is not None and self.watch.head == 0):
                continue  # what the directory held before it was ever published is known to nobody
            out.mkdir(parents=True, exist_ok=True)
            lanes = self.trainer.next()
            self.watch.wrote("latest", lanes)
            given_up = self.given_up > 0 and self.last is not None and rng.random() < 0.5
            for n in range(1 if given_up else SHARDS):
                await self._write(out / f"model-{n + 1:05d}-of-{SHARDS:05d}.safetensors", _shard(lanes, n))
                await asyncio.sleep(rng.uniform(0.0, 4.0))
            if given_up:
                self.given_up -= 1
                continue
            if self.indexed:
                (out / INDEX).write_text(json.dumps({"weight_map": _homes()}))
                self._written_now(out / INDEX)
            self.last = lanes
            self.left -= 1

    async def _write(self, path: Path, body: bytes) -> None:
        """Replace a file by a rename, or write over it; it may have its full size from the start."""
        rng = self.world.rng
        how = rng.choice(("renamed", "truncated", "filled"))
        if how == "renamed":
            path.with_suffix(".part").write_bytes(body)
            path.with_suffix(".part").rename(path)
        else:
            with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT), "r+b", buffering=0) as file:
                file.truncate(len(body) if how == "filled" else 0)
                file.write(body[: len(body) // 2])
                self._written_now(path)
                await asyncio.sleep(rng.uniform(0.0, 4.0))
                file.write(body[len(body) // 2 :])
        self._written_now(path)

    def _written_now(self, path: Path) -> None:
        now = int((EPOCH + self.world.loop.time()) * 1e9)
        os.utime(path, ns=(now, now))


def _shard(lanes: Lanes, n: int) -> bytes:
    return bytes(pack_safetensors([(LAYOUT[i], lanes[i]) for i in range(n, len(LAYOUT), SHARDS)]))


def _homes() -> dict[str, str]:
    return {spec.name: f"model-{i % SHARDS + 1:05d}-of-{SHARDS:05d}.safetensors" for i, spec in enumerate(LAYOUT)}


@scenario()
async def rewritten_directory(run: ScenarioRun) -> None:
    """The publisher dies or is stopped at a chosen point while its trainer writes over the files of `latest`."""
    some_random_faults(run)
    for _ in run.times(0, 1, 2):
        places = [*PUBLISHER, *points("publish.shard", "publish.remembered")]
        run.hit("pub1", places, ("kill", "terminate", "stop"), 6, (10.0, 30.0))
    indexed = run.chance(0.7)
    given_up = run.rng.choice((0, 0, 1, 2)) if indexed else 0  # without an index only quiet time tells the end
    trainer = run.publisher(
        kind=RewrittenDirectory, updates=4, pause=run.rng.choice((3.0, 10.0)), indexed=indexed, given_up=given_up
    )
    run.replica(1, directory=run.chance(0.5))
    await run.settled(300.0)
    assert isinstance(trainer, RewrittenDirectory)

    def published() -> bool:
        return trainer.last is not None and same(run.watch.versions[-1], trainer.last)

    await run.until(published, 300.0, "the last state of the directory is a version")
    await run.finish()
