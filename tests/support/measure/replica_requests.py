"""What one replica asks of the store, counted in virtual time: the real subscriber over a bucket in memory."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sim.clock import Inline, Loop

from dcr_daemon import runtime
from dcr_daemon.engine.directory.engine import DirectoryEngine
from dcr_daemon.events import Event, OpenSeen, SealSeen
from dcr_daemon.store.port import Entry, Store
from dcr_daemon.subscribe.daemon import SubscribeOptions, run_subscribe
from support.events import RecordedEvents
from support.stores.memory import MemoryStore
from support.stores.wrapped import WrappedStore
from support.streams.versions import Versions
from support.streams.writer import StreamWriter

HOUR = 3600
UPDATES = 4  #: counted by `updates`, after `LEARNED`
LEARNED = 3  #: updates from which a replica learns when the next one comes


class LoopRuntime(runtime.SystemRuntime):
    """Time is that of the event loop, byte work is done in place, and jitter is always in the middle."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.time()

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self._loop.time())

    def jitter(self) -> float:
        return 0.5

    def executor(self, count: int) -> Executor:
        return Inline(self._loop, lambda: 0.0)


class DelayedStore(WrappedStore):
    """Every request is answered after `delay` seconds."""

    def __init__(self, inner: Store, delay: float) -> None:
        super().__init__(inner)
        self._delay = delay

    async def get(self, key: str, *, limit: int, keep: Any = None) -> bytes:
        await asyncio.sleep(self._delay)
        return await super().get(key, limit=limit, keep=keep)

    async def overwrite(self, key: str, body: bytes) -> None:
        await asyncio.sleep(self._delay)
        await super().overwrite(key, body)

    async def list(self, prefix: str) -> AsyncIterator[Entry]:
        await asyncio.sleep(self._delay)
        async for entry in super().list(prefix):
            yield entry


class TimedEvents(RecordedEvents):
    """Events, and when each was emitted by the loop's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        self.times.append(asyncio.get_running_loop().time())

    def last(self, kind: type[Event]) -> float:
        """When the newest event of one class was emitted."""
        return max(time for time, event in zip(self.times, self, strict=True) if isinstance(event, kind))


class ReplicaBench:
    """A stream in memory and one replica of it. `requests` is the counter of its store."""

    def __init__(self, stream: StreamWriter, store: MemoryStore, events: TimedEvents) -> None:
        self.stream, self.store, self.events = stream, store, events

    async def idle(self, seconds: float) -> Counter[str]:
        """Requests of the replica while nobody publishes."""
        self.store.requests.clear()
        await asyncio.sleep(seconds)
        return Counter(self.store.requests)

    async def update(self, version: int, *, upload: float, rest: float) -> Counter[str]:
        """Requests of the replica for one version, whose chunks come over `upload` seconds, and `rest` seconds more."""
        total, chunks = Counter[str](), self.stream.chunks
        await self._apart(total, self.stream.open(version))
        made, refs = chunks(version), []
        for chunk in made:
            total += await self.idle(upload / len(made))
            refs.append(await self._apart(total, self.stream.put(version, chunk)))
        await self._apart(total, self.stream.seal(version, refs))
        return total + await self.idle(rest)

    async def lateness(self, version: int, *, upload: float, rest: float) -> float:
        """Seconds after which the replica has seen the open or the seal of one version, whichever took longer."""
        stream, clock = self.stream, asyncio.get_running_loop().time
        stream.versions.step()
        await stream.open(version)
        opened = clock()
        await asyncio.sleep(upload)
        await stream.seal(version, [await stream.put(version, chunk) for chunk in stream.chunks(version)])
        sealed = clock()
        await asyncio.sleep(rest)
        return max(self.events.last(OpenSeen) - opened, self.events.last(SealSeen) - sealed)

    async def _apart(self, total: Counter[str], writing: Any) -> Any:
        """What the publisher asks for does not count; the replica has no turn meanwhile: the bucket takes no time."""
        self.store.requests.clear()
        return await writing


@contextlib.asynccontextmanager
async def _bench(home: Path, *, delay: float = 0.0, **options: float) -> AsyncIterator[ReplicaBench]:
    store = MemoryStore()
    versions = Versions(home)
    stream = StreamWriter(store.url, versions, store)
    await stream.create()
    versions.save(home / "current")
    engine = DirectoryEngine(home / "current")
    chosen = SubscribeOptions(replica="r1", state=home / "state", staging=home / "staging", scrub_every=0, **options)
    events = TimedEvents()
    task = asyncio.ensure_future(run_subscribe(chosen, DelayedStore(store, delay), engine=engine, emit=events))
    await asyncio.sleep(60)
    try:
        yield ReplicaBench(stream, store, events)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.close()


def measure(what: Any, **options: float) -> Any:
    """Run `what(bench)` in virtual time; `options` are the subscriber's, and `delay`: of each answer of its store."""
    loop, before = Loop(), runtime._current

    async def main() -> Any:
        with tempfile.TemporaryDirectory() as home:
            async with _bench(Path(home), **options) as bench:
                return await what(bench)

    runtime.install(LoopRuntime(loop))
    try:
        return loop.run_until_complete(main())
    finally:
        runtime.install(before)
        loop.close()


async def idle_hour(bench: ReplicaBench) -> Counter[str]:
    """Requests of an hour in which nobody publishes, after two more of them."""
    await bench.idle(2 * HOUR)
    return await bench.idle(HOUR)


def updates(every: float, upload: float) -> Callable[[ReplicaBench], Awaitable[Counter[str]]]:
    """Requests of `UPDATES` updates that come every `every` seconds and upload for `upload` of them."""

    async def count(bench: ReplicaBench) -> Counter[str]:
        total = Counter[str]()
        for version in range(1, LEARNED + UPDATES + 1):
            bench.stream.versions.step()
            counted = await bench.update(version, upload=upload, rest=every - upload)
            total += counted if version > LEARNED else Counter()
        return total

    return count
