"""The checks of a chunk's table of segments, all at once, before any stream is unpacked.

A version of many ranks has hundreds of thousands of segments, and a reader wants few of them. So the table is checked
and kept in columns; a segment becomes an object when it is asked for. Raises `CorruptChunk` and nothing else.
Only `decode` calls this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcr_daemon.canonical.box import MAX_RANK, Box
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.codec import format as fmt
from dcr_daemon.codec.admit import corrupt
from dcr_daemon.codec.chunk import SEGMENT_BYTES, Operation, Positions, Segment
from dcr_daemon.codec.format import Stream

PLANES = {Operation.XOR: Stream.MASK, Operation.OVERWRITE: Stream.VALUE}
REACH = 1 << 62  #: elements; a tensor has fewer, so products below it are exact in 64 bits

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """A segment, how it is encoded, and where its pieces lie: stream -> (start, size) in unpacked bytes."""

    segment: Segment
    width: int
    positions: Positions
    shift: int
    escapes: int
    pieces: dict[int, tuple[int, int]]


class Rows:
    """The checked table of a chunk."""

    def __init__(self, table: fmt.Table, width: Ints, *, sizes: dict[int, Ints]) -> None:
        """`width`: bytes per element, by segment; `sizes`: bytes of each segment in each stream that is not empty."""
        self.table = table
        self._width, self._sizes = width, sizes
        self._ends = {kind: np.cumsum(size) for kind, size in sizes.items()}
        self._axes = np.cumsum(table.rank, dtype=np.int64)

    def __len__(self) -> int:
        return int(self.table.rank.size)

    @property
    def totals(self) -> dict[int, int]:
        """Unpacked bytes of every stream."""
        return {kind: int(ends[-1]) for kind, ends in self._ends.items()}

    def segment(self, i: int) -> Segment:
        table, end = self.table, int(self._axes[i])
        axes = slice(end - int(table.rank[i]), end)
        box = Box(int(table.dst[i]), tuple(table.shape[axes].tolist()), tuple(table.strides[axes].tolist()))
        operation = Operation(int(table.operation[i]))
        changed, before, after = int(table.changed[i]), int(table.before[i]), int(table.after[i])
        return Segment(int(table.tensor[i]), box, changed, operation, before, after)

    def row(self, i: int) -> SegmentRow:
        table = self.table
        return SegmentRow(
            segment=self.segment(i),
            width=int(self._width[i]),
            positions=Positions(int(table.positions[i])),
            shift=int(table.shift[i]),
            escapes=int(table.escapes[i]),
            pieces={
                kind: (int(self._ends[kind][i]) - size, size)
                for kind, sizes in self._sizes.items()
                if (size := int(sizes[i]))
            },
        )


def read_rows(table: fmt.Table, layout: Layout) -> Rows:
    """Check every segment by itself, and find where its pieces begin in their streams."""
    rank = table.rank
    known = (rank >= 1) & (rank <= MAX_RANK) & (table.tensor < len(layout))
    if not known.all():
        bad = int(np.argmin(known))
        raise corrupt(f"a segment names tensor {table.tensor[bad]} of {len(layout)}, with a box of rank {rank[bad]}")
    named, which = np.unique(table.tensor, return_inverse=True)
    specs = [layout[tensor] for tensor in named.tolist()]
    width = np.array([spec.width for spec in specs], dtype=np.int64)[which]
    inside = np.array([min(spec.elements, REACH) for spec in specs], dtype=np.int64)[which]

    def require(sound: Flags, what: str) -> None:
        if not sound.all():
            raise corrupt(f"a segment of {specs[int(which[np.argmin(sound)])].name} {what}")

    shape, strides = _axes(table)
    require(np.minimum(shape, strides).min(axis=1) > 0, "has a box with an empty axis")
    # Sizes first: only what is bounded may be multiplied.
    bounded = (shape <= SEGMENT_BYTES).all(axis=1) & ((shape == 1) | (strides < inside[:, None].astype("<u8"))).all(
        axis=1
    )
    bounded &= (strides < REACH).all(axis=1) & (table.dst < inside.astype("<u8"))
    bounded &= shape.astype(np.float64).prod(axis=1) * width <= SEGMENT_BYTES
    require(bounded, _NO_PIECE)
    shape, strides = shape.astype(np.int64), strides.astype(np.int64)
    require(_nested(shape, strides, inside - table.dst.astype(np.int64)), _NO_PIECE)
    elements, changed = shape.prod(axis=1), table.changed.astype(np.int64)
    require(
        (table.positions < len(Positions))
        & (table.operation < len(Operation))
        & (changed >= 1)
        & (changed <= elements),
        "has an impossible number of changes, or unknown codecs",
    )
    require(_sound(table, width, elements), "has counts that contradict its codecs")
    return Rows(table, width, sizes=_sizes(table, width, elements))


_NO_PIECE = "has a box that is no piece of it, or larger than a segment may be"


def _axes(table: fmt.Table) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Shapes and strides (u64) with `MAX_RANK` axes each; axes that a box lacks have extent 1."""
    there = np.arange(MAX_RANK) < table.rank[:, None]
    found = []
    for column in (table.shape, table.strides):
        axes = np.ones(there.shape, dtype="<u8")
        axes[there] = column
        found.append(axes)
    return found[0], found[1]


