"""Chunks from untrusted bytes: a value or `CorruptChunk`, never anything else, in bounded memory.

`open_chunk` checks hash, identity, every size and every box before it unpacks a stream; `Chunk.changes` unpacks and
checks one segment and touches no other. No length is believed before it is compared with what the table, the layout
and the limits of the format allow.
"""

from __future__ import annotations

import re
import struct

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from dcr_daemon.canonical.box import MAX_RANK, Box
from dcr_daemon.canonical.dtypes import lane_dtype
from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.codec import format as fmt
from dcr_daemon.codec.chunk import CHUNK_LIMIT, SEGMENT_BYTES, Changes, ChunkId, Operation, Positions, Segment
from dcr_daemon.codec.format import Packing, Stream
from dcr_daemon.errors import CorruptChunk

Data = bytes | bytearray | memoryview
PLANES = {Operation.XOR: Stream.MASK, Operation.OVERWRITE: Stream.VALUE}
WINDOW_LIMIT = 8 << 20  #: bytes a zstd frame may ask the decoder to keep beside its output
_ID = re.compile(rb"([a-z0-9]{1,32})\0*")
_HINT = "fetch the object again; if it stays so, the writer or the store is broken"


def _corrupt(what: str) -> CorruptChunk:
    return CorruptChunk(f"chunk is corrupt: {what}", hint=_HINT)


def read_id(data: Data) -> ChunkId:
    """Identity of a chunk from its header alone. Raises `CorruptChunk` if that is no header of this format."""
    return _read_header(memoryview(data).cast("B")).id


def open_chunk(data: Data, layout: Layout, expect: ChunkId | None = None) -> Chunk:
    """Check a chunk and make its segments readable.

    Args:
        data: the whole object; kept as long as the chunk (it may be a memory map).
        expect: what the part that names the object says it is.

    Raises:
        CorruptChunk: any byte is not what the format allows, or the chunk is another than expected.
    """
    view = memoryview(data).cast("B")
    if len(view) > CHUNK_LIMIT:
        raise _corrupt(f"{len(view)} bytes are more than the limit of {CHUNK_LIMIT}")
    header = _read_header(view)
    if expect is not None and header.id != expect:
        raise _corrupt(f"it says it is {header.id}, expected {expect}")
    if xxhash.xxh3_64_intdigest(view[fmt.HASHED_FROM :]) != header.checksum:
        raise _corrupt("checksum differs")
    streams = _read_directory(view, header)
    raw = streams[Stream.TABLE].unpack()
    table = fmt.unpack_table(raw, header.segments)
    if table is None:
        raise _corrupt("segment table has the wrong size")
    rows = _read_rows(table, layout)
    totals = _sizes(rows)
    declared = {kind: stream.raw for kind, stream in streams.items() if kind != Stream.TABLE}
    if declared != totals:
        raise _corrupt("streams are not as long as the segments say")
    return Chunk(header.id, layout, rows, streams)


