"""Where canonical elements lie in this worker's memory: the algebra of strided boxes. Pure; no torch, no vLLM.

A *piece* is one copy that the loader was seen to do: elements of a canonical tensor to elements of a parameter in
*load format* (as the loader fills it). A *row* is a piece brought into the form the kernels use: at most 4 axes,
nested canonical strides, relative places below 2^32, and inside one block of a repacked parameter. Several rows may
make up one *box*, the unit in which sums are reported and joined over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dcr_daemon.canonical.box import MAX_RANK
from dcr_daemon.vllm_plugin.calls import BoxRow, Held

WIDE = 1 << 32  #: relative places are kept as u32


class Unplaceable(Exception):
    """This copy cannot be followed; the text says why."""


@dataclass(frozen=True, slots=True)
class Piece:
    """`shape` elements from canonical `src` to `dst` of `parameter`, with one stride per axis on either side."""

    tensor: str
    src: int
    shape: tuple[int, ...]
    src_strides: tuple[int, ...]
    parameter: str
    dst: int
    dst_strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def src_span(self) -> int:
        return _span(self.shape, self.src_strides)

    @property
    def dst_span(self) -> int:
        return _span(self.shape, self.dst_strides)

    def cut(self, axis: int, at: int) -> tuple[Piece, Piece]:
        """The first `at` places along `axis`, and the rest."""
        head = (*self.shape[:axis], at, *self.shape[axis + 1 :])
        tail = (*self.shape[:axis], self.shape[axis] - at, *self.shape[axis + 1 :])
        src, dst = self.src + at * self.src_strides[axis], self.dst + at * self.dst_strides[axis]
        return replace(self, shape=head), replace(self, shape=tail, src=src, dst=dst)


@dataclass(frozen=True, slots=True)
class Repack:
    """A parameter whose blocks of `block` load-format elements are each permuted into `live_block` live ones.

    `table[i]` is the live place, inside its block, of load-format element i of any block (u32).
    """

    block: int
    live_block: int
    table: npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Row:
    """A piece as the kernels walk it: `dst` in load format, `offset` the storage element of the parameter's own 0.

    Live element of the load-format place `dst + p` (p by `dst_strides`): `base + p`, or, repacked,
    `base + table[inner + p]`.
    """

    box: int
    tensor: int
    parameter: str
    start: int
    shape: tuple[int, ...]
    src_strides: tuple[int, ...]
    dst: int
    dst_strides: tuple[int, ...]
    offset: int
    repack: Repack | None = None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def last(self) -> int:
        """Canonical index of the last element."""
        return self.start + _span(self.shape, self.src_strides)

    @property
    def base(self) -> int:
        if self.repack is None:
            return self.offset + self.dst
        return self.offset + self.dst // self.repack.block * self.repack.live_block

    @property
    def inner(self) -> int:
        return 0 if self.repack is None else self.dst % self.repack.block

    @property
    def reach(self) -> tuple[int, int]:
        """First and last load-format place, counted from the start of the storage."""
        start = self.offset + self.dst
        return start, start + _span(self.shape, self.dst_strides)

    @property
    def end(self) -> int:
        """One past the last live element that can be touched."""
        if self.repack is None:
            return self.base + _span(self.shape, self.dst_strides) + 1
        return self.base + self.repack.live_block

    def runs(self) -> Iterator[slice]:
        """Its canonical elements as slices, one per line of the innermost axis; one for all where they are in a run."""
        *outer, inner = zip(self.shape, self.src_strides, strict=True)
        for index in np.ndindex(*(n for n, _ in outer)):
            start = self.start + sum(i * stride for i, (_, stride) in zip(index, outer, strict=True))
            yield slice(start, start + (inner[0] - 1) * inner[1] + 1, inner[1])

    def coincides(self, other: Row) -> bool:
        """Whether both put the same canonical numbers at the same places."""
        return (
            self.start == other.start
            and self.reach == other.reach
            and (
                (self.shape, self.src_strides, self.dst_strides) == (other.shape, other.src_strides, other.dst_strides)
            )
        )

    def places(self) -> npt.NDArray[np.int64]:
        """Load-format place of each ordinal (int64, row-major), relative to `dst`."""
        place = np.zeros(self.shape, dtype=np.int64)
        for axis, (n, stride) in enumerate(zip(self.shape, self.dst_strides, strict=True)):
            along = [-1 if a == axis else 1 for a in range(place.ndim)]
            place += (np.arange(n, dtype=np.int64) * stride).reshape(along)
        return place.reshape(-1)

    def targets(self) -> npt.NDArray[np.int64]:
        """Live storage element of each ordinal (int64, row-major): the plain meaning of a row."""
        places = self.places()
        return self.base + (places if self.repack is None else self.repack.table[self.inner + places].astype(np.int64))


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def simplify(piece: Piece) -> Piece:
    """Sort axes by canonical stride, drop axes of one, merge what merges on both sides.

    Raises:
        Unplaceable: the copy is empty, repeats or overlaps elements on either side.
    """
    if piece.elements == 0:
        raise Unplaceable("an empty copy")
    axes = [axis for axis in zip(piece.shape, piece.src_strides, piece.dst_strides, strict=True) if axis[0] > 1]
    axes.sort(key=lambda axis: axis[1], reverse=True)
    merged: list[tuple[int, int, int]] = []
    for n, src, dst in axes:
        if merged and merged[-1][1] == n * src and merged[-1][2] == n * dst:
            merged[-1] = (merged[-1][0] * n, src, dst)
        else:
            merged.append((n, src, dst))
    merged = merged or [(1, 1, 1)]
    shape, src_strides, dst_strides = (tuple(axis[i] for axis in merged) for i in range(3))
    if not _nested(shape, src_strides):
        raise Unplaceable("the loader broadcasts, or takes overlapping views of the checkpoint tensor")
    if not _nested(shape, dst_strides):
        raise Unplaceable("the loader writes overlapping or broadcast places of the parameter")
    return replace(piece, shape=shape, src_strides=src_strides, dst_strides=dst_strides)


def _nested(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """No two index tuples reach the same element: each stride clears all that the smaller ones reach."""
    reach = 0
    for stride, n in sorted(zip(strides, shape, strict=True)):
        if stride <= reach:
            return False
        reach += (n - 1) * stride
    return True


def identity(piece: Piece, tensor: int) -> BoxRow:
    """The canonical side alone, merged as far as it goes: equal on every rank that holds the same elements."""
    alone = simplify(replace(piece, dst=piece.src, dst_strides=piece.src_strides))
    return BoxRow(tensor, alone.src, alone.shape, alone.src_strides)


def _within_blocks(piece: Piece, block: int) -> Iterator[Piece]:
    """Cut so that no part crosses a multiple of `block` on the live side."""
    while True:
        room = block - piece.dst % block
        if piece.dst_span < room:
            yield piece
            return
        axis = max((a for a, n in enumerate(piece.shape) if n > 1), key=lambda a: piece.dst_strides[a])
        keep = min(-(-room // piece.dst_strides[axis]), piece.shape[axis] - 1)
        head, piece = piece.cut(axis, keep)
        yield from _within_blocks(head, block)


def _narrow(piece: Piece) -> Iterator[Piece]:
    """Cut so that relative places fit u32 on both sides."""
    if piece.src_span < WIDE and piece.dst_span < WIDE:
        yield piece
        return
    axis = max(range(len(piece.shape)), key=lambda a: (piece.shape[a] - 1) * piece.src_strides[a])
    for half in piece.cut(axis, piece.shape[axis] // 2):
        yield from _narrow(half)


def rows_of(piece: Piece, *, tensor: int, box: int, offset: int, repack: Repack | None) -> list[Row]:
    """Bring a simplified piece into kernel form.

    Args:
        offset: live storage element at which the parameter's own element 0 lies.

    Raises:
        Unplaceable: more than 4 axes remain, or a permuted block has 2^32 elements or more.
    """
    if len(piece.shape) > MAX_RANK:
        raise Unplaceable(f"a copy with {len(piece.shape)} axes")
    if repack is not None and repack.block >= WIDE:
        raise Unplaceable(f"a repacked block of {repack.block} elements")
    parts = _narrow(piece) if repack is None else _within_blocks(piece, repack.block)
    return [
        Row(
            box,
            tensor,
            part.parameter,
            part.src,
            part.shape,
            part.src_strides,
            part.dst,
            part.dst_strides,
            offset,
            repack,
        )
        for part in parts
    ]


@dataclass(slots=True)
class Placement:
    """All that one worker holds of a layout. Lists are in layout order where they are per tensor.

    `twins`: pairs of rows that are one and the same memory, whose tensors must therefore stay equal. `loaded`: tensors
    that the loader computes with, and the parameters that it fills from them; `forms`: those parameters in load format,
    for whoever runs the loader.
    """

    held: list[Held]
    boxes: list[BoxRow] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)
    by_tensor: dict[int, list[int]] = field(default_factory=dict)
    twins: list[tuple[int, int]] = field(default_factory=list)
    loaded: dict[int, tuple[str, ...]] = field(default_factory=dict)
    forms: dict[str, Any] = field(default_factory=dict)

    def add(self, piece: Piece, *, tensor: int, offset: int, repack: Repack | None) -> None:
        """Add one copy as a box with its rows; raises `Unplaceable`."""
        plain = simplify(piece)
        rows = rows_of(plain, tensor=tensor, box=len(self.boxes), offset=offset, repack=repack)
        self.boxes.append(identity(piece, tensor))
        self.by_tensor.setdefault(tensor, []).extend(range(len(self.rows), len(self.rows) + len(rows)))
        self.rows.extend(rows)

    def overlaps(self, memory: Mapping[str, int] | None = None) -> Iterator[tuple[int, int]]:
        """Numbers of rows that share live elements: an update of one canonical tensor would change another.

        `memory` tells parameters of one storage, whatever their names; without it each name is a storage of its own.
        """
        by_parameter: dict[object, list[int]] = {}
        for number, row in enumerate(self.rows):
            home = memory[row.parameter] if memory else row.parameter
            by_parameter.setdefault((home, row.repack is None), []).append(number)
        for numbers in by_parameter.values():
            numbers.sort(key=lambda number: self.rows[number].reach)
            for i, number in enumerate(numbers):
                row = self.rows[number]
                for other_number in numbers[i + 1 :]:
                    other = self.rows[other_number]
                    if other.reach[0] > row.reach[1]:
                        break
                    if row.coincides(other) or _meet(row.reach[0] + row.places(), other.reach[0] + other.places()):
                        yield number, other_number


def _meet(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> bool:
    return bool(np.intersect1d(one, other, assume_unique=True).size)
