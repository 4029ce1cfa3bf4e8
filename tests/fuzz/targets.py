"""Every parser of bytes that come from outside: one function each, `bytes -> None`.

A target lets the parser's own typed errors pass and nothing else: any other exception, an accepted value that breaks a
promise, or more memory than `memory_limit` allows is a finding. Some targets take the bytes as they are; those named
`…_inside` read them as choices of how to spoil something valid whose checksums are then made to fit again, so that
what lies behind a digest is reached too.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import samples
from dice import Dice
from fakes import MemoryStore, Recorder
from forged import Forged, reseal
from memory import memory_limit

from dcr_daemon.canonical.fingerprint import advance, fingerprint
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint import safetensors
from dcr_daemon.checkpoint.directory import Checkpoint, read_index
from dcr_daemon.checkpoint.pieces import read_pieces
from dcr_daemon.checkpoint.safetensors import SafetensorsBytes, SafetensorsFile
from dcr_daemon.codec.decode import open_chunk, read_id
from dcr_daemon.codec.undo import undo_chunk
from dcr_daemon.config import read_config
from dcr_daemon.engine import messages
from dcr_daemon.engine.checkout import Checkout
from dcr_daemon.engine.compose import check_chain, compose, open_hop
from dcr_daemon.engine.journal import read_journal
from dcr_daemon.engine.port import Attached, EngineStatus, Hop, Prepared, Swapped
from dcr_daemon.errors import (
    Corrupt,
    CorruptChunk,
    DcrError,
    EngineRefused,
    Incompatible,
    Misuse,
    NotFound,
)
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.fold import Tip, begin, fold, tip_before
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.memory import Memory
from dcr_daemon.ledger.objects import NotYet, Objects
from dcr_daemon.publish import published
from dcr_daemon.publish.baseline import Baseline
from dcr_daemon.runtime import Workers
from dcr_daemon.store.file import FileStore
from dcr_daemon.store.keys import is_key
from dcr_daemon.subscribe.status import decode_report
from dcr_daemon.vllm_plugin import calls, dense
from dcr_daemon.vllm_plugin.calls import Code
from dcr_daemon.vllm_plugin.rank import Refusal
from dcr_daemon.vllm_plugin.worker import answer

T = TypeVar("T")
Target = Callable[[bytes], None]

SLACK = 8 << 20  #: bytes that any target may take, whatever its input
FACTOR = 96  #: bytes per byte of input: what the smallest JSON values cost as Python objects

TARGETS: dict[str, Target] = {}
REFUSED = (Corrupt, Incompatible)


def target(function: Target) -> Target:
    TARGETS[function.__name__] = function
    return function


def bounded(function: Target, data: bytes) -> None:
    """Run a target within its bound of memory."""
    with memory_limit(SLACK + FACTOR * len(data)):
        function(data)


@functools.cache
def scratch() -> Path:
    """A directory of this process for parsers that read files; in memory where that is possible."""
    shared = Path("/dev/shm")
    holder = tempfile.TemporaryDirectory(prefix="dcr-fuzz-", dir=shared if shared.is_dir() else None)
    _keep.append(holder)
    return Path(holder.name)


_keep: list[Any] = []


def as_file(name: str, data: bytes) -> Path:
    path = scratch() / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return path


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def run(work: Coroutine[Any, Any, T]) -> T:
    return loop().run_until_complete(work)


def _expect(kind: type[Exception], function: Callable[..., object], *arguments: object) -> None:
    try:
        function(*arguments)
    except kind:
        return
    raise AssertionError(f"{arguments} were taken by {function}")


# The ledger.


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
        tip_before(samples.STREAM, 5, data)


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
    dice, stream = Dice(data), samples.stream()
    seq = dice.below(len(stream.bodies))
    body = dice.document(samples.document(stream.bodies[seq]))
    record(body)
    tip = stream.tips[max(0, seq - 1)]
    with contextlib.suppress(Incompatible):
        started = tip_before(samples.STREAM, seq, body)
        assert started is None or (started.stream, started.seq) == (samples.STREAM, seq - 1)
    _fold(tip, body)


@target
def ledger_inside(data: bytes) -> None:
    """A whole ledger with records spoiled, lost, moved or replayed, read cold and with a memory of it."""
    dice, stream = Dice(data), samples.stream()
    store = MemoryStore()
    store.objects = dict(stream.store.objects)
    for _ in range(1 + dice.below(2)):
        seq = dice.below(len(stream.bodies))
        key = names.record(seq)
        match dice.below(4):
            case 0:
                store.objects.pop(key, None)
            case 1:
                store.objects[key] = stream.bodies[dice.below(len(stream.bodies))]
            case 2:
                store.objects[key] = dice.document(samples.document(stream.bodies[seq]))
            case 3:
                store.objects[names.record(len(stream.bodies) + dice.below(3))] = stream.bodies[seq]
    memory = scratch() / "seen.json"
    memory.unlink(missing_ok=True)
    if dice.below(2):
        Memory(memory).saw(stream.tips[dice.below(len(stream.tips))])
    with contextlib.suppress(*REFUSED, NotFound):
        run(_read_ledger(store, memory))


async def _read_ledger(store: MemoryStore, memory: Path) -> None:
    ledger = Ledger(store, memory=memory, emit=Recorder())
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
    dice, stream = Dice(data), samples.stream()
    assert stream.seal is not None
    assert stream.anchor is not None
    store = MemoryStore()
    store.objects = dict(stream.store.objects)
    reader = Objects(store, floor=lambda: 0, patience=0)

    def put(ref: records.ObjectRef, body: bytes) -> records.ObjectRef:
        store.objects[ref.key] = body
        return records.ObjectRef(ref.key, len(body), records.digest(body))

    first, part_ref, index = begin(stream.bodies[0])[1], stream.seal.parts[0], stream.anchor.index
    with contextlib.suppress(*REFUSED, NotYet):
        match dice.below(4):
            case 0:
                body = dice.document(samples.document(samples.LAYOUT.encoded))
                lied = msgspec.structs.replace(first, layout=put(first.layout, body))
                assert run(reader.read_layout(lied)).encoded == body
            case 1:
                vector = put(stream.seal.fingerprint, dice.mangled(store.objects[stream.seal.fingerprint.key]))
                run(reader.read_vector(msgspec.structs.replace(stream.seal, fingerprint=vector), samples.LAYOUT))
            case 2:
                body = dice.document(samples.document(store.objects[part_ref.key]))
                parts = run(reader.read_parts(msgspec.structs.replace(stream.seal, parts=[put(part_ref, body)])))
                assert all(ref.key.startswith("data/1/2/") for part in parts for ref in part.chunks)
            case 3:
                body = dice.document(samples.document(store.objects[index.key]))
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
    layout(Dice(data).document(samples.document(samples.LAYOUT.encoded)))


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
            _expect(Misuse, _store()._path, name)
            return
    path = _store()._path(name)
    assert path.resolve().is_relative_to(_store().root.resolve())
    assert not any(part.startswith(".") for part in path.relative_to(_store().root).parts)


@functools.cache
def _store() -> FileStore:
    return FileStore(scratch() / "bucket")


# Chunks.


def _check_chunk(body: bytes, undo: bytes = b"") -> None:
    try:
        read_id(body)
        chunk = open_chunk(body, samples.LAYOUT)
    except CorruptChunk:
        return
    for i, segment in enumerate(chunk.segments):
        spec = samples.LAYOUT[segment.tensor]
        try:
            changes = chunk.changes(i)
        except CorruptChunk:
            continue
        assert len(changes.positions) == len(changes.operands) == segment.changed >= 1
        assert bool((np.diff(changes.positions) > 0).all())
        where = segment.box.canonical(changes.positions)
        assert 0 <= int(where.min()) <= int(where.max()) < spec.elements
    bits = [array.copy() for array in samples.values()]
    with contextlib.suppress(Corrupt):
        undo_chunk(chunk, undo, bits)


@target
def chunk(data: bytes) -> None:
    """A chunk as it is, and under a checksum that fits."""
    _check_chunk(data)
    if len(data) > 16:
        _check_chunk(reseal(data))


@target
def chunk_header(data: bytes) -> None:
    with contextlib.suppress(CorruptChunk):
        read_id(data)


_COLUMNS = (
    "rank",
    "positions",
    "operation",
    "shift",
    "tensor",
    "changed",
    "carries",
    "escapes",
    "dst",
    "shape",
    "strides",
)


def _forge(dice: Dice) -> tuple[bytes, int]:
    """A chunk whose table, streams or sizes are spoiled behind a good checksum; the number of the one it was."""
    number = dice.below(len(samples.chunks()))
    forged = Forged.of(samples.chunks()[number])
    for _ in range(dice.below(4)):
        table = forged.table
        name = dice.pick(_COLUMNS)
        column = getattr(table, name).copy()
        row = dice.below(column.size)
        column[row] = dice.number(int(column[row]), int(np.iinfo(column.dtype).max))
        setattr(table, name, column)
        values = {name: getattr(table, name).tolist() for name in _COLUMNS}
        if sum(values["rank"]) == len(values["shape"]):
            forged = forged.with_table(**values)
    for _ in range(dice.below(3)):
        kind = dice.pick(sorted(forged.streams))
        raw = forged.streams[kind]
        match dice.below(5):
            case 0:
                forged.streams[kind] = (dice.mangled(raw) + raw)[: len(raw)]
            case 1:
                forged.streams[kind] = dice.mangled(raw) or b"\0"
            case 2:
                forged.sizes[kind] = dice.number(len(raw), (1 << 32) - 1)
            case 3:  # a frame that says, or gives, another size than the directory
                forged.stored[kind] = dice.mangled(_frame(dice, raw))
            case 4:
                forged.stored[kind] = _frame(dice, bytes(dice.number(len(raw), 1 << 20)))
    if not dice.below(8):
        forged.tail = dice.take(8)
    return forged.build(), number


def _frame(dice: Dice, raw: bytes) -> bytes:
    import zstandard

    sized = bool(dice.below(2))
    parameters = zstandard.ZstdCompressionParameters(
        compression_level=1, window_log=dice.pick((10, 17, 24, 27)), write_content_size=sized
    )
    return zstandard.ZstdCompressor(compression_params=parameters).compress(raw)


@target
def chunk_inside(data: bytes) -> None:
    """Behind the checksum: tables, streams and frames that contradict one another, then the way back."""
    dice = Dice(data)
    body, number = _forge(dice)
    undo = samples.undo_bytes()[number]
    _check_chunk(body, dice.mangled(undo) if dice.below(2) else undo)


@target
def compose_inside(data: bytes) -> None:
    """Chunks whose sums lead from the live vector to the next: composed into absolute values, or refused."""
    body, _ = _forge(Dice(data))
    try:
        opened = open_chunk(body, samples.LAYOUT)
    except CorruptChunk:
        return
    before = fingerprint(samples.LAYOUT, list(samples.values()))
    after = advance(before, opened.segments)
    identity = opened.id
    hop = Hop(
        version=identity.version,
        base=identity.base,
        attempt=identity.attempt,
        chunks=[str(as_file("a.dcr", body))],
        before=str(as_file("before.bin", before.astype("<u8").tobytes())),
        after=str(as_file("after.bin", after.astype("<u8").tobytes())),
    )
    live = {spec.name: bits for spec, bits in zip(samples.LAYOUT, samples.values(), strict=True)}
    with contextlib.suppress(EngineRefused, CorruptChunk):
        hops = [open_hop(samples.LAYOUT, identity.stream, hop)]
        check_chain(samples.LAYOUT, hops, before)
        for patched in compose(samples.LAYOUT, hops, live.__getitem__):
            assert bool((np.diff(patched.positions) > 0).all())
            assert int(patched.positions[-1]) < samples.LAYOUT[patched.tensor].elements


# Checkpoints.


def _use_file(file: SafetensorsFile | SafetensorsBytes, size: int) -> None:
    for spec in file.specs:
        begin_, end = file.header.spans[spec.name]
        assert 0 <= begin_ <= end <= size
        assert file.bits(spec.name).nbytes == spec.nbytes
    with contextlib.suppress(Corrupt):
        for tensor, box, bits in read_pieces(file, samples.LAYOUT):
            spec = samples.LAYOUT[tensor]
            assert box is None or (box.fits(spec.elements) and box.elements == bits.size)


@target
def safetensors_bytes(data: bytes) -> None:
    """A safetensors file in memory, as anchors are read."""
    with contextlib.suppress(*REFUSED):
        _use_file(SafetensorsBytes(data, "fuzz"), len(data))


@target
def safetensors_file(data: bytes) -> None:
    """A safetensors file on disk, as trainers write them; and as the part of vLLM's workers that reads anchors."""
    path = as_file("model.safetensors", data)
    with contextlib.suppress(*REFUSED):
        header = safetensors.read_header(path)
        assert header.size == len(data)
        with SafetensorsFile(path) as file:
            for spec in file.specs:
                assert file.read(spec.name).nbytes == spec.nbytes
            _use_file(file, len(data))
    _read_dense(path)


