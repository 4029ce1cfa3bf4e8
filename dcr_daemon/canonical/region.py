"""A region: where a piece of a local tensor lies in a canonical tensor, as one strided box over both.

    for every multi-index x < shape:   local[src + x·src_strides]  ↔  canonical[dst + x·dst_strides]

Both sides count flat elements, so one region can also express a transposition, an interleaving, a split axis or a flat
partition. The same type describes a trainer's shard, a chunk of a file and a receiver's placement. Everything here is
pure and closed over regions: `normalise`, `invert`, `restrict`, `intersect_src`, `intersect_dst`; beside it `compose`
(compose.py), `fit` (fit.py) and `exactly_once` (coverage.py). `boxes` gives the form that is stored in a chunk.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dcr_daemon.canonical.box import MAX_RANK, Box

MAX_AXES = 8  #: of a region; a box on the wire has at most `MAX_RANK`

Axis = tuple[int, int, int]  #: extent, source stride, destination stride
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """`shape[i]` elements along axis i; strides and offsets in elements, the canonical tensor is called `name`.

    Strides are positive: a broadcast (stride 0) would give one canonical element two sources.
    A region without axes is one element.

    Raises:
        ValueError: more than `MAX_AXES` axes, an extent or stride below 1, a negative offset.
    """

    name: str
    shape: tuple[int, ...]
    src: int
    src_strides: tuple[int, ...]
    dst: int
    dst_strides: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.shape) == len(self.src_strides) == len(self.dst_strides) <= MAX_AXES:
            raise ValueError(f"a region has at most {MAX_AXES} axes and two strides for each: {self}")
        if self.src < 0 or self.dst < 0 or min((*self.shape, *self.src_strides, *self.dst_strides), default=1) < 1:
            raise ValueError(f"a region has positive extents and strides and no negative offset: {self}")

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(zip(self.shape, self.src_strides, self.dst_strides, strict=True))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def src_last(self) -> int:
        """Local place of the highest element."""
        return self.src + span(self.shape, self.src_strides)

    @property
    def dst_last(self) -> int:
        """Canonical index of the highest element."""
        return self.dst + span(self.shape, self.dst_strides)

    def with_axes(self, axes: Iterable[Axis]) -> Region:
        """The same offsets over other axes."""
        shape, src_strides, dst_strides = tuple(zip(*axes, strict=True)) or ((), (), ())
        return Region(self.name, shape, self.src, src_strides, self.dst, dst_strides)

    def shifted(self, *, src: int = 0, dst: int = 0) -> Region:
        """The same piece of a tensor that starts elsewhere: a partition of a flat buffer, a slice of another."""
        return replace(self, src=self.src + src, dst=self.dst + dst)


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Distance in elements from the first to the highest place."""
    return sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a dense tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def whole(name: str, shape: Sequence[int]) -> list[Region]:
    """The region of a local tensor that equals the canonical one; none for an empty tensor."""
    elements = math.prod(shape)
    return [Region(name, (elements,), 0, (1,), 0, (1,))] if elements else []


def slab(name: str, shape: Sequence[int], *, starts: Sequence[int], sizes: Sequence[int], src: int = 0) -> list[Region]:
    """A rectangular part of a canonical tensor of `shape`, dense in memory from local place `src`; none if it is empty.

    Raises:
        ValueError: the part leaves the tensor.
    """
    if any(a < 0 or n < 0 or a + n > size for a, n, size in zip(starts, sizes, shape, strict=True)):
        raise ValueError(f"{name}: {tuple(sizes)} from {tuple(starts)} does not lie inside {tuple(shape)}")
    if 0 in sizes:
        return []
    strides = row_major(shape)
    dst = sum(a * s for a, s in zip(starts, strides, strict=True))
    return [normalise(Region(name, tuple(sizes), src, row_major(sizes), dst, strides))]


def normalise(region: Region) -> Region:
    """Drop axes of one, sort the rest by falling canonical stride, merge what is contiguous on both sides.

    The order of a normal region is the order of its canonical elements; two regions of the same elements at the same
    places have, for pieces of dense tensors, the same normal form.
    """
    return region.with_axes(merge(region.axes))


def merge(axes: Iterable[Axis]) -> list[Axis]:
    """The axes of a normal region."""
    merged: list[Axis] = []
    for n, src, dst in sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: -axis[2]):
        if merged and merged[-1][1:] == (n * src, n * dst):
            merged[-1] = (merged[-1][0] * n, src, dst)
        else:
            merged.append((n, src, dst))
    return merged


def invert(region: Region) -> Region:
    """The same pairs with the sides exchanged: canonical → local."""
    return Region(region.name, region.shape, region.dst, region.dst_strides, region.src, region.src_strides)


