"""Objects that are not what they were: cut, flipped, replayed, swapped; end to end.

Each object that a version or an anchor is made of is spoiled in every way after it was sealed. A replica keeps what it
has, bit for bit; nothing of the damaged version reaches its directory; a build from scratch ends in `Corrupt`, and a
publisher's restore in an alarm. When the object is put right again the replica goes on by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from support.chunks.malformed import EditableChunk, reseal
from support.events import RecordedEvents
from support.measure.memory_limit import memory_limit
from support.streams.writer import StreamWriter

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.blocks import BlockSet
from dcr_daemon.codec.decode import open_chunk
from dcr_daemon.errors import Corrupt, CorruptChunk, DcrError, EngineRefused, NotFound
from dcr_daemon.events import Alarm, Committed, Notice, Serving
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.objects import Objects
from dcr_daemon.publish.baseline.baseline import Baseline
from dcr_daemon.publish.baseline.restore import Restorer
from dcr_daemon.runtime import Workers
from dcr_daemon.store import open_store
from dcr_daemon.store.file import FileStore
from dcr_daemon.subscribe.materialize import materialize

Edit = Callable[[bytes], bytes]

EDITS: dict[str, Edit] = {
    "empty": lambda _: b"",
    "one byte": lambda body: body[:1],
    "cut in its head": lambda body: body[: min(100, len(body) // 2)],
    "cut in half": lambda body: body[: len(body) // 2],
    "a byte short": lambda body: body[:-1],
    "a byte long": lambda body: body + b"\0",
    "twice": lambda body: body + body,
    "first bit": lambda body: bytes([body[0] ^ 1]) + body[1:],
    "a bit in the middle": lambda body: (
        body[: len(body) // 2] + bytes([body[len(body) // 2] ^ 16]) + body[len(body) // 2 + 1 :]
    ),
    "last bit": lambda body: body[:-1] + bytes([body[-1] ^ 128]),
    "zeros": lambda body: bytes(len(body)),
}

#: what a version is made of, as globs below the stream's directory
PARTS = {"chunk": "data/2/*/*-0.dcr", "part": "data/2/*/*.part.json", "vector": "data/2/*/fingerprint.bin"}


class Object:
    """One object of a stream in a directory."""

    def __init__(self, stream: StreamWriter, pattern: str) -> None:
        (self.path,) = sorted(stream.home.glob(pattern))[:1]
        self.body = self.path.read_bytes()

    def spoil(self, body: bytes) -> None:
        assert body != self.body
        self.path.write_bytes(body)

    def restore(self) -> None:
        self.path.write_bytes(self.body)


async def published(make_stream, count: int = 2, *, seed: int = 0) -> StreamWriter:
    """A stream with an anchor of version 1 and everything sealed up to `count`."""
    stream = await make_stream(count, seed=seed)
    for version in range(1, count + 1):
        await stream.publish(version)
        if version == 1:
            await stream.anchor(1)
    return stream


async def serving_one(stream: StreamWriter, make_replica):
    """A replica that has served version 1 before."""
    replica = make_replica(stream)
    stream.versions.save(replica.directory, 1, shard_bytes=30_000)
    return replica


async def refuses_then_recovers(stream: StreamWriter, replica, thing: Object, body: bytes) -> None:
    """Spoil while it serves version 1; it stays there, says so, and goes on when the object is whole again."""
    thing.spoil(body)
    async with replica.running() as task:
        await replica.until(lambda: replica.events.of(Notice), task)
        await asyncio.sleep(0.1)
        assert stream.versions.version_of(replica.directory) == 1
        assert not replica.events.of(Committed)
        thing.restore()
        await replica.until(lambda: replica.events.of(Serving), task)
    assert stream.versions.version_of(replica.directory) == 2
    assert [event.version for event in replica.events.of(Committed)] == [2]


@pytest.mark.parametrize("kind", PARTS)
async def test_a_damaged_object_holds_a_replica_where_it_is(make_stream, make_replica, kind):
    stream = await published(make_stream)
    thing = Object(stream, PARTS[kind])
    for edit in EDITS.values():
        await refuses_then_recovers(stream, await serving_one(stream, make_replica), thing, edit(thing.body))


@pytest.mark.parametrize("kind", PARTS)
async def test_an_object_of_another_version_attempt_rank_or_stream_is_not_taken_for_it(make_stream, make_replica, kind):
    stream, other = await published(make_stream), await published(make_stream, seed=1)
    thing = Object(stream, PARTS[kind])
    name = thing.path.name
    strangers = [next(stream.home.glob(f"data/1/*/{name}")), next(other.home.glob(f"data/2/*/{name}"))]
    if kind == "chunk":
        strangers.append(thing.path.with_name(name.replace("-0.dcr", "-1.dcr")))
    for stranger in strangers:
        await refuses_then_recovers(stream, await serving_one(stream, make_replica), thing, stranger.read_bytes())


async def test_a_replica_serves_on_while_the_next_version_is_damaged(make_stream, make_replica):
    stream = await published(make_stream, 1)
    stream.versions.step()
    replica = await serving_one(stream, make_replica)
    async with replica.running() as task:
        await replica.until(lambda: replica.events.of(Serving), task)
        await stream.open(2)
        first, *others = stream.chunks(2)
        refs = [await stream.put(2, first, edit=EDITS["a byte short"]), *[await stream.put(2, c) for c in others]]
        await stream.seal(2, refs)
        await replica.until(lambda: "SHA-256" in str(replica.events.of(Notice)), task)
        assert stream.versions.version_of(replica.directory) == 1
        assert (replica.directory / "config.json").exists(), "a loader may still load it"
        Object(stream, PARTS["chunk"]).path.write_bytes(first.data)
        await replica.until(lambda: replica.events.of(Serving)[-1].version == 2, task)
    assert stream.versions.version_of(replica.directory) == 2


@pytest.mark.parametrize("kind", PARTS)
async def test_nothing_is_built_from_a_damaged_object(make_stream, tmp_path, kind):
    stream = await published(make_stream)
    thing, store = Object(stream, PARTS[kind]), await open_store(stream.url)
    for name, edit in EDITS.items():
        thing.spoil(edit(thing.body))
        with pytest.raises(Corrupt):
            await materialize(store, out=tmp_path / "built")
        assert not (tmp_path / "built").exists(), name
        alarms = await restored(stream, tmp_path / f"state {name}")
        assert [alarm.must for alarm in alarms] == ["P4"], "it takes nothing damaged for the version, and says so"
        thing.restore()
    await materialize(store, out=tmp_path / "built")
    assert stream.versions.version_of(tmp_path / "built") == 2
    assert await restored(stream, tmp_path / "state") == []


async def restored(stream: StreamWriter, state: Path) -> list[Alarm]:
    """What a publisher's restore raised an alarm for: the baseline is the head, bit for bit, or it is called astray."""
    await asyncio.to_thread(state.mkdir)
    ledger, workers, events = Ledger(stream.store), Workers(1), RecordedEvents()
    await ledger.read()
    objects = Objects(stream.store, floor=lambda: 0, patience=0)
    baseline = Baseline(state, BlockSet.whole(stream.versions.layout), ledger.stream.stream, workers)
    try:
        restorer = Restorer(
            ledger, objects, baseline=baseline, base=None, workers=workers, emit=events, fetched=state / "fetched"
        )
        await restorer.restore()
        values = stream.versions.values[ledger.state.seal.version]
        layout = stream.versions.layout
        whole = all(
            np.array_equal(baseline.read(t, 0, spec.elements), values[spec.name]) for t, spec in enumerate(layout)
        )
        assert baseline.unverified_base or whole
        return events.of(Alarm)
    finally:
        baseline.close()
        workers.close()


