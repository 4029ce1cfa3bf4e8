"""One pass over the weights: detect, sum, update the baseline, and write what changed as a chunk.

`ChunkEncoder` belongs to one thread; kernels and zstd release the GIL, so several encoders run side by side. It
promises that the baseline holds the new bits as soon as `add` returns, and that the chunk and `undo` together restore
the old ones. The output depends on the inputs alone.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from dcr_daemon.canonical.box import MAX_RANK, Box
from dcr_daemon.canonical.dtypes import bits_dtype
from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.codec import format as fmt
from dcr_daemon.codec.choose import choose_operation, choose_positions
from dcr_daemon.codec.chunk import SEGMENT_BYTES, TARGET_BYTES, ChunkId, Codec, Operation, Positions, Segment
from dcr_daemon.codec.format import Stream

FIRST_BYTES = 128 << 10  #: of an encoder's first chunks; later ones grow
GROWTH = 3  #: an open chunk has at most this part of what its encoder has closed, so little is left for the end
_UNUSED = np.ones(MAX_RANK, dtype=np.int64)  #: axes of a contiguous box, at which no kernel looks


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """`data` is the object. `undo` holds the old bits of the overwrite segments, in segment order."""

    id: ChunkId
    data: bytes
    undo: bytes
    segments: tuple[Segment, ...]
    changed: int


class ChunkEncoder:
    """Collects the changes of many boxes into one chunk after another.

    The first chunks are small, so that they can leave while most is still to be compared, and so that most has left
    when all is compared.

    Args:
        layout: the stream's canonical tensors.
        codec: value codec of every segment; `AUTO` estimates and takes the smallest. 8-byte dtypes are always
            overwritten.
        target: most encoded bytes at which a chunk counts as `full`.
    """

    def __init__(self, layout: Layout, *, codec: Codec = Codec.AUTO, target: int = TARGET_BYTES) -> None:
        self.layout = layout
        self._codec = codec
        self._target = target
        self._closed = 0
        self._zstd = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters.from_level(1, min_match=7)
        )
        self._scratch: dict[tuple[str, str], npt.NDArray[Any]] = {}
        self._reset()

    def _reset(self) -> None:
        self._pieces: defaultdict[int, list[bytes]] = defaultdict(list)
        self._rows: list[_Row] = []
        self._undo: list[bytes] = []
        self._raw = 0
        self.changed = 0

    @property
    def pending(self) -> int:
        """Bytes of table and streams before entropy coding; the object comes out at about 0.7 to 1 of it."""
        return self._raw

    @property
    def full(self) -> bool:
        """Whether the chunk should be finished before anything is added."""
        limit = min(self._target, max(FIRST_BYTES, self._closed // GROWTH))
        return self.pending >= limit or len(self._rows) >= fmt.MAX_SEGMENTS

    def add(self, tensor: int, box: Box, base: Bits, new: Bits, codec: Codec | None = None) -> Segment | None:
        """Add one box: compare bits, make `base` equal to `new`, keep the difference for the chunk.

        Args:
            tensor: layout index.
            box: where the elements lie in the canonical tensor; at most `SEGMENT_BYTES` of weights.
            base: baseline bits of the box in its row-major order: 1-D, contiguous, writable, unsigned integers of
                the tensor's width. Changed in place.
            new: new bits, like `base`, never written.
            codec: of this box; by default that of all.

        Returns:
            The segment, or None if nothing changed.

        Raises:
            ValueError: the arguments do not describe a box of this tensor, or the chunk is far beyond full.
        """
        from dcr_daemon.codec.vector_kernels import select_detect

        width = self.layout[tensor].width
        self._check(tensor, box, base, new)
        where, old, now = self._buffers(base.size, width)
        shape, strides = (_UNUSED, _UNUSED) if box.contiguous else _axes(box)
        k, before, after = select_detect(width)(
            base, new, where, old, now, box.dst, shape, strides, box.contiguous, self.layout.keys[tensor]
        )
        if k == 0:
            return None
        row = self._emit(box, where[:k], old[:k], now[:k], self._codec if codec is None else codec)
        segment = Segment(tensor, box, int(k), row.operation, int(before), int(after))
        row.segment = segment
        self._rows.append(row)
        self._raw += fmt.ROW_BYTES + len(box.shape) * fmt.AXIS_BYTES
        self.changed += segment.changed
        return segment

    def finish(self, identity: ChunkId) -> EncodedChunk:
        """Close the chunk and start the next one. Raises `ValueError` if nothing was added."""
        if not self._rows:
            raise ValueError("a chunk holds at least one segment; an update without changes has no chunks")
        self._pieces[Stream.TABLE] = [fmt.pack_table(_table(self._rows))]
        directory, stored = [], []
        for kind in sorted(self._pieces):
            raw = b"".join(self._pieces[kind])
            packed = self._zstd.compress(raw)
            packing = fmt.Packing.ZSTD if len(packed) < len(raw) else fmt.Packing.RAW
            stored.append(packed if packing else raw)
            directory.append(fmt.ENTRY.pack(kind, packing, len(raw), len(stored[-1])))
        header = fmt.Header(identity, 0, len(self._rows), len(directory))
        body = b"".join([fmt.pack_header(header)[fmt.HASHED_FROM :], *directory, *stored])
        header.checksum = xxhash.xxh3_64_intdigest(body)
        data = fmt.pack_header(header)[: fmt.HASHED_FROM] + body
        segments = tuple(row.segment for row in self._rows)
        chunk = EncodedChunk(identity, data, b"".join(self._undo), segments, self.changed)
        self._closed += self.pending
        self._reset()
        return chunk

    def _check(self, tensor: int, box: Box, base: Bits, new: Bits) -> None:
        spec = self.layout[tensor]
        dtype = np.dtype(bits_dtype(spec.width))
        if not box.fits(spec.elements):
            raise ValueError(f"{box} is no piece of {spec.name}, which has {spec.elements} elements")
        for side, bits in (("base", base), ("new", new)):
            if bits.dtype != dtype or bits.shape != (box.elements,) or not bits.flags.c_contiguous:
                raise ValueError(f"{side} of {spec.name} must be {box.elements} contiguous elements of {dtype}")
        if not base.flags.writeable:
            raise ValueError(f"base of {spec.name} is read-only, and must become the new bits")
        if base.nbytes > SEGMENT_BYTES:
            raise ValueError(f"a segment spans at most {SEGMENT_BYTES} bytes of weights, not {base.nbytes}")
        if self.pending + 2 * base.nbytes > fmt.RAW_LIMIT or len(self._rows) >= fmt.MAX_SEGMENTS:
            raise ValueError("the chunk is full; finish it before adding more")

    def _buffers(self, elements: int, width: int) -> tuple[npt.NDArray[np.uint32], Bits, Bits]:
        """Positions, old and new bits; one slot more than elements, as the kernel needs. Untouched pages cost
        nothing."""
        out = []
        for name, dtype in (("where", "<u4"), ("old", bits_dtype(width)), ("now", bits_dtype(width))):
            array = self._scratch.get((name, dtype))
            if array is None or array.size <= elements:
                array = self._scratch[name, dtype] = np.empty(max(elements + 1, 1 << 16), dtype=dtype)
            out.append(array)
        return out[0], out[1], out[2]

    def _put(self, stream: int, piece: npt.NDArray[Any] | bytes) -> None:
        raw = piece if isinstance(piece, bytes) else piece.tobytes()
        if raw:
            self._pieces[stream].append(raw)
            self._raw += len(raw)

    def _put_planes(self, stream: Stream, bits: Bits) -> None:
        planes = bits.view("u1").reshape(bits.size, bits.itemsize)
        for byte in range(bits.itemsize):
            self._put(stream + byte, planes[:, byte])

    def _emit(self, box: Box, where: npt.NDArray[np.uint32], old: Bits, now: Bits, codec: Codec) -> _Row:
        from dcr_daemon.codec import kernels

        k, elements = where.size, box.elements
        positions, shift = choose_positions(where, elements)
        row = _Row(positions, shift, choose_operation(codec, old, now=now))
        if positions is Positions.GAPS:
            gaps = np.empty(k + (elements >> shift) // 255, dtype="u1")
            low = np.zeros((k * shift + 7) // 8, dtype="u1")
            written = int(kernels.emit_gaps(where, shift, gaps, low))
            row.carries = written - k
            self._put(Stream.GAPS, gaps[:written])
            self._put(Stream.LOW, low)
        elif positions is Positions.BITMASK:
            mask = np.zeros((elements + 7) // 8, dtype="u1")
            kernels.emit_bitmask(where, mask)
            self._put(Stream.BITMASK, mask)
        if row.operation is Operation.ULP:
            codes, escapes = np.zeros((k + 3) // 4, dtype="u1"), np.empty(k + 1, dtype=now.dtype)
            row.escapes = int(kernels.emit_steps(old, now, codes, escapes))
            self._put(Stream.CODES, codes)
            self._put_planes(Stream.ESCAPE, escapes[: row.escapes])
        elif row.operation is Operation.XOR:
            self._put_planes(Stream.MASK, old ^ now)
        else:
            self._put_planes(Stream.VALUE, now)
            self._undo.append(old.tobytes())
        return row


def _axes(box: Box) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Shape and strides with `MAX_RANK` axes each."""
    absent = MAX_RANK - len(box.shape)
    return np.array((1,) * absent + box.shape, np.int64), np.array((0,) * absent + box.strides, np.int64)


