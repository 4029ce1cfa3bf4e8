"""Nothing that a record names is believed before size and digest match (musts L6, P2, T1)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from support.events import RecordedEvents
from support.stores.memory import MemoryStore
from support.stores.wrapped import WrappedStore
from support.streams.writer import StreamWriter
from support.virtual_time import VirtualTimeRuntime

from dcr_daemon.codec.chunk import CHUNK_LIMIT
from dcr_daemon.errors import Corrupt, Incompatible, StoreUnavailable
from dcr_daemon.events import Waiting
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.objects import BelowFloor, ObjectPending, Objects
from dcr_daemon.ledger.records import ObjectRef, Part, Seal
from dcr_daemon.runtime import Workers
from dcr_daemon.store.partial import PartialFile


@pytest.fixture
def stream(store: MemoryStore, make_versions: Callable[..., Any]) -> StreamWriter:
    """Two versions, an anchor of the first."""

    async def write() -> StreamWriter:
        writer = StreamWriter(store.url, make_versions(2), store)
        await writer.create()
        await writer.publish(1)
        await writer.anchor(1)
        await writer.publish(2)
        return writer

    return asyncio.run(write())


@pytest.fixture
def reader(stream: StreamWriter, events: RecordedEvents) -> Objects:
    return Objects(stream.store, floor=lambda: stream.ledger.state.floor, emit=events, patience=10)


def seal_of(stream: StreamWriter, version: int) -> Seal:
    return stream.ledger.history.seals[version]


def resealed(stream: StreamWriter, version: int, /, **changes: Any) -> Seal:
    """The seal of a version whose one part says something else."""
    seal = seal_of(stream, version)
    part = records.decode_part(stream.store.objects[seal.parts[0].key])
    body = records.encode(msgspec.structs.replace(part, **changes))
    stream.store.objects[seal.parts[0].key] = body
    return msgspec.structs.replace(seal, parts=[ObjectRef(seal.parts[0].key, len(body), records.digest(body))])


def part_of(stream: StreamWriter, version: int) -> Part:
    return records.decode_part(stream.store.objects[seal_of(stream, version).parts[0].key])


def test_what_was_published_is_read_back(stream: StreamWriter, reader: Objects) -> None:
    async def check() -> None:
        versions, ledger = stream.versions, stream.ledger
        layout = await reader.read_layout(ledger.stream)
        assert layout == versions.layout
        assert np.array_equal(await reader.read_vector(ledger.stream, layout), versions.vector(0))
        for version in (1, 2):
            seal = seal_of(stream, version)
            vector = await reader.read_vector(seal, layout)
            assert vector.dtype == np.uint64
            assert np.array_equal(vector, versions.vector(version))
            (part,) = await reader.read_parts(seal)
            chunks = [await reader.read_chunk(chunk, version) for chunk in part.chunks]
            assert len(chunks) > 1
        (anchor,) = await ledger.history.anchors()
        index = await reader.read_anchor_index(anchor)
        for ref in index.files:
            assert len(await reader.read_file(ref, 1)) == ref.size

    asyncio.run(check())


def test_digests_may_be_left_to_workers(stream: StreamWriter) -> None:
    async def check() -> None:
        workers = Workers(1)
        reader = Objects(stream.store, floor=lambda: 0, workers=workers)
        assert await reader.read_layout(stream.ledger.stream) == stream.versions.layout
        workers.close()

    asyncio.run(check())


class TestDamage:
    @pytest.mark.parametrize(
        "spoil", [lambda b: b[:-1], lambda b: b + b"x", lambda b: bytes([b[0] ^ 1]) + b[1:], lambda b: b""]
    )
    def test_it_is_fetched_once_more_and_then_named(
        self, stream: StreamWriter, reader: Objects, spoil: Callable[[bytes], bytes]
    ) -> None:
        chunk = part_of(stream, 1).chunks[0]
        stream.store.objects[chunk.key] = spoil(stream.store.objects[chunk.key])
        stream.store.requests.clear()
        with pytest.raises(Corrupt, match=chunk.key):
            asyncio.run(reader.read_chunk(chunk, 1))
        assert stream.store.requests["get"] == 2

    def test_bytes_that_come_right_the_second_time_are_taken(self, stream: StreamWriter, reader: Objects) -> None:
        chunk = part_of(stream, 1).chunks[0]
        good = stream.store.objects[chunk.key]
        stream.store.objects[chunk.key] = b"damaged on the way"

        async def heal(_operation: str, _key: str) -> None:
            if stream.store.requests["get"] > 1:
                stream.store.objects[chunk.key] = good

        stream.store.requests.clear()
        stream.store.before = heal
        assert asyncio.run(reader.read_chunk(chunk, 1)) == good

    def test_what_an_earlier_process_left_is_thrown_away_if_it_is_wrong(
        self, stream: StreamWriter, tmp_path: Path
    ) -> None:
        """It says nothing about the bucket, which may still be misread once."""

        class Continuing(WrappedStore):
            """Goes on after what is kept, as the S3 store does; the first whole read is damaged."""

            began: ClassVar[list[int]] = []

            async def get(self, key: str, *, limit: int, keep: Any = None) -> bytes:
                body, kept = await self.inner.get(key, limit=limit), bytes(await keep.load())
                self.began.append(len(kept))
                return b"damaged" if self.began == [4, 0] else kept + body[len(kept) :]

        async def check() -> None:
            keep, store = PartialFile(tmp_path / "chunk", workers=Workers(1)), Continuing(stream.store)
            await keep.append(b"junk")
            (chunk,) = part_of(stream, 1).chunks[:1]
            body = await Objects(store, floor=lambda: 0).read_chunk(chunk, 1, keep=keep)
            assert records.digest(body) == chunk.sha256
            assert store.began == [4, 0, 0]
            assert not await keep.exists()

        asyncio.run(check())

    def test_what_cannot_be_deleted_is_no_reason_to_read_for_ever(self, stream: StreamWriter, tmp_path: Path) -> None:
        class Keeping(WrappedStore):
            async def get(self, key: str, *, limit: int, keep: Any = None) -> bytes:
                return await self.inner.get(key, limit=limit)

        chunk = part_of(stream, 1).chunks[0]
        stream.store.objects[chunk.key] = b"damaged"

        async def check() -> None:
            keep = PartialFile(tmp_path / "chunk", workers=Workers(1))
            keep.path.mkdir()  # as on a disk that became read-only, it exists and `unlink` fails
            reader = Objects(Keeping(stream.store), floor=lambda: 0)
            with pytest.raises(Corrupt, match="twice"):
                await asyncio.wait_for(reader.read_chunk(chunk, 1, keep=keep), 30)

        asyncio.run(check())

    def test_a_size_over_the_limit_is_not_even_fetched(self, stream: StreamWriter, reader: Objects) -> None:
        chunk = msgspec.structs.replace(part_of(stream, 1).chunks[0], size=CHUNK_LIMIT + 1)
        stream.store.requests.clear()
        with pytest.raises(Corrupt, match="the limit is"):
            asyncio.run(reader.read_chunk(chunk, 1))
        assert stream.store.requests["get"] == 0

    def test_a_vector_must_add_up_to_what_its_record_says(self, stream: StreamWriter, reader: Objects) -> None:
        wrong = msgspec.structs.replace(seal_of(stream, 1), after="0" * 16)
        with pytest.raises(Corrupt, match="does not add up"):
            asyncio.run(reader.read_vector(wrong, stream.versions.layout))
        short = b"\0" * 8
        stream.store.objects["data/short"] = short
        ref = ObjectRef("data/short", 8, records.digest(short))
        wrong = msgspec.structs.replace(seal_of(stream, 1), fingerprint=ref)
        with pytest.raises(Corrupt, match="is not a vector of"):
            asyncio.run(reader.read_vector(wrong, stream.versions.layout))


class TestParts:
    """Must P2: a part that is not of exactly this attempt is refused."""

    @pytest.mark.parametrize("change", [{"stream": "0ther"}, {"attempt": 99}, {"base": 1}, {"version": 2}], ids=str)
    def test_a_part_of_another_attempt(self, stream: StreamWriter, reader: Objects, change: dict[str, Any]) -> None:
        with pytest.raises(Corrupt, match="belongs to another attempt"):
            asyncio.run(reader.read_parts(resealed(stream, 1, **change)))

    def test_a_chunk_of_another_attempt(self, stream: StreamWriter, reader: Objects) -> None:
        foreign = part_of(stream, 2).chunks
        seal = resealed(stream, 1, chunks=foreign, changed=sum(chunk.changed for chunk in foreign))
        with pytest.raises(Corrupt, match="which is not below data/1/"):
            asyncio.run(reader.read_parts(seal))

    def test_a_chunk_named_twice(self, stream: StreamWriter, reader: Objects) -> None:
        chunks = part_of(stream, 1).chunks
        seal = resealed(stream, 1, chunks=[*chunks, chunks[0]], changed=seal_of(stream, 1).changed + chunks[0].changed)
        with pytest.raises(Corrupt, match="name a chunk twice"):
            asyncio.run(reader.read_parts(seal))

    def test_a_chunk_left_out(self, stream: StreamWriter, reader: Objects) -> None:
        part = part_of(stream, 1)
        with pytest.raises(Corrupt, match="does not add up"):
            asyncio.run(reader.read_parts(resealed(stream, 1, chunks=part.chunks[1:])))
        fewer = part.changed - part.chunks[0].changed
        with pytest.raises(Corrupt, match="do not add up"):
            asyncio.run(reader.read_parts(resealed(stream, 1, chunks=part.chunks[1:], changed=fewer)))

    def test_a_part_of_a_newer_format(self, stream: StreamWriter, reader: Objects) -> None:
        with pytest.raises(Incompatible, match="format 2"):
            asyncio.run(reader.read_parts(resealed(stream, 1, format=2)))

    @pytest.mark.parametrize("body", [b"{}", b"[" * 50_000, b"\xff"])
    def test_bytes_that_are_no_part(self, stream: StreamWriter, reader: Objects, body: bytes) -> None:
        seal = seal_of(stream, 1)
        key = seal.parts[0].key
        stream.store.objects[key] = body
        seal = msgspec.structs.replace(seal, parts=[ObjectRef(key, len(body), records.digest(body))])
        with pytest.raises(Corrupt, match="does not parse"):
            asyncio.run(reader.read_parts(seal))


class TestAnchors:
    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"version": 2}, "is of version 2"),
            ({"stream": "0ther"}, "of stream 0ther"),
            ({"files": [ObjectRef("data/1/2/x", 1, "0" * 64)]}, "which is not below anchors/1/"),
            ({"extras": [ObjectRef("anchors/11/1/x", 1, "0" * 64)]}, "which is not below anchors/1/"),
        ],
    )
    def test_an_index_of_something_else(
        self, stream: StreamWriter, reader: Objects, change: dict[str, Any], why: str
    ) -> None:
        async def check() -> None:
            (anchor,) = await stream.ledger.history.anchors()
            index = await reader.read_anchor_index(anchor)
            body = records.encode(msgspec.structs.replace(index, **change))
            stream.store.objects[anchor.index.key] = body
            ref = ObjectRef(anchor.index.key, len(body), records.digest(body))
            with pytest.raises(Corrupt, match=why):
                await reader.read_anchor_index(msgspec.structs.replace(anchor, index=ref))

        asyncio.run(check())


class TestMissing:
    """Must L6."""

    def test_above_the_floor_it_is_waited_for(
        self, stream: StreamWriter, reader: Objects, events: RecordedEvents, still: VirtualTimeRuntime
    ) -> None:
        chunk = part_of(stream, 2).chunks[0]
        body = stream.store.objects.pop(chunk.key)
        still.slept.clear()

        def appear(_seconds: float) -> None:
            if len(still.slept) == 3:
                stream.store.objects[chunk.key] = body

        still.on_sleep = appear
        assert asyncio.run(reader.read_chunk(chunk, 2)) == body
        assert len(events.of(Waiting)) == 3
        assert chunk.key in events.of(Waiting)[0].what

    def test_not_for_ever(self, stream: StreamWriter, reader: Objects, still: VirtualTimeRuntime) -> None:
        chunk = part_of(stream, 2).chunks[0]
        del stream.store.objects[chunk.key]
        with pytest.raises(ObjectPending, match="did not appear in 10 s") as raised:
            asyncio.run(reader.read_chunk(chunk, 2))
        assert isinstance(raised.value, StoreUnavailable)
        assert 10 <= still.clock < 20

    def test_below_the_floor_the_caller_plans_again(self, stream: StreamWriter, events: RecordedEvents) -> None:
        floor = 0
        reader = Objects(stream.store, floor=lambda: floor, emit=events, patience=10)
        chunk = part_of(stream, 1).chunks[0]
        body = stream.store.objects.pop(chunk.key)
        floor = 2
        with pytest.raises(BelowFloor, match="version 1 is below the floor"):
            asyncio.run(reader.read_chunk(chunk, 1))
        assert not events.of(Waiting)
        stream.store.objects[chunk.key] = body
        assert asyncio.run(reader.read_chunk(chunk, 1)) == body, "what is still there may be used"

    def test_a_floor_that_rises_while_we_wait_is_noticed(self, stream: StreamWriter, still: VirtualTimeRuntime) -> None:
        floors = iter([0, 0, 2])
        still.slept.clear()
        reader = Objects(stream.store, floor=lambda: next(floors), patience=1000)
        chunk = part_of(stream, 1).chunks[0]
        del stream.store.objects[chunk.key]
        with pytest.raises(BelowFloor):
            asyncio.run(reader.read_chunk(chunk, 1))
        assert len(still.slept) == 2


def test_keys_are_made_in_one_place() -> None:
    """docs/FORMAT.md 3: where things lie never changes under a stream."""
    assert names.record(7) == "ledger/0000000000000007.json"
    assert names.chunk(3, 9, "g", 0, "a", 2) == "data/3/9/g-0-a-2.dcr"
    assert names.part(3, 9, "g", 0, "a") == "data/3/9/g-0-a.part.json"
    assert names.sums(3, 9, "g", 0, "a") == "data/3/9/g-0-a.sums"
    assert names.fail(3, 9, "g", 0, "a") == "data/3/9/g-0-a.fail.json"
    assert names.vector(3, 9) == "data/3/9/fingerprint.bin"
    assert names.anchor(3, 9) == "anchors/3/9/"
    assert names.layout("ab") == "layouts/ab.json"
    assert names.replica("r") == "replicas/r.json"