@pytest.mark.parametrize("pattern", ["anchors/1/*/model-0.safetensors", "anchors/1/*/index.json", "layouts/*.json"])
async def test_a_newcomer_loads_nothing_damaged(make_stream, make_replica, pattern):
    stream = await published(make_stream)
    thing = Object(stream, pattern)
    for name, edit in EDITS.items():
        thing.spoil(edit(thing.body))
        replica = make_replica(stream)
        with pytest.raises((Corrupt, NotFound, EngineRefused)):
            await replica.once()
        assert not list(replica.directory.glob("*.safetensors")), name
        thing.restore()
        await replica.once()
        assert stream.versions.version_of(replica.directory) == 2


async def test_an_anchor_file_of_another_version_is_not_loaded(make_stream, make_replica):
    stream, other = await published(make_stream), await published(make_stream, seed=1)
    thing = Object(stream, "anchors/1/*/model-0.safetensors")
    thing.spoil(Object(other, "anchors/1/*/model-0.safetensors").body)
    replica = make_replica(stream)
    with pytest.raises(Corrupt):
        await replica.once()
    thing.restore()
    await replica.once()
    assert stream.versions.version_of(replica.directory) == 2


async def test_damaged_records_move_nobody_and_are_told(make_stream, make_replica):
    """A damaged seal is neither a version nor void: nobody goes past it, and all go on once it is restored."""
    stream = await published(make_stream)
    seal = Object(stream, f"ledger/{stream.ledger.tip.seq:016d}.json")
    for edit in EDITS.values():
        seal.spoil(edit(seal.body))
        replica = await serving_one(stream, make_replica)
        with pytest.raises(Corrupt, match="is damaged, or no record of this stream"):
            await replica.once()
        assert stream.versions.version_of(replica.directory) == 1
        assert replica.events.of(Alarm)[0].must == "L2"
        seal.restore()
        await replica.once()
        assert stream.versions.version_of(replica.directory) == 2


