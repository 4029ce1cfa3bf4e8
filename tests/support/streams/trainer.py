"""A trainer at one end, the real publisher and the real subscriber, and between them a bucket that can be made to fail.

Every process talks to the bucket over a `Line` of its own. Cutting it is the end of the process as the bucket sees it:
whatever the process still does, nothing arrives any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from dcr_daemon.errors import StoreUnavailable
from dcr_daemon.events import Sealed
from dcr_daemon.ledger.records import AnyRecord, decode_record
from dcr_daemon.publish.watch.watcher import WatchOptions, run_watch
from dcr_daemon.store.port import Entry, Outcome, Store
from support.events import RecordedEvents
from support.stores.memory import MemoryStore
from support.streams.replica import Replica
from support.streams.versions import Versions

Before = Callable[[str, str], Awaitable[None]]


async def _nothing(operation: str, key: str) -> None:
    pass


class Line:
    """One process's way to a bucket. `before(operation, key)` may hold up a request or fail it; `asked` keeps all."""

    def __init__(self, bucket: Store, before: Before = _nothing) -> None:
        self.bucket, self.url, self.before = bucket, bucket.url, before
        self.asked: list[tuple[str, str]] = []
        self.dead = False

    def cut(self) -> None:
        self.dead = True

    async def get(self, key: str, *, limit: int, keep: Any = None) -> bytes:
        await self._enter("get", key)
        return await self.bucket.get(key, limit=limit)

    async def create(self, key: str, body: bytes | memoryview) -> Outcome:
        await self._enter("create", key)
        return await self.bucket.create(key, body)

    async def overwrite(self, key: str, body: bytes) -> None:
        await self._enter("overwrite", key)
        await self.bucket.overwrite(key, body)

    async def list(self, prefix: str) -> AsyncIterator[Entry]:
        await self._enter("list", prefix)
        async for entry in self.bucket.list(prefix):
            yield entry

    async def delete(self, keys: Iterable[str]) -> None:
        await self._enter("delete", "")
        await self.bucket.delete(keys)

    async def close(self) -> None:
        pass

    async def _enter(self, operation: str, key: str) -> None:
        self.asked.append((operation, key))
        if not self.dead:
            await self.before(operation, key)
        if self.dead:
            raise StoreUnavailable(f"{self.url} is gone")


class Gate:
    """Holds up requests that `matches` until it is opened."""

    def __init__(self, matches: Callable[[str, str], bool]) -> None:
        self.matches = matches
        self.reached, self.opened = asyncio.Event(), asyncio.Event()

    async def __call__(self, operation: str, key: str) -> None:
        if not self.opened.is_set() and self.matches(operation, key):
            self.reached.set()
            await self.opened.wait()


class Trainer:
    """A run: its versions, a directory that checkpoints appear in, a bucket in memory."""

    def __init__(self, home: Path, versions: Versions) -> None:
        self.home, self.versions = home, versions
        self.out, self.base = home / "out", versions.save(home / "base")
        self.out.mkdir()
        self.bucket: Any = MemoryStore()
        self.events = RecordedEvents()
        self._replicas = itertools.count()

    def save(self, version: int, name: str = "") -> Path:
        """A checkpoint of a version, as a trainer that is done with it leaves it."""
        hidden = self.versions.save(self.home / f"hidden-{version}", version, shard_bytes=30_000)
        return hidden.rename(self.out / (name or f"checkpoint-{version}"))

    def line(self, before: Before = _nothing) -> Line:
        return Line(self.bucket, before)

    def options(self, **more: Any) -> WatchOptions:
        chosen: dict[str, Any] = {
            "state": self.home / "publisher", "base": self.base, "create": True, "watch": self.out, "poll": 0.02,
            "workers": 1, "patience": 0.3, "name": "trainer-a",
        }  # fmt: skip
        return WatchOptions(**chosen | more)

    async def publish(self, *versions: int, line: Line | None = None, **more: Any) -> None:
        """Save these versions one by one, each published by a publisher that starts, finds it and ends."""
        for version in versions:
            self.save(version)
            await self.once(line, **more)

    async def once(self, line: Line | None = None, **more: Any) -> None:
        async with asyncio.timeout(60):
            report = await run_watch(self.options(once=True, **more), line or self.line(), emit=self.events)
        report.check()

    @contextlib.asynccontextmanager
    async def publishing(self, line: Line | None = None, **more: Any) -> AsyncIterator[asyncio.Task[None]]:
        """The publisher, running beside the test."""
        task = asyncio.create_task(run_watch(self.options(**more), line or self.line(), emit=self.events))
        try:
            yield task
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    def replica(
        self, directory: Path | None = None, *, at: int | None = None, events: RecordedEvents | None = None
    ) -> Replica:
        """A subscriber over a directory, which holds version `at` if given, else nothing."""
        home = self.home / f"replica-{next(self._replicas)}"
        home.mkdir()
        replica = Replica(self.bucket.url, home, directory or home / "current")
        replica.store = self.line()
        replica.events = replica.events if events is None else events
        if at is not None:
            self.versions.save(replica.directory, at, shard_bytes=30_000)
        return replica

    @property
    def sealed(self) -> list[tuple[int, int | None]]:
        """(version, step) of every seal that the publishers told of."""
        return [(event.version, event.step) for event in self.events.of(Sealed)]

    def records(self) -> list[AnyRecord]:
        return [decode_record(body) for key, body in sorted(self.bucket.objects.items()) if key.startswith("ledger/")]

    def kinds(self) -> list[str]:
        return [type(record).__name__ for record in self.records()]


async def until(condition: Callable[[], object], task: asyncio.Task[None] | None = None, seconds: float = 60) -> None:
    """Wait for a condition; the failure of `task` is the test's."""
    async with asyncio.timeout(seconds):
        while not condition():
            if task is not None and task.done():
                task.result()
                raise AssertionError("it returned")
            await asyncio.sleep(0.01)


@pytest.fixture
def make_trainer(tmp_path: Path, make_versions: Callable[..., Versions]) -> Callable[..., Trainer]:
    """A run per call, with `count` versions after version 0 to be saved."""
    number = itertools.count()

    def make(count: int = 0, **options: Any) -> Trainer:
        home = tmp_path / f"run-{next(number)}"
        home.mkdir()
        return Trainer(home, make_versions(count, **options))

    return make