def restrict(region: Region, axis: int, *, lo: int, hi: int) -> list[Region]:
    """The places [lo, hi) along one axis of the region itself, which may reach beyond its ends; at most one region."""
    n, src, dst = region.axes[axis]
    lo, hi = max(lo, 0), min(hi, n)
    if lo >= hi:
        return []
    shape = (*region.shape[:axis], hi - lo, *region.shape[axis + 1 :])
    return [replace(region, shape=shape, src=region.src + lo * src, dst=region.dst + lo * dst)]


def intersect_src(region: Region, lo: int, hi: int) -> list[Region]:
    """What lies at the local places [lo, hi): a flat partition (ZeRO, FSDP1, a distributed optimizer's range).

    Places keep counting from the same zero; `shifted(src=-lo)` makes them count from the partition's start. At most two
    regions per axis where local strides are nested, as those of a dense tensor are.
    """
    axes = sorted(region.axes, key=lambda axis: axis[1])
    return [normalise(piece) for piece in _cut(region, axes, [], lo, hi)]


def _cut(region: Region, axes: list[Axis], done: list[Axis], lo: int, hi: int) -> Iterator[Region]:
    """Split off the axis of the largest local stride. `region` gives the offsets; `done` are axes already settled.

    Along that axis, blocks wholly inside [lo, hi) stay together; a block that reaches over an edge goes on by itself
    (one per edge if strides are nested).
    """
    extent = sum((n - 1) * stride for n, stride, _ in axes)
    if region.src >= hi or region.src + extent < lo:
        return
    if lo <= region.src and region.src + extent < hi:
        yield region.with_axes([*done, *axes])
        return
    *inner, (n, src, dst) = axes
    reach = extent - (n - 1) * src
    touched_from = max(0, -(-(lo - reach - region.src) // src))
    touched_to = min(n, -(-(hi - region.src) // src))
    inside_from = min(max(touched_from, -(-(lo - region.src) // src)), touched_to)
    inside_to = max(min(touched_to, (hi - 1 - reach - region.src) // src + 1), inside_from)
    for i in (*range(touched_from, inside_from), *range(inside_to, touched_to)):
        yield from _cut(region.shifted(src=i * src, dst=i * dst), inner, done, lo, hi)
    if inside_from < inside_to:
        start = region.shifted(src=inside_from * src, dst=inside_from * dst)
        yield start.with_axes([*done, (inside_to - inside_from, src, dst), *inner])


def intersect_dst(region: Region, lo: int, hi: int) -> list[Region]:
    """What lies at the canonical elements [lo, hi)."""
    return [normalise(invert(piece)) for piece in intersect_src(invert(region), lo, hi)]


def indices(region: Region) -> tuple[Indices, Indices]:
    """Local places and canonical elements of every pair (int64), in the region's own row-major order."""
    src, dst = np.array([region.src], np.int64), np.array([region.dst], np.int64)
    for n, src_stride, dst_stride in region.axes:
        steps = np.arange(n, dtype=np.int64)
        src = (src[:, None] + steps * src_stride).reshape(-1)
        dst = (dst[:, None] + steps * dst_stride).reshape(-1)
    return src, dst


def wire_pieces(region: Region) -> list[Region]:
    """The region in pieces that `box` accepts: one, unless its canonical side has more axes than a box."""
    waiting, done = [normalise(region)], []
    while waiting:
        piece = waiting.pop()
        if len(_merged(piece)) <= MAX_RANK:
            done.append(piece)
            continue
        axis = min(range(len(piece.shape)), key=lambda a: piece.shape[a])
        waiting += [normalise(part) for i in range(piece.shape[axis]) for part in restrict(piece, axis, lo=i, hi=i + 1)]
    return sorted(done, key=lambda piece: piece.dst)


def box(region: Region) -> Box:
    """The canonical side of one of `wire_pieces`, ordinals in the piece's own row-major order.

    Raises:
        ValueError: it has more axes than a box.
    """
    axes = _merged(region) or [(1, 1)]
    return Box(region.dst, tuple(n for n, _ in axes), tuple(stride for _, stride in axes))


def boxes(region: Region) -> list[Box]:
    """The canonical side as it is stored in a chunk (docs/FORMAT.md 2)."""
    return [box(piece) for piece in wire_pieces(region)]


def _merged(region: Region) -> list[tuple[int, int]]:
    """Axes of the canonical side alone. Merging keeps ordinals, whatever the local side looks like."""
    merged: list[tuple[int, int]] = []
    for n, _, stride in region.axes:
        if n == 1:
            continue
        if merged and merged[-1][1] == n * stride:
            merged[-1] = (merged[-1][0] * n, stride)
        else:
            merged.append((n, stride))
    return merged


def digest(regions: Mapping[str, Iterable[Region]]) -> str:
    """SHA-256 (hex) of a map from local names to regions; the same for every order and spelling of the same regions."""
    table = [
        [
            local,
            sorted([r.name, r.src, r.dst, *(list(axis) for axis in r.axes)] for r in (normalise(r) for r in of_local)),
        ]
        for local, of_local in sorted(regions.items())
    ]
    return hashlib.sha256(json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()).hexdigest()
