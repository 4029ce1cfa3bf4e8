"""What is fetched of a version before its seal: each chunk as soon as it is seen, whatever another one takes."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path

import pytest
from support.events import RecordedEvents
from support.stores.wrapped import WrappedStore

from dcr_daemon.errors import StoreUnavailable
from dcr_daemon.events import ChunkFetched, Degraded, Retrying
from dcr_daemon.ledger import names
from dcr_daemon.ledger.follow import Polling
from dcr_daemon.ledger.objects import Objects
from dcr_daemon.ledger.records import OpenRef
from dcr_daemon.runtime import Workers
from dcr_daemon.subscribe.fetch import stage as stage_module
from dcr_daemon.subscribe.fetch.files import file_digest
from dcr_daemon.subscribe.fetch.prefetch import Prefetch
from dcr_daemon.subscribe.fetch.stage import CONCURRENCY, Stage


class SlowStore(WrappedStore):
    """GETs of chunks wait until `release` is called for them, unless `free`."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.waiting = dict[str, asyncio.Event]()
        self.most = 0
        self.gets, self.lists, self.free = Counter[str](), 0, False

    async def get(self, key, *, limit, keep=None):
        self.gets[key] += 1
        if key.endswith(".dcr") and not self.free:
            self.waiting[key] = asyncio.Event()
            self.most = max(self.most, len(self.waiting))
            await self.waiting[key].wait()
            del self.waiting[key]
        return await super().get(key, limit=limit, keep=keep)

    def release(self, key) -> None:
        self.waiting[key].set()

    async def list(self, prefix):
        self.lists += 1
        async for entry in super().list(prefix):
            yield entry


class Scene:
    """An open attempt at a version of a stream whose chunks are put one after another, and one prefetch of it."""

    def __init__(self, stream, stage: Stage, store: SlowStore, events: RecordedEvents) -> None:
        self.stream, self.stage, self.store, self.events = stream, stage, store, events
        self.refs = []
        self.prefetch: Prefetch

    async def open(self, version: int = 1) -> None:
        self.version = version
        ref = OpenRef(await self.stream.open(version), version, version - 1, "g", version)
        self.prefetch = Prefetch(self.store, self.stage, opened=ref, polling=Polling(first=0.02), emit=self.events)

    async def put(self, count: int) -> None:
        for chunk in self.stream.chunks(self.version)[len(self.refs) :][:count]:
            self.refs.append(await self.stream.put(self.version, chunk))

    @property
    def fetched(self) -> list[str]:
        return [event.key for event in self.events.of(ChunkFetched)]

    async def until(self, condition) -> None:
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110 (what it waits for sets no event)
                await asyncio.sleep(0.005)


@pytest.fixture
def opened(make_stream, tmp_path):
    @contextlib.asynccontextmanager
    async def make():
        stream, events = await make_stream(2, rate=0.5), RecordedEvents()
        store = SlowStore(stream.store)
        stage = Stage(
            tmp_path / "staging",
            limit=1 << 30,
            objects=Objects(store, floor=lambda: 0, patience=0),
            stream=stream.ledger.stream,
            layout=stream.versions.layout,
            workers=Workers(1),
            emit=events,
        )
        scene = Scene(stream, stage, store, events)
        await scene.open()
        try:
            yield scene
        finally:
            await scene.prefetch.cancel()

    return make


async def test_a_chunk_that_takes_long_holds_no_other_up(opened):
    async with opened() as scene:
        await scene.put(1)
        await scene.until(lambda: scene.store.waiting)
        slow = scene.refs[0].key
        await scene.put(3)
        await scene.until(lambda: len(scene.store.waiting) == 4)
        for ref in scene.refs[1:]:
            scene.store.release(ref.key)
        await scene.until(lambda: len(scene.fetched) == 3)
        assert list(scene.store.waiting) == [slow]


async def test_no_more_are_fetched_at_a_time_than_there_are_downloads(opened):
    async with opened() as scene:
        await scene.put(CONCURRENCY + 3)
        assert len(scene.refs) > CONCURRENCY
        await scene.until(lambda: len(scene.store.waiting) == CONCURRENCY)
        while len(scene.fetched) < len(scene.refs):
            for key in list(scene.store.waiting):
                scene.store.release(key)
            await asyncio.sleep(0.005)
        assert scene.store.most == CONCURRENCY
        assert set(scene.store.gets.values()) == {1}