def _read_dense(path: Path) -> None:
    tensors = range(len(samples.LAYOUT))
    with contextlib.suppress(Corrupt):
        files = dense.DenseFiles([str(path)], samples.LAYOUT)
        absent = set(files.missing(tensors))
        for tensor in tensors:
            spec = samples.LAYOUT[tensor]
            if spec.name not in absent:
                assert files.lanes(tensor).size == spec.elements


@target
def safetensors_inside(data: bytes) -> None:
    """A header whose fields are spoiled, over data of the size it had."""
    dice = Dice(data)
    body = dice.pick(samples.safetensors_files())
    length = int.from_bytes(body[:8], "little")
    header = samples.document(body[8 : 8 + length])
    if pieces := header.get("__metadata__"):  # places are JSON inside JSON
        name = dice.pick(sorted(pieces))
        if name != "format" and dice.below(2):
            pieces[name] = dice.document(samples.document(pieces[name])).decode("utf-8", "replace")
    raw = dice.document(header)
    spoiled = len(raw).to_bytes(8, "little") + raw + body[8 + length :]
    safetensors_bytes(spoiled)
    safetensors_file(spoiled)


@target
def hf_index(data: bytes) -> None:
    """`model.safetensors.index.json`: names of files beside it, and the checkpoint that it describes."""
    path = as_file("checkpoint/model.safetensors.index.json", data)
    with contextlib.suppress(Corrupt):
        for file in read_index(path).values():
            assert (path.parent / file).parent == path.parent
            assert (path.parent / file).resolve().parent == path.parent.resolve()
    with contextlib.suppress(*REFUSED, NotFound), Checkpoint(path.parent):
        pass


