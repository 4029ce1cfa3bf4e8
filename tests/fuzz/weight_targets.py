"""Targets of weights on their way: chunks, what is composed of them, checkpoint files."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
from fuzz import samples
from fuzz.data_provider import DataProvider
from fuzz.harness import REFUSED, as_file, target
from support.chunks.malformed import EditableChunk, reseal
from support.chunks.whole_tensors import in_whole

from dcr_daemon.canonical.fingerprint import advance, fingerprint
from dcr_daemon.checkpoint import safetensors
from dcr_daemon.checkpoint.directory import Checkpoint, read_index
from dcr_daemon.checkpoint.pieces import read_pieces
from dcr_daemon.checkpoint.safetensors import SafetensorsBytes, SafetensorsFile
from dcr_daemon.codec.decode import open_chunk, read_id
from dcr_daemon.codec.undo import undo_chunk
from dcr_daemon.engine.deltas import check_chain
from dcr_daemon.engine.directory.compose import compose, open_hop
from dcr_daemon.engine.port import VersionDelta
from dcr_daemon.errors import Corrupt, CorruptChunk, EngineRefused, NotFound
from dcr_daemon.vllm_plugin.weights import dense

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
        undo_chunk(chunk, undo, locate=in_whole(bits))


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


def _forge(provider: DataProvider) -> tuple[bytes, int]:
    """A chunk whose table, streams or sizes are spoiled behind a good checksum; the number of the one it was."""
    number = provider.below(len(samples.chunks()))
    forged = EditableChunk.of(samples.chunks()[number])
    for _ in range(provider.below(4)):
        table = forged.table
        name = provider.pick(_COLUMNS)
        column = getattr(table, name).copy()
        row = provider.below(column.size)
        column[row] = provider.number(int(column[row]), int(np.iinfo(column.dtype).max))
        setattr(table, name, column)
        values = {name: getattr(table, name).tolist() for name in _COLUMNS}
        if sum(values["rank"]) == len(values["shape"]):
            forged = forged.with_table(**values)
    for _ in range(provider.below(3)):
        kind = provider.pick(sorted(forged.streams))
        raw = forged.streams[kind]
        match provider.below(5):
            case 0:
                forged.streams[kind] = (provider.mangled(raw) + raw)[: len(raw)]
            case 1:
                forged.streams[kind] = provider.mangled(raw) or b"\0"
            case 2:
                forged.sizes[kind] = provider.number(len(raw), (1 << 32) - 1)
            case 3:  # a frame that says, or gives, another size than the directory
                forged.stored[kind] = provider.mangled(_frame(provider, raw))
            case 4:
                forged.stored[kind] = _frame(provider, bytes(provider.number(len(raw), 1 << 20)))
    if not provider.below(8):
        forged.tail = provider.take(8)
    return forged.build(), number


def _frame(provider: DataProvider, raw: bytes) -> bytes:
    import zstandard

    sized = bool(provider.below(2))
    parameters = zstandard.ZstdCompressionParameters(
        compression_level=1, window_log=provider.pick((10, 17, 24, 27)), write_content_size=sized
    )
    return zstandard.ZstdCompressor(compression_params=parameters).compress(raw)


@target
def chunk_inside(data: bytes) -> None:
    """Behind the checksum: tables, streams and frames that contradict one another, then the way back."""
    provider = DataProvider(data)
    body, number = _forge(provider)
    undo = samples.undo_bytes()[number]
    _check_chunk(body, provider.mangled(undo) if provider.below(2) else undo)


@target
def compose_inside(data: bytes) -> None:
    """Chunks whose sums lead from the live vector to the next: composed into absolute values, or refused."""
    body, _ = _forge(DataProvider(data))
    try:
        opened = open_chunk(body, samples.LAYOUT)
    except CorruptChunk:
        return
    before = fingerprint(samples.LAYOUT, list(samples.values()))
    after = advance(before, opened.segments)
    identity = opened.id
    hop = VersionDelta(
        version=identity.version,
        base=identity.base,
        attempt=identity.attempt,
        chunks=[str(as_file("a.dcr", body))],
        before=str(as_file("before.bin", before.astype("<u8").tobytes())),
        after=str(as_file("after.bin", after.astype("<u8").tobytes())),
    )
    live = {spec.name: bits for spec, bits in zip(samples.LAYOUT, samples.values(), strict=True)}
    with contextlib.suppress(EngineRefused, CorruptChunk):
        opened_hop = open_hop(samples.LAYOUT, identity.stream, hop=hop)
        check_chain(samples.LAYOUT, [opened_hop.summary], before)
        for patched in compose(samples.LAYOUT, [opened_hop], live=live.__getitem__):
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
    with contextlib.suppress(Corrupt), dense.DenseFiles([str(path)], samples.LAYOUT) as files:
        absent = set(files.missing(tensors))
        for tensor in tensors:
            spec = samples.LAYOUT[tensor]
            if spec.name not in absent:
                assert files.bits(tensor).size == spec.elements


@target
def safetensors_inside(data: bytes) -> None:
    """A header whose fields are spoiled, over data of the size it had."""
    provider = DataProvider(data)
    body = provider.pick(samples.safetensors_files())
    length = int.from_bytes(body[:8], "little")
    header = samples.document(body[8 : 8 + length])
    if pieces := header.get("__metadata__"):  # places are JSON inside JSON
        name = provider.pick(sorted(pieces))
        if name != "format" and provider.below(2):
            pieces[name] = provider.document(samples.document(pieces[name])).decode("utf-8", "replace")
    raw = provider.document(header)
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