async def test_what_is_on_its_way_at_the_seal_is_neither_fetched_nor_read_again(opened, monkeypatch):
    """The part is read beside it, and its digest was computed as it came."""
    async with opened() as scene:
        digests = []
        monkeypatch.setattr(stage_module, "file_digest", lambda path: digests.append(path) or "")
        await scene.put(len(scene.stream.chunks(1)))
        await scene.until(lambda: len(scene.store.waiting) == CONCURRENCY)
        first = set(scene.store.waiting)
        seal = await scene.stream.seal(1, scene.refs)
        scene.prefetch.finish()
        staging = asyncio.create_task(scene.stage.stage_deltas([seal], scene.stream.ledger.stream))
        await scene.until(lambda: sum("fingerprint" in key for key in scene.store.gets) == 2)
        assert set(scene.store.waiting) == first, "part and vector were not waited for"
        scene.store.free = True
        for key in first:
            scene.store.release(key)
        (delta,) = await staging
        assert len(delta.chunks) == len(scene.refs)
        assert {scene.store.gets[ref.key] for ref in scene.refs} == {1}
        assert digests == []
        assert [file_digest(Path(path)) for path in delta.chunks] == [ref.sha256 for ref in scene.refs]


async def test_a_version_that_is_staged_again_is_read_again(opened):
    async with opened() as scene:
        scene.store.free = True
        await scene.put(len(scene.stream.chunks(1)))
        await scene.until(lambda: len(scene.fetched) == len(scene.refs))
        seal = await scene.stream.seal(1, scene.refs)
        scene.prefetch.finish()
        (delta,) = await scene.stage.stage_deltas([seal], scene.stream.ledger.stream)
        spoiled = scene.stage.path / delta.chunks[0]
        spoiled.write_bytes(bytes(spoiled.stat().st_size))
        await scene.stage.stage_deltas([seal], scene.stream.ledger.stream)
        assert any(spoiled.read_bytes())
        assert [event.sealed for event in scene.events.of(ChunkFetched)].count(True) == 1


async def test_a_chunk_that_failed_is_fetched_by_a_later_look(opened, monkeypatch):
    async with opened() as scene:
        scene.store.free, right, failures = True, WrappedStore.get, [StoreUnavailable("no answer")] * 2

        async def get(store, key, **more):
            if key.endswith(".dcr") and failures:
                raise failures.pop()
            return await right(store, key, **more)

        monkeypatch.setattr(WrappedStore, "get", get)
        await scene.put(1)
        await scene.until(lambda: scene.fetched)
        assert len(scene.events.of(Retrying)) == 2


async def test_a_full_stage_ends_it_once_and_keeps_what_came(opened):
    async with opened() as scene:
        scene.store.free = True
        await scene.put(2)
        await scene.until(lambda: len(scene.fetched) == 2)
        scene.stage.limit = scene.stage.used + 1
        await scene.put(3)
        await scene.until(lambda: scene.events.of(Degraded))
        lists = scene.store.lists
        await asyncio.sleep(0.3)
        assert scene.store.lists <= lists + 1
        assert len(scene.events.of(Degraded)) == 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(scene.prefetch.stop(), 10)
        assert all(map(scene.stage.has, scene.stage.path.glob("1-*/*.dcr")))


async def test_a_sealed_version_does_not_wait_for_all_chunks_of_the_next_one(opened):
    """A replica that lags fetches both in turn, however many chunks of the open version are there."""
    async with opened() as scene:
        await scene.put(len(scene.stream.chunks(1)))
        seal = await scene.stream.seal(1, scene.refs)
        await scene.prefetch.cancel()
        scene.stage.forget_attempt(seal.attempt)
        scene.refs, scene.store.waiting, scene.store.gets = [], {}, Counter()
        await scene.open(2)
        await scene.put(CONCURRENCY + 3)
        assert len(scene.refs) > CONCURRENCY
        await scene.until(lambda: len(scene.store.waiting) == CONCURRENCY)
        await asyncio.sleep(0.3)  # for all that it begins before one has come
        stream = scene.stream.ledger.stream
        staging = asyncio.create_task(scene.stage.stage_deltas([seal], stream))
        await scene.until(lambda: scene.store.gets[seal.fingerprint.key])
        await asyncio.sleep(0.3)  # the part was read too, and its chunks are asked for
        begun = {*scene.store.gets}
        scene.store.release(next(iter(scene.store.waiting)))
        await scene.until(lambda: {*scene.store.gets} - begun)
        (key,) = {*scene.store.gets} - begun
        assert key.startswith(names.attempt(1, seal.attempt))
        staging.cancel()
        await asyncio.gather(staging, return_exceptions=True)