# Sockets.

_RESULTS: tuple[Any, ...] = (
    None,
    Attached,
    Prepared,
    Swapped,
    EngineStatus,
    messages.Report,
    list[messages.RankChecksums],
)


@target
def socket_frames(data: bytes) -> None:
    """A connection's bytes: frames, and in them calls and answers."""
    reader = asyncio.StreamReader(loop=loop())
    reader.feed_data(data)
    reader.feed_eof()
    with contextlib.suppress(Misuse, asyncio.IncompleteReadError):
        while (body := run(messages.read_frame(reader))) is not None:
            socket_records(body)


@target
def socket_records(data: bytes) -> None:
    """One record: a call as a server reads it, an answer as a client does."""
    with contextlib.suppress(Misuse):
        call = messages.decode_call(data)
        assert messages.decode_call(messages.encode(call)) == call
    try:
        found = messages.decode_answer(data)
    except Misuse:
        return
    for kind in _RESULTS:
        with contextlib.suppress(DcrError):
            messages.result_of(found, kind)


_KINDS = (
    calls.Call, calls.Reply, calls.Attach, calls.Start, calls.JobRef, calls.TxnRef, calls.Begin, calls.AttachedRank,
    calls.PreparedRank, calls.ComparedRank, calls.FingerprintRank, calls.Sums, calls.Status, calls.JobStatus,
)  # fmt: skip


