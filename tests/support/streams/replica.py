"""A subscriber over a served directory, run in process: for every room that needs the far end of a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol

import pytest

from dcr_daemon.engine.directory.engine import DirectoryEngine
from dcr_daemon.engine.port import Engine
from dcr_daemon.events import Serving
from dcr_daemon.store import open_store
from dcr_daemon.store.port import Store
from dcr_daemon.subscribe.daemon import SubscribeOptions, run_subscribe
from support.events import RecordedEvents
from support.streams.writer import StreamWriter


class Addressed(Protocol):
    """What names a stream: a `StreamWriter`, or only its address."""

    @property
    def url(self) -> str: ...


class Replica:
    """A subscriber over a directory, with everything it remembers below `home`; `store` is used instead of its URL."""

    def __init__(self, url: str, home: Path, directory: Path) -> None:
        self.url, self.home, self.directory = url, home, directory
        self.events = RecordedEvents()
        self.store: Store | None = None

    def at_base(self, stream: StreamWriter) -> Replica:
        """This replica, with version 0 in its directory."""
        stream.versions.save(self.directory, 0, shard_bytes=30_000)
        return self

    def options(self, **options: object) -> SubscribeOptions:
        chosen = {"replica": "r1", "state": self.home / "state", "staging": self.home / "staging", "poll": 0.02}
        return SubscribeOptions(**{**chosen, **options})

    async def run(self, engine: Engine | None = None, **options: object) -> None:
        """Run until it returns."""
        store = self.store or await open_store(self.url)
        engine = engine or DirectoryEngine(self.directory)
        try:
            await run_subscribe(self.options(**options), store, engine=engine, emit=self.events)
        finally:
            await engine.close()
            await store.close()

    async def once(self, **options: object) -> None:
        await asyncio.wait_for(self.run(once=True, **options), 60)

    @contextlib.asynccontextmanager
    async def running(self, engine: Engine | None = None, **options: object) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(self.run(engine, **options))
        try:
            yield task
        finally:
            if not task.done():  # else the test has seen its end
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    @contextlib.asynccontextmanager
    async def serving(self, engine: Engine | None = None, **options: object) -> AsyncIterator[asyncio.Task[None]]:
        """`running`, with a body that begins once the replica serves a version."""
        async with self.running(engine, **options) as task:
            await self.until(lambda: self.events.of(Serving), task)
            yield task

    async def until(self, condition: Callable[[], object], task: asyncio.Task[None], seconds: float = 60) -> None:
        """Wait for a condition while the subscriber runs; its failure is the test's."""
        async with asyncio.timeout(seconds):
            while not condition():
                if task.done():
                    task.result()
                    raise AssertionError("the subscriber returned")
                await asyncio.sleep(0.01)

    async def until_serving(self, version: int, task: asyncio.Task[None]) -> None:
        """Wait until `version` is what the replica began to serve last."""
        await self.until(lambda: [event.version for event in self.events.of(Serving)][-1:] == [version], task)


@pytest.fixture
def make_replica(tmp_path: Path) -> Callable[..., Replica]:
    number = iter(range(100))

    def make(stream: Addressed, directory: Path | None = None) -> Replica:
        home = tmp_path / f"replica-{next(number)}"
        home.mkdir()
        return Replica(stream.url, home, directory or home / "current")

    return make