class _Row:
    """A segment with what only its table row says."""

    __slots__ = ("carries", "escapes", "operation", "positions", "segment", "shift")

    def __init__(self, positions: Positions, shift: int, operation: Operation) -> None:
        self.positions, self.shift, self.operation = positions, shift, operation
        self.carries = self.escapes = 0
        self.segment: Segment


def _table(rows: list[_Row]) -> fmt.Table:
    boxes = [row.segment.box for row in rows]
    return fmt.Table(
        tensor=np.array([row.segment.tensor for row in rows], dtype=np.uint32),
        changed=np.array([row.segment.changed for row in rows], dtype=np.uint32),
        carries=np.array([row.carries for row in rows], dtype=np.uint32),
        escapes=np.array([row.escapes for row in rows], dtype=np.uint32),
        positions=np.array([row.positions for row in rows], dtype=np.uint8),
        operation=np.array([row.operation for row in rows], dtype=np.uint8),
        shift=np.array([row.shift for row in rows], dtype=np.uint8),
        rank=np.array([len(box.shape) for box in boxes], dtype=np.uint8),
        dst=np.array([box.dst for box in boxes], dtype=np.uint64),
        before=np.array([row.segment.before for row in rows], dtype=np.uint64),
        after=np.array([row.segment.after for row in rows], dtype=np.uint64),
        shape=np.array([n for box in boxes for n in box.shape], dtype=np.uint64),
        strides=np.array([s for box in boxes for s in box.strides], dtype=np.uint64),
    )