async def test_records_that_are_replayed_or_of_another_stream_are_not_believed(make_stream, make_replica):
    stream, other = await published(make_stream), await published(make_stream, seed=1)
    tail = stream.ledger.tip.seq
    seal, stranger = Object(stream, names.record(tail)), Object(other, names.record(tail))
    for body in (stranger.body, Object(stream, names.record(tail - 2)).body, Object(stream, names.record(3)).body):
        seal.spoil(body)
        replica = await serving_one(stream, make_replica)
        with pytest.raises(Corrupt, match="is damaged, or no record of this stream"):
            await replica.once()
        assert stream.versions.version_of(replica.directory) == 1
        assert replica.events.of(Alarm)
    first = Object(stream, names.record(0))
    first.spoil(Object(other, names.record(0)).body)
    with pytest.raises(DcrError):
        await replica.once()
    assert stream.versions.version_of(replica.directory) == 1


class Noisy(FileStore):
    """Every object arrives damaged the first time, and whole ever after."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.seen: set[str] = set()

    async def get(self, key: str, *, limit: int, keep: Any = None) -> bytes:
        body = await super().get(key, limit=limit)
        if key in self.seen:
            return body
        self.seen.add(key)
        return EDITS["a bit in the middle"](body)


async def test_what_is_damaged_on_the_way_is_fetched_again_and_believed_by_nobody(make_stream, make_replica):
    stream = await published(make_stream)
    replica = await serving_one(stream, make_replica)
    replica.store = Noisy(stream.home)
    replica.store.seen = {names.record(0)}  # without the first record there is no stream to be read at all
    await replica.once()
    assert stream.versions.version_of(replica.directory) == 2
    assert not replica.events.of(Alarm)
    replica.store = None
    await replica.once()  # what it remembers is what the bucket holds


# Objects whose digests fit, written by somebody who means harm or has lost his mind.


def bomb(declared: int, size: int) -> bytes:
    """A zstd frame of `size` zero bytes, at least 128 KiB, that declares `declared`."""
    frame = bytearray(zstandard.ZstdCompressor(level=1).compress(bytes(size)))
    assert frame[4] >> 6 == 2, "its content size is a u32"
    at = 5 if frame[4] & 32 else 6  # behind the window, if there is one
    assert int.from_bytes(frame[at : at + 4], "little") == size
    frame[at : at + 4] = declared.to_bytes(4, "little")
    return bytes(frame)


HUGE = (1 << 32) - 1


def lie(kind: int, *, size: int, frame: Callable[[], bytes] | None = None) -> Edit:
    """A chunk that says of one of its streams that it has `size` bytes, stored as this frame; its checksum fits."""

    def edit(body: bytes) -> bytes:
        forged = EditableChunk.of(body)
        forged.sizes[kind] = size
        if frame is not None:
            forged.stored[kind] = frame()
        return forged.build()

    return edit


def many_segments(body: bytes) -> bytes:
    forged = EditableChunk.of(body)
    forged.header["segments"] = 1 << 16
    return forged.build()


LIES: dict[str, Edit] = {
    "a frame that says it is huge": lie(0, size=HUGE, frame=lambda: bomb(HUGE, 1 << 18)),
    "a frame that is larger than it says": lie(0, size=70_000, frame=lambda: bomb(70_000, 48 << 20)),
    "a frame as large as the limit": lie(1, size=60 << 20, frame=lambda: bomb(60 << 20, 60 << 20)),
    "more segments than bytes": many_segments,
    "a stream of four gigabytes": lie(1, size=HUGE),
    "noise behind a good checksum": lambda body: reseal(body[:152] + bytes(range(256)) * 20),
}


BOUND = 4 << 20  #: bytes that a decoder of these small tensors may take, whatever the chunk says of itself


def open_all(body: bytes, layout: Layout) -> None:
    chunk = open_chunk(body, layout)
    for n in range(len(chunk.segments)):
        chunk.changes(n)


@pytest.mark.parametrize("what", LIES)
async def test_a_sealed_lie_is_never_applied(make_stream, make_replica, what):
    """The seal names the very bytes: only the decoder stands between them and the weights."""
    stream = await make_stream(2)
    await stream.publish(1)
    await stream.open(2)
    honest = stream.chunks(2)
    lying = LIES[what](honest[0].data)
    with memory_limit(BOUND), pytest.raises(CorruptChunk):
        open_all(lying, stream.versions.layout)
    refs = [await stream.put(2, chunk) for chunk in honest[1:]]
    key = names.chunk(2, stream.attempt, "g", 0, "a0", honest[0].id.n)
    await stream.store.create(key, lying)
    first = records.ChunkRef(key, len(lying), records.digest(lying), len(honest[0].segments), honest[0].changed)
    await stream.seal(2, [first, *refs])
    replica = await serving_one(stream, make_replica)
    async with replica.running() as task:
        await replica.until(lambda: replica.events.of(Alarm), task)
        assert stream.versions.version_of(replica.directory) == 1
        await stream.anchor(2)  # the publisher's answer (must P4)
        await replica.until(lambda: replica.events.of(Serving), task)
    assert stream.versions.version_of(replica.directory) == 2
    assert [event.route for event in replica.events.of(Committed)] == ["anchor"]
    assert {event.must for event in replica.events.of(Alarm)} == {"P4"}