class _Rank:
    """A worker that does nothing but be asked."""

    rank, generation, dirty = 0, 0, False

    def fence(self, token: int) -> None:
        if token < 2:
            raise Refusal(Code.FENCED, "a newer owner attached")

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: None


@target
def worker_calls(data: bytes) -> None:
    """What reaches a vLLM worker over its executor: always answered, never raised (must E3)."""
    try:
        envelope = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        return
    for kind in _KINDS:
        with contextlib.suppress(ValueError):
            calls.parse(envelope, kind)
    reply = answer(_Rank(), envelope, "c")  # type: ignore[arg-type]
    assert calls.parse(reply, calls.Reply).call == "c"


# Status objects and local files.


@target
def status(data: bytes) -> None:
    """A replica's status object: a report, or as good as absent (must L7)."""
    decode_report(data)


@target
def mark(data: bytes) -> None:
    """The high-water mark."""
    path = as_file("seen.json", data)
    with contextlib.suppress(*REFUSED):
        found = Memory(path).mark
        assert found is not None


@target
def published_list(data: bytes) -> None:
    """`published.json` is a shortcut: a value, or nothing."""
    published._load(as_file("published.json", data), samples.STREAM, scratch())


@target
def baseline_hint(data: bytes) -> None:
    """`baseline.json` is a hint: a value, or nothing."""
    as_file("baseline.json", data)
    hint = _baseline().hint()
    assert hint is None or hint[1].size == len(samples.LAYOUT)


