"""Tables of what each of many objects holds of a model, so that a reader of a part skips the others (docs/FORMAT.md 3).

An *outline* says where elements may lie: in one tensor from `first` to `last`, and, unless `modulus` is 0, only those
whose index leaves a remainder from `low` to `high`. Rows, columns, and blocks of either are outlined exactly. An object
holds nothing outside its outlines; the opposite is not promised, so a reader may read too much, never too little. The
publisher writes the tables; ranks that rebuild a baseline and `dcr verify` read them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from dcr_daemon.canonical.box import MAX_RANK, Box
from dcr_daemon.canonical.layout import MAX_ELEMENTS
from dcr_daemon.errors import Corrupt
from dcr_daemon.untrusted import decompress_bounded

TABLE_LIMIT = 16 << 20  #: bytes of one table as it is stored: in base64, it has to fit a part
RAW_LIMIT = 256 << 20  #: unpacked: six million outlines
PAIRS = 1 << 20  #: outlines and boxes compared at a time

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_COUNT = struct.Struct("<I")
#: columns of a table: those that are equal in all rows, or rise evenly, cost nothing once compressed
_COLUMNS = (("tensor", "<u4"), ("first", "<u8"), ("span", "<u8"), ("modulus", "<u8"), ("low", "<u8"), ("width", "<u8"))
_ROW = sum(np.dtype(dtype).itemsize for _, dtype in _COLUMNS)


@dataclass(frozen=True, slots=True)
class Outlines:
    """Columns, one value per outline. `last` and `high` are inclusive."""

    tensor: Ints
    first: Ints
    last: Ints
    modulus: Ints
    low: Ints
    high: Ints

    @classmethod
    def of(cls, boxes: Iterable[tuple[int, Box]]) -> Outlines:
        """One for each box of a tensor, in their order."""
        rows = [(tensor, *_outline(box)) for tensor, box in boxes]
        return cls(*np.array(rows, dtype=np.int64).reshape(-1, 6).T)

    def __len__(self) -> int:
        return self.tensor.size


def _outline(box: Box) -> tuple[int, int, int, int, int]:
    """The outline of a box: of its strides, the modulus whose remainders exclude most."""
    first, last = box.dst, box.last
    best, kept = (0, 0, 0), 1.0
    if not box.contiguous:
        for n, modulus in zip(box.shape, box.strides, strict=True):
            if n > 1 and modulus > 1 and (found := box.remainders(modulus)):
                share = (found[1] - found[0] + 1) / modulus
                if share < kept:
                    best, kept = (modulus, *found), share
    return first, last, *best


@dataclass(frozen=True, slots=True)
class Contents:
    """Outlines of several objects: the first `counts[0]` are those of the first, and so on."""

    counts: Ints
    outlines: Outlines

    @classmethod
    def of(cls, objects: Sequence[Iterable[tuple[int, Box]]]) -> Contents:
        """The contents of objects with these boxes, `(layout index, box)`; adjoining boxes become one outline."""
        listed = [list(boxes) for boxes in objects]
        whose = np.repeat(np.arange(len(listed)), [len(boxes) for boxes in listed])
        raw = Outlines.of(pair for boxes in listed for pair in boxes)
        keys = (raw.first, raw.high, raw.low, raw.modulus, raw.tensor, whose)
        order = np.lexsort(keys)
        first, high, low, modulus, tensor, whose = (key[order] for key in keys)
        last = raw.last[order]
        new = np.ones(order.size, dtype=bool)
        alike = [(key[1:] == key[:-1]) for key in (whose, tensor, modulus, low, high)]
        new[1:] = ~(np.logical_and.reduce(alike) & (first[1:] - last[:-1] <= np.maximum(modulus[1:], 1)))
        starts = np.flatnonzero(new)
        last = np.maximum.reduceat(last, starts) if starts.size else last
        merged = Outlines(tensor[starts], first[starts], last, modulus[starts], low[starts], high[starts])
        return cls(np.bincount(whose[starts], minlength=len(listed)).astype(np.int64), merged)

    def pack(self) -> bytes | None:
        """The table as it is stored; None if it would be too large to be read back."""
        lines = self.outlines
        span, width = lines.last - lines.first, lines.high - lines.low
        columns = (lines.tensor, lines.first, span, lines.modulus, lines.low, width)
        planes = [_COUNT.pack(self.counts.size), self.counts.astype("<u4").tobytes()]
        for (_, dtype), column in zip(_COLUMNS, columns, strict=True):
            cells = column.astype(dtype).view("u1").reshape(column.size, np.dtype(dtype).itemsize)
            planes.append(cells.T.tobytes())
        raw = b"".join(planes)
        packed = zstandard.ZstdCompressor(level=3).compress(raw)
        return packed if len(raw) <= RAW_LIMIT and len(packed) <= TABLE_LIMIT else None

    def touched(self, boxes: Boxes) -> Flags:
        """Which objects may hold an element of the boxes."""
        whose = np.repeat(np.arange(self.counts.size), self.counts)
        return np.bincount(whose[boxes.touched(self.outlines)], minlength=self.counts.size) > 0

    def outside(self, number: int, boxes: Iterable[tuple[int, Box]]) -> set[int]:
        """Tensors of which an object has a box outside all of its outlines: there the table is wrong."""
        rows = slice(int(self.counts[:number].sum()), int(self.counts[: number + 1].sum()))
        known: dict[int, list[tuple[int, int, int, int, int]]] = {}
        lines = self.outlines
        columns = (lines.tensor, lines.first, lines.last, lines.modulus, lines.low, lines.high)
        for tensor, *line in zip(*(column[rows].tolist() for column in columns), strict=True):
            known.setdefault(tensor, []).append(tuple(line))
        return {tensor for tensor, box in boxes if not any(_encloses(line, box) for line in known.get(tensor, ()))}


def _encloses(line: tuple[int, int, int, int, int], box: Box) -> bool:
    first, last, modulus, low, high = line
    if box.dst < first or last < box.last:
        return False
    found = box.remainders(modulus) if modulus else (0, 0)
    return found is not None and low <= found[0] and found[1] <= high


def read_contents(body: bytes, tensors: int) -> Contents:
    """Read `Contents.pack` back, of a layout of so many tensors.

    Raises:
        Corrupt: the bytes are no table.
    """
    try:
        raw = decompress_bounded(body, "a table of contents", packed_limit=TABLE_LIMIT, unpacked_limit=RAW_LIMIT)
        return _parse(raw, tensors)
    except ValueError as error:
        raise Corrupt(f"a table of contents is damaged: {error}") from error


def _parse(raw: bytes, tensors: int) -> Contents:
    if len(raw) < _COUNT.size or len(raw) < _COUNT.size * (1 + _COUNT.unpack_from(raw)[0]):
        raise ValueError("it is cut off")
    objects, at = _COUNT.unpack_from(raw)[0], _COUNT.size
    counts = np.frombuffer(raw, "<u4", objects, at).astype(np.int64)
    rows, at = int(counts.sum()), at + _COUNT.size * objects
    if len(raw) != at + rows * _ROW:
        raise ValueError(f"{len(raw)} bytes are not {rows} outlines of {objects} objects")
    columns: dict[str, npt.NDArray[Any]] = {}
    for name, dtype in _COLUMNS:
        size = np.dtype(dtype).itemsize
        planes = np.frombuffer(raw, "u1", rows * size, at).reshape(size, rows)
        columns[name] = np.ascontiguousarray(planes.T).reshape(-1).view(dtype)
        at += rows * size
    # Each column is bounded by itself before two are added.
    if rows and (max(int(column.max()) for column in columns.values()) > MAX_ELEMENTS):
        raise ValueError("an outline reaches beyond any tensor")
    tensor, first, span, modulus, low, width = (column.astype(np.int64) for column in columns.values())
    high = low + width
    if not ((tensor < tensors) & (first + span <= MAX_ELEMENTS) & (high < np.maximum(modulus, 1))).all():
        raise ValueError("an outline is of no tensor, or of no part of one")
    return Contents(counts, Outlines(tensor, first, first + span, modulus, low, high))


def join_tables(tables: Iterable[bytes]) -> bytes:
    """Packed tables as one object, each behind its length (u32)."""
    return b"".join(part for table in tables for part in (_COUNT.pack(len(table)), table))


def split_tables(body: bytes) -> Iterator[bytes]:
    """Undo `join_tables`. Raises `Corrupt` for bytes that are not such."""
    at = 0
    while at < len(body):
        size = _COUNT.unpack_from(body, at)[0] if at + _COUNT.size <= len(body) else len(body)
        if at + _COUNT.size + size > len(body):
            raise Corrupt("tables of contents are cut off")
        yield body[at + _COUNT.size : at + _COUNT.size + size]
        at += _COUNT.size + size


class Boxes:
    """Boxes of tensors in columns, to be compared with outlines."""

    def __init__(self, boxes: Sequence[tuple[int, Box]]) -> None:
        order = sorted(range(len(boxes)), key=lambda n: boxes[n][0])
        self._tensor = np.array([boxes[n][0] for n in order], dtype=np.int64)
        self._first = np.array([boxes[n][1].dst for n in order], dtype=np.int64)
        self._last = np.array([boxes[n][1].last for n in order], dtype=np.int64)
        axes = np.zeros((2, MAX_RANK, len(boxes)), dtype=np.int64)
        for at, n in enumerate(order):
            shape, strides = boxes[n][1].shape, boxes[n][1].strides
            axes[0, : len(shape), at], axes[1, : len(shape), at] = np.array(shape) - 1, strides
        self._steps, self._strides = axes

    def touched(self, outlines: Outlines) -> Flags:
        """Which outlines may share an element with a box."""
        begin = np.searchsorted(self._tensor, outlines.tensor, "left")
        count = np.searchsorted(self._tensor, outlines.tensor, "right") - begin
        found = np.zeros(len(outlines), dtype=bool)
        ends = np.cumsum(count)
        at = 0
        while at < len(outlines):
            done = int(ends[at - 1]) if at else 0
            to = max(at + 1, int(np.searchsorted(ends, done + PAIRS, "right")))
            line = np.repeat(np.arange(at, to), count[at:to])
            box = np.arange(line.size) - np.repeat(ends[at:to] - count[at:to] - done, count[at:to]) + begin[line]
            found[line[self._meet(outlines, line, box)]] = True
            at = to
        return found

    def _meet(self, outlines: Outlines, line: Ints, box: Ints) -> Flags:
        """Whether outline `line[i]` and box `box[i]` may share an element."""
        meet = (outlines.first[line] <= self._last[box]) & (self._first[box] <= outlines.last[line])
        close = np.flatnonzero(meet & (outlines.modulus[line] > 0))
        line, box = line[close], box[close]
        modulus = outlines.modulus[line]
        low = self._first[box] % modulus
        strides = self._strides[:, box]
        high = low + np.where(strides % modulus, self._steps[:, box] * strides, 0).sum(axis=0)
        meet[close] = (high >= modulus) | ((low <= outlines.high[line]) & (outlines.low[line] <= high))
        return meet
