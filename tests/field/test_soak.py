"""A run that nobody looks after: publishers and subscribers die at random requests, others take their place."""

from __future__ import annotations

import asyncio
import gc
import random
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from support.streams.replica import Replica
from support.streams.trainer import Line, Trainer, until

from dcr_daemon.errors import StoreUnavailable
from dcr_daemon.events import Collected, Serving
from dcr_daemon.ledger.audit.verify import verify
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.publish.watch.watcher import run_watch
from dcr_daemon.store.file import FileStore

KEEP, ANCHOR_EVERY = 6, 5
CHECKPOINTS = 3  #: that the trainer leaves on its disk


class Mortal:
    """A daemon that is killed at a random request and started again, until it is told to stop."""

    def __init__(
        self, trainer: Trainer, seed: int, requests: int, run: Callable[[int, Line], Coroutine[Any, Any, None]]
    ):
        self._trainer, self._random, self._requests, self._run = trainer, random.Random(seed), requests, run
        self._task: asyncio.Task[None] | None = None
        self.deaths = 0
        self.lives = asyncio.create_task(self._live())

    async def _live(self) -> None:
        while True:
            line = self._trainer.line()
            left = self._random.randrange(1, self._requests)

            async def before(operation: str, key: str, line: Line = line, left: list[int] = [left]) -> None:  # noqa: B006
                left[0] -= 1
                if left[0] == 0:
                    line.cut()
                    asyncio.get_running_loop().call_soon(self._task.cancel)

            line.before = before
            self._task = asyncio.create_task(self._run(self.deaths, line))
            try:
                await asyncio.wait([self._task])
            except asyncio.CancelledError:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
                raise
            if not line.dead:
                self._task.result()
                raise AssertionError("it returned")
            assert self._task.cancelled() or isinstance(self._task.exception(), StoreUnavailable)
            self.deaths += 1

    async def stop(self) -> None:
        self.lives.cancel()
        await asyncio.gather(self.lives, return_exceptions=True)


class Run:
    """One trainer, one stream in a directory, one served replica."""

    def __init__(self, trainer: Trainer, seed: int) -> None:
        self.trainer, self.home = trainer, trainer.home / "bucket"
        trainer.bucket = FileStore(self.home)
        self.ledger = Ledger(trainer.bucket)
        self.replica: Replica = trainer.replica(at=0)
        self.publisher = Mortal(trainer, seed, 160, self._publish)
        self.subscriber = Mortal(trainer, seed + 1, 220, self._subscribe)

    async def _publish(self, number: int, line: Line) -> None:
        """Three hosts take turns; each finds the state of its own last turn, however old."""
        name = f"trainer-{'abc'[number % 3]}"
        options = self.trainer.options(
            name=name, state=self.trainer.home / name, take_over=True, keep_versions=KEEP, anchor_every=ANCHOR_EVERY,
            anchor_share=None, patience=60.0,
        )  # fmt: skip
        await run_watch(options, line, emit=self.trainer.events)

    async def _subscribe(self, number: int, line: Line) -> None:
        self.replica.store = line
        await self.replica.run()

    @property
    def served(self) -> int:
        return max((event.version for event in self.replica.events.of(Serving)), default=-1)

    async def sealed(self, version: int) -> None:
        """The version is in the ledger, whoever lived to tell."""
        async with asyncio.timeout(120):
            while (await self.ledger.read()).seal.version < version:
                assert self._alive()
                await asyncio.sleep(0.02)

    async def reach(self, version: int) -> None:
        """The replica serves this version, and holds its bits."""
        await until(lambda: self._alive() and self.served >= version, seconds=120)

    def _alive(self) -> bool:
        for one in (self.publisher, self.subscriber):
            if one.lives.done():
                one.lives.result()
        return True

    async def stop(self) -> None:
        await self.publisher.stop()
        await self.subscriber.stop()

    def held(self) -> tuple[set[int], set[int]]:
        """Versions of which the bucket holds data, and anchors."""

        def numbers(kind: str) -> set[int]:
            return {int(path.name) for path in (self.home / kind).glob("*")}

        return numbers("data"), numbers("anchors")


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def resident() -> int:
    """Bytes of this process that are no file's."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.slow)])
async def test_a_run_goes_on_whoever_dies_and_needs_no_more_than_it_did(
    make_trainer: Callable[..., Trainer], count: int
) -> None:
    trainer = make_trainer(count, rate=0.01)
    files = descriptors()
    run = Run(trainer, seed=count)
    used: list[int] = []
    await until(lambda: (run.home / "ledger" / "0000000000000000.json").exists())
    for version in range(1, count + 1):
        trainer.save(version)
        await run.sealed(version)
        shutil.rmtree(trainer.out / f"checkpoint-{version - CHECKPOINTS}", ignore_errors=True)
        if version % (count // 4) == 0:
            await run.reach(version)
            assert trainer.versions.version_of(run.replica.directory) == version
            used.append(resident())
    await run.stop()

    seals = await run.ledger.history.between(1)
    assert [(seal.version, seal.step) for seal in seals] == [(n, n) for n in range(1, count + 1)]
    served = [event.version for event in run.replica.events.of(Serving)]
    assert served == sorted(served), "a version went down"
    assert min(run.publisher.deaths, run.subscriber.deaths) >= count // 10
    gc.collect()
    assert descriptors() <= files + 4, "whoever died left files open"
    memory = used[-1]
    assert memory <= used[0] + (48 << 20)

    state = await run.ledger.read()
    assert state.floor >= count - KEEP - 3 * ANCHOR_EVERY
    data, anchors = run.held()
    assert len(data) <= KEEP + 3 * ANCHOR_EVERY + 1
    assert len(anchors) <= KEEP // ANCHOR_EVERY + 4
    assert trainer.events.of(Collected)
    report = await verify(trainer.bucket)
    assert not report.damages
    stranger = trainer.replica()
    await stranger.once()
    assert trainer.versions.version_of(stranger.directory) == count