@functools.cache
def _baseline() -> Baseline:
    return Baseline(scratch(), samples.LAYOUT, samples.STREAM, Workers(1))


@target
def directory_marks(data: bytes) -> None:
    """`.dcr/version.json`, `.dcr/dirty` and `.dcr/owner.json` of a served directory."""
    checkout = Checkout(scratch() / "served")
    for name, read in (("version.json", checkout.marker), ("dirty", checkout.dirty), ("owner.json", checkout.owner)):
        checkout.marks.mkdir(parents=True, exist_ok=True)
        (checkout.marks / name).write_bytes(data)
        with contextlib.suppress(EngineRefused):
            read()
        (checkout.marks / name).unlink()


@target
def journal(data: bytes) -> None:
    """The redo journal as it is, and under a digest that fits: sound entries, `Corrupt`, or none."""
    for body in (data, data + hashlib.sha256(data).digest()):
        found = read_journal(as_file("journal", body))
        if found is None:
            continue
        with contextlib.suppress(Corrupt):
            for entry in found.entries(samples.LAYOUT):
                spec = samples.LAYOUT[entry.tensor]
                assert entry.positions.size == entry.new.size == entry.old.size
                assert not entry.positions.size or int(entry.positions.min()) >= 0
                assert not entry.positions.size or int(entry.positions.max()) < spec.elements
        found.close()


_KNOWN = {"publish": {"to": "to", "watch": "watch", "endpoint-url": "endpoint_url"}, "status": {"json": "json"}}


@target
def config(data: bytes) -> None:
    """The user's TOML."""
    with contextlib.suppress(Misuse):
        read_config(as_file("dcr.toml", data), "publish", _KNOWN)
