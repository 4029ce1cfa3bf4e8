"""Scenarios of a watched directory: one checkpoint is written over its own files, or runs number theirs anew."""

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
from sim.trainer import Lanes, same, save
from support.vllm.toy_model import LAYOUT

from dcr_daemon.checkpoint.directory import INDEX
from dcr_daemon.checkpoint.safetensors import pack_safetensors

SHARDS = 3
EPOCH = 1_700_000_000  #: the files' times are virtual, too


class LastingTrainer(SimWatcher):
    """A trainer on the same machine lives on when the publisher dies. The times of its files are virtual."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.writing: asyncio.Task[None] | None = None

    async def main(self, process: Process) -> None:
        if self.writing is None:
            self.writing = self.world.loop.spawn(None, self._train())
        await self._watch(process)

    def _written_now(self, path: Path) -> None:
        now = int((EPOCH + self.world.loop.time()) * 1e9)
        os.utime(path, ns=(now, now))


class RewrittenDirectory(LastingTrainer):
    """Saves to `latest`, file by file.

    `indexed`: it writes an index after the files. `given_up`: how many times it begins a save and gives it up.
    """

    def __init__(self, *args: Any, indexed: bool, given_up: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.indexed, self.given_up = indexed, given_up
        self.last: Lanes | None = None

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


class NumberedRuns(LastingTrainer):
    """Two runs save checkpoints side by side; one that begins anew numbers from the start. Some checkpoints come into
    the directory later than they became whole, as copies do that keep their times.

    `whole`: when each became whole, by its path; `late`: how many are still to come.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.whole: dict[str, float] = {}
        self.late = 0

    @property
    def newest(self) -> str:
        return max(self.whole, key=self.whole.__getitem__)

    async def _train(self) -> None:
        rng, numbers, began = self.world.rng, [40, 700], 2
        runs = [0, 1]
        while True:
            await asyncio.sleep(self.pause * rng.uniform(0.5, 2.0))
            if self.left <= 0:
                continue
            one = rng.randrange(2)
            if rng.random() < 0.3:
                runs[one], numbers[one], began = began, 0, began + 1
            numbers[one] += rng.choice((1, 10))
            path = f"run-{runs[one]}/checkpoint-{numbers[one]}"
            saved = self._save(path)
            self.left -= 1
            if rng.random() < 0.3:
                self.late += 1
                self.world.loop.world_later(rng.uniform(3.0, 60.0), self._appear, saved, path)
            else:
                self._show(saved, path)

    def _save(self, path: str) -> Path:
        """A whole checkpoint, out of the watcher's sight."""
        lanes = self.trainer.next()
        self.watch.wrote(path, lanes)
        saved = self.place / f".{path.replace('/', '.')}"
        saved.mkdir(parents=True)
        for file in save(lanes, saved / "new").iterdir():
            self._written_now(file)
        self.whole[path] = self.world.loop.time()
        return saved / "new"

    def _show(self, saved: Path, path: str) -> None:
        (self.place / path).parent.mkdir(exist_ok=True)
        saved.rename(self.place / path)

    def _appear(self, saved: Path, path: str) -> None:
        self.world.note(f"{path} appears")
        self.world.outcome.faults["checkpoint appears late"] += 1
        self._show(saved, path)
        self.late -= 1

    def forget(self) -> None:
        """What the publisher keeps of the checkpoints that it has published is lost."""
        (self.machine.disk / "state" / "published.json").unlink(missing_ok=True)

    def check_order(self) -> None:
        """No version is older than one before it, and none was published twice."""
        paths = [str((seal.source or {}).get("path")) for seal in self.watch.seals.values()]
        times = [self.whole[path] for path in paths if path in self.whole]
        if times != sorted(set(times)):
            self.world.fail("order", f"checkpoints of the times {times} became versions in this order")


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


@scenario()
async def order_of_checkpoints(run: ScenarioRun) -> None:
    """Two runs whose numbers say nothing, a publisher that is away while checkpoints come and forgets what it has
    published, and older checkpoints that appear later: never is an older one published as a newer version."""
    rng = run.rng
    some_random_faults(run)
    for _ in run.times(0, 1, 2):
        run.hit("pub1", [*PUBLISHER, *points("publish.shard", "publish.remembered")], ("kill", "terminate"), 6)
    trainer = run.publisher(kind=NumberedRuns, updates=8, pause=rng.choice((2.0, 6.0)), newest=run.chance(0.3))
    assert isinstance(trainer, NumberedRuns)
    run.replica(1, directory=run.chance(0.5))
    for _ in run.times(0, 1, 2):
        await run.wait(10.0, 40.0)
        trainer.down = True
        run.kill(trainer)
        await run.wait(5.0, 40.0)
        if run.chance(0.6):
            trainer.forget()
        trainer.down = False
        trainer.start()
    await run.settled(300.0)
    await run.until(lambda: trainer.left <= 0 and not trainer.late, 300.0, "all checkpoints are there")

    def published() -> bool:
        newest = run.watch.seals.get(run.watch.head)
        return newest is not None and (newest.source or {}).get("path") == trainer.newest

    await run.until(published, 300.0, "the newest checkpoint is the newest version")
    trainer.check_order()
    await run.finish()
    trainer.check_order()
