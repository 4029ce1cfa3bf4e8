"""Targets of the ledger: records, what they are folded into, and the objects that they name."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from fuzz import samples
from fuzz.data_provider import DataProvider
from fuzz.harness import REFUSED, expect, run, scratch, target
from support.events import RecordedEvents
from support.stores.memory import MemoryStore

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.errors import Incompatible, NotFound, UsageError
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.fold import Tip, begin, fold, tip_before
from dcr_daemon.ledger.high_water_mark import HighWaterMark
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.objects import ObjectPending, Objects
from dcr_daemon.store.file import FileStore
from dcr_daemon.store.keys import is_key


def _same_again(value: Any, decode: Callable[[bytes], Any]) -> None:
    """What was accepted can be written, and reads back as itself."""
    assert decode(records.encode(value)) == value


@target
def record(data: bytes) -> None:
    """One record: parsed, folded at every place of a real ledger, and as a cold reader meets it."""
    with contextlib.suppress(ValueError):
        records.decode_head(data)
    with contextlib.suppress(ValueError):
        _same_again(records.decode_record(data), records.decode_record)
    with contextlib.suppress(*REFUSED):
        tip, stream = begin(data)
        assert tip.seq == 0
        assert is_key(stream.layout.key)
    for tip in samples.stream().tips:
        _fold(tip, data)
    with contextlib.suppress(Incompatible):
        tip_before(samples.STREAM, 5, body=data)


def _fold(tip: Tip, body: bytes) -> None:
    try:
        step = fold(tip, body)
    except Incompatible:
        return
    assert step.tip.seq == tip.seq + 1
    assert step.tip.digest == hashlib.sha256(body).hexdigest()
    if step.record is None:
        assert step.void
        assert step.tip.state == tip.state
        return
    before, after = tip.state, step.tip.state
    assert after.floor >= before.floor
    assert after.seal.version in (before.seal.version, before.seal.version + 1)
    assert step.record.prev == tip.digest


@target
def record_inside(data: bytes) -> None:
    """A record whose fields are spoiled one by one, at its own place and at others."""
    provider, stream = DataProvider(data), samples.stream()
    seq = provider.below(len(stream.bodies))
    body = provider.document(samples.document(stream.bodies[seq]))
    record(body)
    tip = stream.tips[max(0, seq - 1)]
    with contextlib.suppress(Incompatible):
        started = tip_before(samples.STREAM, seq, body=body)
        assert started is None or (started.stream, started.seq) == (samples.STREAM, seq - 1)
    _fold(tip, body)


@target
def ledger_inside(data: bytes) -> None:
    """A whole ledger with records spoiled, lost, moved or replayed, read cold and with a memory of it."""
    provider, stream = DataProvider(data), samples.stream()
    store = MemoryStore()
    store.objects = dict(stream.store.objects)
    for _ in range(1 + provider.below(2)):
        seq = provider.below(len(stream.bodies))
        key = names.record(seq)
        match provider.below(4):
            case 0:
                store.objects.pop(key, None)
            case 1:
                store.objects[key] = stream.bodies[provider.below(len(stream.bodies))]
            case 2:
                store.objects[key] = provider.document(samples.document(stream.bodies[seq]))
            case 3:
                store.objects[names.record(len(stream.bodies) + provider.below(3))] = stream.bodies[seq]
    memory = scratch() / "seen.json"
    memory.unlink(missing_ok=True)
    if provider.below(2):
        HighWaterMark(memory).saw(stream.tips[provider.below(len(stream.tips))])
    with contextlib.suppress(*REFUSED, NotFound):
        run(_read_ledger(store, memory))


async def _read_ledger(store: MemoryStore, memory: Path) -> None:
    ledger = Ledger(store, mark=memory, emit=RecordedEvents())
    state = await ledger.read()
    assert state.seal.version <= 1 or ledger.tip.seq >= len(samples.stream().bodies)
    await ledger.history.between(1)
    await ledger.history.anchors()


@target
def part(data: bytes) -> None:
    """A part: every key in it stays in the stream."""
    with contextlib.suppress(ValueError):
        found = records.decode_part(data)
        _same_again(found, records.decode_part)
        for ref in [*found.chunks, found.sums]:
            assert is_key(ref.key)


@target
def anchor_index(data: bytes) -> None:
    """An anchor's index, likewise."""
    with contextlib.suppress(ValueError):
        found = records.decode_anchor_index(data)
        _same_again(found, records.decode_anchor_index)
        for ref in [*found.files, *found.extras]:
            assert is_key(ref.key)


@target
def objects_inside(data: bytes) -> None:
    """Layout, vector, part and anchor index with digests that fit: what a seal that lies could name."""
    provider, stream = DataProvider(data), samples.stream()
    assert stream.seal is not None
    assert stream.anchor is not None
    store = MemoryStore()
    store.objects = dict(stream.store.objects)
    reader = Objects(store, floor=lambda: 0, patience=0)

    def put(ref: records.ObjectRef, body: bytes) -> records.ObjectRef:
        store.objects[ref.key] = body
        return records.ObjectRef(ref.key, len(body), records.digest(body))

    first, part_ref, index = begin(stream.bodies[0])[1], stream.seal.parts[0], stream.anchor.index
    with contextlib.suppress(*REFUSED, ObjectPending):
        match provider.below(4):
            case 0:
                body = provider.document(samples.document(samples.LAYOUT.encoded))
                lied = msgspec.structs.replace(first, layout=put(first.layout, body))
                assert run(reader.read_layout(lied)).encoded == body
            case 1:
                vector = put(stream.seal.fingerprint, provider.mangled(store.objects[stream.seal.fingerprint.key]))
                run(reader.read_vector(msgspec.structs.replace(stream.seal, fingerprint=vector), samples.LAYOUT))
            case 2:
                body = provider.document(samples.document(store.objects[part_ref.key]))
                parts = run(reader.read_parts(msgspec.structs.replace(stream.seal, parts=[put(part_ref, body)])))
                assert all(ref.key.startswith("data/1/2/") for part in parts for ref in part.chunks)
            case 3:
                body = provider.document(samples.document(store.objects[index.key]))
                found = run(reader.read_anchor_index(msgspec.structs.replace(stream.anchor, index=put(index, body))))
                assert all(ref.key.startswith("anchors/1/") for ref in [*found.files, *found.extras])


@target
def layout(data: bytes) -> None:
    """The layout object: what is accepted is canonical, and small enough to be counted in 64 bits."""
    with contextlib.suppress(*REFUSED):
        found = Layout.decode(data)
        assert found.encoded == data
        assert found.nbytes < 1 << 63
        assert len(found.keys) == len(found)


@target
def layout_inside(data: bytes) -> None:
    layout(DataProvider(data).document(samples.document(samples.LAYOUT.encoded)))


@target
def key(data: bytes) -> None:
    """Keys as records carry them: whatever passes lies below the stream's own directory."""
    text = data.decode("utf-8", "surrogateescape")
    body = msgspec.json.encode({"key": data.decode("latin-1"), "size": 1, "sha256": "0" * 64})
    try:
        name = msgspec.json.decode(body, type=records.ObjectRef).key
    except msgspec.ValidationError:
        name = text
        if not is_key(name):
            expect(UsageError, _store()._path, name)
            return
    path = _store()._path(name)
    assert path.resolve().is_relative_to(_store().root.resolve())
    assert not any(part.startswith(".") for part in path.relative_to(_store().root).parts)


@functools.cache
def _store() -> FileStore:
    return FileStore(scratch() / "bucket")