class Chunk:
    """An opened chunk. `changes` may be called from several threads."""

    def __init__(self, identity: ChunkId, layout: Layout, rows: list[_Row], streams: dict[int, _Stored]) -> None:
        self.id = identity
        self.layout = layout
        self.segments = tuple(row.segment for row in rows)
        self._rows = rows
        self._streams = streams
        self._unpacked: dict[int, npt.NDArray[np.uint8]] = {}

    @property
    def changed(self) -> int:
        """Changed elements of all segments."""
        return sum(segment.changed for segment in self.segments)

    def changes(self, index: int) -> Changes:
        """Decode segment `index`. Raises `CorruptChunk`. Streams are unpacked once and kept until `release`."""
        row = self._rows[index]
        return Changes(row.segment, self._positions(row), self._operands(row))

    def release(self) -> None:
        """Forget unpacked streams; they are unpacked anew when needed."""
        self._unpacked.clear()

    def _slice(self, row: _Row, kind: int) -> npt.NDArray[np.uint8]:
        """This segment's piece of a stream; empty if it has none."""
        start, size = row.pieces.get(kind, (0, 0))
        if not size:
            return np.empty(0, dtype=np.uint8)
        stream = self._unpacked.get(kind)
        if stream is None:
            # Two threads may both unpack it: harmless, one result is kept.
            stream = self._unpacked.setdefault(kind, np.frombuffer(self._streams[kind].unpack(), dtype=np.uint8))
        return stream[start : start + size]

    def _positions(self, row: _Row) -> npt.NDArray[np.int64]:
        from dcr_daemon.codec import kernels

        k, elements = row.segment.changed, row.segment.box.elements
        if row.positions is Positions.ALL:
            return np.arange(k, dtype=np.int64)
        where = np.empty(k + 1, dtype=np.int64)
        if row.positions is Positions.GAPS:
            gaps, low = self._slice(row, Stream.GAPS), self._slice(row, Stream.LOW)
            status = kernels.unpack_gaps(gaps, low, row.shift, elements, where[:k])
        else:
            status = kernels.unpack_bitmask(self._slice(row, Stream.BITMASK), elements, where)
        if status:
            raise _corrupt(f"positions of a segment of {self._name(row)} are not sound (status {status})")
        return where[:k]

    def _operands(self, row: _Row) -> Bits:
        from dcr_daemon.codec import kernels

        k, operation = row.segment.changed, row.segment.operation
        if operation is not Operation.ULP:
            operands = self._lanes(row, PLANES[operation], k)
            if operation is Operation.XOR and not operands.all():
                raise _corrupt(f"an xor mask of {self._name(row)} is zero")
            return operands
        operands = np.empty(k, dtype=lane_dtype(row.width))
        escapes = self._lanes(row, Stream.ESCAPE, row.escapes)
        status = kernels.unpack_steps(self._slice(row, Stream.CODES), escapes, operands)
        if status:
            raise _corrupt(f"values of a segment of {self._name(row)} are not sound (status {status})")
        return operands

    def _lanes(self, row: _Row, stream: Stream, count: int) -> Bits:
        """`count` lanes put together from their byte planes."""
        lanes = np.empty((count, row.width), dtype=np.uint8)
        if count:
            for byte in range(row.width):
                lanes[:, byte] = self._slice(row, stream + byte)
        return lanes.reshape(-1).view(lane_dtype(row.width))

    def _name(self, row: _Row) -> str:
        return self.layout[row.segment.tensor].name


