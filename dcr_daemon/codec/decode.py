"""Chunks from untrusted bytes: a value or `CorruptChunk`, never anything else, in bounded memory.

`open_chunk` checks hash, identity, every size and every box before it unpacks a stream (`admit`); `Chunk.changes`
unpacks and checks one segment and touches no other. No length is used before it is compared with what the table,
the layout and the limits of the format allow.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import xxhash

from dcr_daemon.canonical.dtypes import bits_dtype
from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.codec import format as fmt
from dcr_daemon.codec.admit import PackedStream, corrupt, read_directory, read_header
from dcr_daemon.codec.chunk import CHUNK_LIMIT, Changes, ChunkId, Operation, Positions, Segment
from dcr_daemon.codec.format import Stream
from dcr_daemon.codec.rows import PLANES, Rows, SegmentRow, read_rows

Data = bytes | bytearray | memoryview


def _nothing() -> npt.NDArray[np.uint8]:
    """An empty piece of a stream, read-only like all others, so that kernels see one type of array."""
    empty = np.empty(0, dtype=np.uint8)
    empty.flags.writeable = False
    return empty


_NOTHING = _nothing()


def read_id(data: Data) -> ChunkId:
    """Identity of a chunk from its header alone. Raises `CorruptChunk` if that is no header of this format."""
    return read_header(memoryview(data).cast("B")).id


def open_chunk(data: Data, layout: Layout, expect: ChunkId | None = None) -> Chunk:
    """Check a chunk and make its segments readable.

    Args:
        data: the whole object; kept as long as the chunk (it may be a memory map).
        expect: what the part that names the object says it is.

    Raises:
        CorruptChunk: any byte is not what the format allows, or the chunk is another than expected.
    """
    view = memoryview(data).cast("B").toreadonly()
    if len(view) > CHUNK_LIMIT:
        raise corrupt(f"{len(view)} bytes are more than the limit of {CHUNK_LIMIT}")
    header = read_header(view)
    if expect is not None and header.id != expect:
        raise corrupt(f"it says it is {header.id}, expected {expect}")
    if xxhash.xxh3_64_intdigest(view[fmt.HASHED_FROM :]) != header.checksum:
        raise corrupt("checksum differs")
    streams = read_directory(view, header)
    raw = streams[Stream.TABLE].unpack()
    table = fmt.unpack_table(raw, header.segments)
    if table is None:
        raise corrupt("segment table has the wrong size")
    rows = read_rows(table, layout)
    declared = {kind: stream.raw for kind, stream in streams.items() if kind != Stream.TABLE}
    if declared != rows.totals:
        raise corrupt("streams are not as long as the segments say")
    return Chunk(header.id, layout, rows, streams)


class Chunk:
    """An opened chunk. `changes` may be called from several threads.

    `table` has the segments in columns, at no cost; `segment` and `segments` make objects of them, which takes longer
    than checking them all. To read a few segments of many, select them by `table` first.
    """

    def __init__(self, identity: ChunkId, layout: Layout, rows: Rows, streams: dict[int, PackedStream]) -> None:
        self.id = identity
        self.layout = layout
        self.table = rows.table
        self._rows = rows
        self._streams = streams
        self._unpacked: dict[int, npt.NDArray[np.uint8]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def segment(self, index: int) -> Segment:
        return self._rows.segment(index)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """All of them, in the order of the table."""
        return tuple(self._rows.segment(index) for index in range(len(self)))

    def changes(self, index: int) -> Changes:
        """Decode segment `index`. Raises `CorruptChunk`. Streams are unpacked once and kept until `release`."""
        row = self._rows.row(index)
        return Changes(row.segment, self._positions(row), self._operands(row))

    def release(self) -> None:
        """Forget unpacked streams; they are unpacked anew when needed."""
        self._unpacked.clear()

    def _slice(self, row: SegmentRow, kind: int) -> npt.NDArray[np.uint8]:
        """This segment's piece of a stream; empty if it has none."""
        start, size = row.pieces.get(kind, (0, 0))
        if not size:
            return _NOTHING
        stream = self._unpacked.get(kind)
        if stream is None:
            # Two threads may both unpack it: harmless, one result is kept.
            stream = self._unpacked.setdefault(kind, np.frombuffer(self._streams[kind].unpack(), dtype=np.uint8))
        return stream[start : start + size]

    def _positions(self, row: SegmentRow) -> npt.NDArray[np.int64]:
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
            raise corrupt(f"positions of a segment of {self._name(row)} are not sound (status {status})")
        return where[:k]

    def _operands(self, row: SegmentRow) -> Bits:
        from dcr_daemon.codec import kernels

        k, operation = row.segment.changed, row.segment.operation
        if operation is not Operation.ULP:
            operands = self._from_planes(row, PLANES[operation], k)
            if operation is Operation.XOR and not operands.all():
                raise corrupt(f"an xor mask of {self._name(row)} is zero")
            return operands
        operands = np.empty(k, dtype=bits_dtype(row.width))
        escapes = self._from_planes(row, Stream.ESCAPE, row.escapes)
        status = kernels.unpack_steps(self._slice(row, Stream.CODES), escapes, operands)
        if status:
            raise corrupt(f"values of a segment of {self._name(row)} are not sound (status {status})")
        return operands

    def _from_planes(self, row: SegmentRow, stream: Stream, count: int) -> Bits:
        """`count` elements from their byte planes."""
        bytes_ = np.empty((count, row.width), dtype=np.uint8)
        if count:
            for byte in range(row.width):
                bytes_[:, byte] = self._slice(row, stream + byte)
        return bytes_.reshape(-1).view(bits_dtype(row.width))

    def _name(self, row: SegmentRow) -> str:
        return self.layout[row.segment.tensor].name