def _nested(shape: Ints, strides: Ints, room: Ints) -> Flags:
    """`Box.fits` by columns: inside `room` elements, and no element visited twice."""
    order = np.argsort(strides, axis=1)
    shape, strides = (np.take_along_axis(axes, order, axis=1) for axes in (shape, strides))
    span = np.zeros(room.size, dtype=np.int64)
    sound = np.ones(room.size, dtype=bool)
    for n, stride in zip(shape.T, strides.T, strict=True):
        sound &= (n == 1) | ((stride > span) & (n - 1 <= (room - 1 - span) // stride))
        span += np.where(sound, (n - 1) * np.where(n == 1, 0, stride), 0)
    return sound & (span < room)


def _sound(table: fmt.Table, width: Ints, elements: Ints) -> Flags:
    """Whether a segment's counts are possible for its codecs."""
    changed, carries, escapes = (getattr(table, name).astype(np.int64) for name in ("changed", "carries", "escapes"))
    shift = np.minimum(table.shift, fmt.MAX_SHIFT).astype(np.int64)
    gaps, ulp = table.positions == Positions.GAPS, table.operation == Operation.ULP
    listed = (table.shift <= fmt.MAX_SHIFT) & (carries <= (elements >> shift) // 255)
    plain = (table.shift == 0) & (carries == 0) & ((table.positions == Positions.BITMASK) | (changed == elements))
    stepped = (escapes <= changed) & (width <= 4)
    absolute = (escapes == 0) & ((table.operation == Operation.OVERWRITE) | (width <= 4))
    return np.where(gaps, listed, plain) & np.where(ulp, stepped, absolute)


def _sizes(table: fmt.Table, width: Ints, elements: Ints) -> dict[int, Ints]:
    """Bytes of each segment in each stream that any of them uses."""
    changed, shift = table.changed.astype(np.int64), table.shift.astype(np.int64)
    gaps, ulp = table.positions == Positions.GAPS, table.operation == Operation.ULP
    sizes = {
        int(Stream.GAPS): np.where(gaps, changed + table.carries, 0),
        int(Stream.LOW): np.where(gaps, (changed * shift + 7) // 8, 0),
        int(Stream.BITMASK): np.where(table.positions == Positions.BITMASK, (elements + 7) // 8, 0),
        int(Stream.CODES): np.where(ulp, (changed + 3) // 4, 0),
    }
    for byte in range(int(width.max())):
        present = width > byte
        sizes[Stream.ESCAPE + byte] = np.where(ulp & present, table.escapes.astype(np.int64), 0)
        for operation, stream in PLANES.items():
            sizes[stream + byte] = np.where((table.operation == operation) & present, changed, 0)
    return {kind: size for kind, size in sizes.items() if size.any()}