class _Stored:
    """A stream as it lies in the object; `raw` is its unpacked size in bytes."""

    __slots__ = ("data", "packing", "raw")

    def __init__(self, data: memoryview, packing: Packing, raw: int) -> None:
        self.data, self.packing, self.raw = data, packing, raw

    def unpack(self) -> bytes | memoryview:
        if self.packing is Packing.RAW:
            return self.data
        try:
            frame = zstandard.get_frame_parameters(self.data)
            # Both are what the decoder would allocate, so they are judged first.
            if frame.content_size != self.raw or frame.window_size > max(self.raw, WINDOW_LIMIT):
                raise _corrupt("a zstd frame declares another size than its stream")
            return zstandard.ZstdDecompressor().decompress(self.data, max_output_size=self.raw, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise _corrupt(f"a stream does not decompress: {error}") from error


class _Row:
    """A segment, how it is written, and where its pieces lie: stream -> (start, size) in unpacked bytes."""

    __slots__ = ("escapes", "pieces", "positions", "segment", "shift", "width")

    def __init__(self, segment: Segment, width: int, positions: Positions, shift: int) -> None:
        self.segment, self.width = segment, width
        self.positions, self.shift = positions, shift
        self.escapes = 0
        self.pieces: dict[int, tuple[int, int]] = {}


def _read_header(view: memoryview) -> fmt.Header:
    if len(view) < fmt.HEADER.size:
        raise _corrupt(f"{len(view)} bytes are too short for a header")
    (magic, version, zero, checksum, attempt, base, new, rank, n, *ids, streams, zero2, segments) = fmt.HEADER.unpack(
        view[: fmt.HEADER.size]
    )
    if magic != fmt.MAGIC:
        raise _corrupt("it does not begin like a chunk")
    if version != fmt.FORMAT:
        raise CorruptChunk(f"chunk has format {version}", hint=f"this release reads format {fmt.FORMAT}; upgrade")
    if zero or zero2:
        raise _corrupt("reserved fields are set")
    if not 1 <= segments <= fmt.MAX_SEGMENTS or not 1 <= streams <= len(fmt.KINDS):
        raise _corrupt(f"{segments} segments in {streams} streams are out of range")
    matches = [_ID.fullmatch(field) for field in ids]
    if not all(matches):
        raise _corrupt("an id is not of [a-z0-9]")
    stream, group, nonce = (match[1].decode() for match in matches if match)
    identity = ChunkId(stream=stream, attempt=attempt, base=base, version=new, group=group, rank=rank, nonce=nonce, n=n)
    return fmt.Header(identity, checksum, segments, streams)


def _read_directory(view: memoryview, header: fmt.Header) -> dict[int, _Stored]:
    """Streams by kind. Their stored sizes must fill the object exactly, their raw sizes stay under the limit."""
    streams: dict[int, _Stored] = {}
    at = fmt.HEADER.size + header.streams * fmt.ENTRY.size
    last, total = -1, 0
    for i in range(header.streams):
        try:
            kind, packing, raw, stored = fmt.ENTRY.unpack_from(view, fmt.HEADER.size + i * fmt.ENTRY.size)
        except struct.error:
            raise _corrupt("the directory is cut off") from None
        total += raw
        if kind not in fmt.KINDS or kind <= last or packing > Packing.ZSTD:
            raise _corrupt(f"stream {kind} is unknown or out of order")
        if not raw or total > fmt.RAW_LIMIT or stored > len(view) - at:
            raise _corrupt(f"stream {kind} has an impossible size")
        if stored >= raw if packing else stored != raw:
            raise _corrupt(f"stream {kind} is not stored in its shorter form")
        streams[kind] = _Stored(view[at : at + stored], Packing(packing), raw)
        at, last = at + stored, kind
    if at != len(view):
        raise _corrupt(f"{len(view) - at} bytes follow the last stream")
    if Stream.TABLE not in streams or streams[Stream.TABLE].raw > header.segments * (
        fmt.ROW_BYTES + MAX_RANK * fmt.AXIS_BYTES
    ):
        raise _corrupt("segment table is missing or too large")
    return streams


def _read_rows(table: fmt.Table, layout: Layout) -> list[_Row]:
    """Judge every row by itself and lay its pieces out one after the other in their streams."""
    columns = [getattr(table, name).tolist() for name, _ in fmt.ROW_COLUMNS]
    shape, strides = table.shape.tolist(), table.strides.tolist()
    ends: dict[int, int] = {}
    rows, axis = [], 0
    for rank, positions, operation, shift, tensor, changed, carries, escapes, dst, before, after in zip(
        *columns, strict=True
    ):
        axes, axis = slice(axis, axis + rank), axis + rank
        if not 1 <= rank <= MAX_RANK or tensor >= len(layout):
            raise _corrupt(f"a segment names tensor {tensor} of {len(layout)}, with a box of rank {rank}")
        spec = layout[tensor]
        extent = tuple(shape[axes])
        if 0 in extent or 0 in strides[axes]:
            raise _corrupt(f"a box of {spec.name} has an empty axis")
        box = Box(dst, extent, tuple(strides[axes]))
        elements = box.elements
        if not box.fits(spec.elements) or elements * spec.width > SEGMENT_BYTES:
            raise _corrupt(f"a box is no piece of {spec.name} or larger than a segment may be")
        if positions >= len(Positions) or operation >= len(Operation) or not 1 <= changed <= elements:
            raise _corrupt(f"a segment of {spec.name} has {changed} changes and codecs {positions}, {operation}")
        segment = Segment(tensor, box, changed, Operation(operation), before, after)
        row = _Row(segment, spec.width, Positions(positions), shift)
        row.escapes = escapes
        for kind, size in _piece_sizes(row, carries):
            start = ends.get(kind, 0)
            row.pieces[kind] = (start, size)
            ends[kind] = start + size
        rows.append(row)
    return rows


def _piece_sizes(row: _Row, carries: int) -> list[tuple[int, int]]:
    """Bytes of this segment in each stream it uses. Raises `CorruptChunk` if its counts contradict one another."""
    k, elements = row.segment.changed, row.segment.box.elements
    pieces: list[tuple[int, int]] = []
    if row.positions is Positions.GAPS:
        sound = row.shift <= fmt.MAX_SHIFT and carries <= (elements >> row.shift) // 255
        pieces += [(Stream.GAPS, k + carries), (Stream.LOW, (k * row.shift + 7) // 8)]
    else:
        sound = row.shift == 0 and carries == 0 and (row.positions is Positions.BITMASK or k == elements)
        if row.positions is Positions.BITMASK:
            pieces.append((Stream.BITMASK, (elements + 7) // 8))
    operation = row.segment.operation
    if operation is Operation.ULP:
        sound &= row.escapes <= k and row.width <= 4
        pieces.append((Stream.CODES, (k + 3) // 4))
        pieces += [(Stream.ESCAPE + byte, row.escapes) for byte in range(row.width)]
    else:
        sound &= row.escapes == 0 and (operation is Operation.OVERWRITE or row.width <= 4)
        pieces += [(PLANES[operation] + byte, k) for byte in range(row.width)]
    if not sound:
        raise _corrupt("a segment's counts contradict its codecs")
    return [(kind, size) for kind, size in pieces if size]


def _sizes(rows: list[_Row]) -> dict[int, int]:
    totals: dict[int, int] = {}
    for row in rows:
        for kind, (start, size) in row.pieces.items():
            totals[kind] = start + size
    return totals
