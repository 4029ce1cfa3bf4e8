"""Where canonical elements lie in this worker's memory. Pure; no torch, no vLLM.

Runs in the worker process: the loader package makes a `Placement` of recorded copies; the memories and jobs read it.
A copy of the loader is a `Region` (canonical/region.py), like a trainer's shard: its `src` counts elements of a
parameter in *load format* (as the loader fills it), its `dst` those of the canonical tensor. So a training layout and a
serving layout that have nothing in common meet in canonical coordinates, and one algebra cuts, merges, inverts and
composes both. This module adds only what the kernels need: a *row* is a region of at most 4 axes with relative places
below 2^32, inside one block of a repacked parameter. One or more rows make up one *box*, the unit in which sums are
reported and joined over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dcr_daemon.canonical.box import MAX_RANK, Box, nested
from dcr_daemon.canonical.compose import compose
from dcr_daemon.canonical.region import (
    MAX_AXES,
    Axis,
    Region,
    box,
    indices,
    intersect_src,
    invert,
    merge,
    normalise,
    restrict,
    wire_pieces,
)
from dcr_daemon.vllm_plugin.calls import BoxRow, TensorHandling

WIDE = 1 << 32  #: relative places are stored as u32
FEW = 16  #: up to so many rows of one tensor are compared one by one
DROPPED = np.uint32(0xFFFFFFFF)  #: the place of an element that a repacking does not keep
MAX_CUTS = 4096  #: cuts of one copy that has more axes than a box or a row


Ints = npt.NDArray[np.int64]


class Unplaceable(Exception):
    """This copy cannot be placed; the text says why."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy that the loader was seen to do: `region.src` counts elements of the storage of `parameter`."""

    parameter: str
    region: Region

    @property
    def tensor(self) -> str:
        return self.region.name


def copy_region(tensor: str, place: int, *, element: int, axes: Iterable[Axis]) -> Region:
    """The normal region of a copy that starts at canonical `element` and at storage `place`.

    Args:
        axes: extent, stride of the places, stride of the elements; any order, as two memory views have them.

    Raises:
        Unplaceable: the copy repeats or overlaps elements on either side, or has too many axes.
    """
    merged = merge(axes)
    shape, places, elements = tuple(zip(*merged, strict=True)) or ((), (), ())
    if not nested(shape, elements):
        raise Unplaceable("the loader broadcasts, or takes overlapping views of the checkpoint tensor")
    if not nested(shape, places):
        raise Unplaceable("the loader writes overlapping or broadcast places of the parameter")
    if len(merged) > MAX_AXES:
        raise Unplaceable(f"a copy with {len(merged)} axes")
    return Region(tensor, shape, place, places, element, elements)


@dataclass(frozen=True, slots=True)
class Repack:
    """A parameter whose blocks of `block` load-format elements are each permuted into `live_block` live ones.

    `table[i]` is the live place, inside its block, of load-format element i of any block (u32), or `DROPPED`. `drops`:
    whether it has such elements. `kept`: the parts of a block, as offset, shape and strides, that were found to have
    none; all layers of a model share one table, and their copies are of a few shapes.
    """

    block: int
    live_block: int
    table: npt.NDArray[np.uint32]
    drops: bool = field(init=False)
    kept: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = field(
        init=False, default_factory=set, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "drops", bool((self.table == DROPPED).any()))


@dataclass(frozen=True, slots=True)
class PlacementRow:
    """A region as the kernels read it. `offset`: the storage element at which the parameter starts. `canonical_box`:
    its canonical elements.

    Live element of the load-format place `region.src + p`: `base + p`, or, repacked, `base + table[inner + p]`.
    """

    box: int
    tensor: int
    parameter: str
    region: Region
    offset: int
    canonical_box: Box
    repack: Repack | None = None

    @property
    def base(self) -> int:
        if self.repack is None:
            return self.offset + self.region.src
        return self.offset + self.region.src // self.repack.block * self.repack.live_block

    @property
    def inner(self) -> int:
        return 0 if self.repack is None else self.region.src % self.repack.block

    @property
    def end(self) -> int:
        """One past the last live element that can be touched."""
        if self.repack is None:
            return self.offset + self.region.src_last + 1
        return self.base + self.repack.live_block

    def targets(self) -> npt.NDArray[np.int64]:
        """Live storage element of each of the row's elements (int64, row-major): the definition of a row."""
        places = indices(self.region)[0] - self.region.src
        return self.base + (places if self.repack is None else self.repack.table[self.inner + places].astype(np.int64))

    def in_storage(self) -> Region:
        """The same region with load-format places counted from the start of the storage."""
        return self.region.shifted(src=self.offset)


def same_places(one: Region, other: Region) -> bool:
    """Whether both put the same canonical element numbers at the same places, whatever the tensors' names."""
    return (one.src, one.dst, one.axes) == (other.src, other.dst, other.axes)


def box_row(region: Region, tensor: int) -> BoxRow:
    """The canonical elements of a region, merged as far as possible: equal on all ranks that hold the same ones."""
    alone = box(region)
    return BoxRow(tensor, alone.dst, alone.shape, alone.strides)


def _within_blocks(region: Region, block: int) -> Iterator[Region]:
    """Cut so that no part crosses a multiple of `block` on the live side."""
    for first in range(region.src - region.src % block, region.src_last + 1, block):
        yield from intersect_src(region, first, first + block)


def _narrow(region: Region) -> Iterator[Region]:
    """Cut so that relative places fit u32 on both sides."""
    if max(region.src_last - region.src, region.dst_last - region.dst) < WIDE:
        yield region
        return
    axis = max(range(len(region.shape)), key=lambda a: (region.shape[a] - 1) * region.dst_strides[a])
    half = region.shape[axis] // 2
    for part in (*restrict(region, axis, lo=0, hi=half), *restrict(region, axis, lo=half, hi=region.shape[axis])):
        yield from _narrow(normalise(part))


def _in_axes(region: Region) -> Iterator[Region]:
    """Cut along the shortest axes until the kernels' number of axes is enough."""
    if len(region.shape) <= MAX_RANK:
        yield region
        return
    axis = min(range(len(region.shape)), key=lambda a: region.shape[a])
    for i in range(region.shape[axis]):
        for part in restrict(region, axis, lo=i, hi=i + 1):
            yield from _in_axes(normalise(part))


def split_rows(region: Region, repack: Repack | None = None) -> list[Region]:
    """Cut a normal region into parts that each fit one row.

    Raises:
        Unplaceable: a permuted block has 2^32 elements or more.
    """
    if repack is not None and repack.block >= WIDE:
        raise Unplaceable(f"a repacked block of {repack.block} elements")
    # Blocks first: a part of a block may have shorter axes than the whole, or one axis more.
    parts = [region] if repack is None else _within_blocks(region, repack.block)
    return [row for part in parts for narrow in _narrow(part) for row in _in_axes(narrow)]


@lru_cache(maxsize=1 << 16)
def disjoint(one: Box, other: Box) -> bool:
    """`Box.apart`, cached: the tensors of all layers, and of all versions, are cut in the same way."""
    return one.apart(other)


@dataclass(slots=True)
class Placement:
    """All that one worker holds of a layout. Lists with one entry per tensor are in layout order.

    `aliases`: pairs of rows that are the same memory, so that their tensors must stay equal. `computed`: the
    loader-computed tensors, each with the parameters that the loader fills from it; `load_formats`: those parameters in
    load format, to run the loader on. `replay`: makes again what vLLM derived from placed tensors
    (`loader.replay.Replay`), or None. `unnamed`: parameters that no tensor of the layout fills, and that may stay as
    they are.
    """

    held: list[TensorHandling]
    boxes: list[BoxRow] = field(default_factory=list)
    rows: list[PlacementRow] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)
    by_tensor: dict[int, list[int]] = field(default_factory=dict)
    aliases: list[tuple[int, int]] = field(default_factory=list)
    computed: dict[int, tuple[str, ...]] = field(default_factory=dict)
    load_formats: dict[str, Any] = field(default_factory=dict)
    replay: Any = None
    unnamed: list[str] = field(default_factory=list)
    _ends: dict[int, tuple[Ints, Ints, Ints]] = field(default_factory=dict)

    def rows_meeting(self, tensor: int, segment: Box) -> list[int]:
        """Numbers of the rows that may hold elements of a box of `tensor`."""
        rows = self.by_tensor.get(tensor, [])
        if len(rows) > FEW:
            if tensor not in self._ends:
                sides = [self.rows[number].canonical_box for number in rows]
                first, last = [side.dst for side in sides], [side.last for side in sides]
                self._ends[tensor] = np.array(rows), np.array(first), np.array(last)
            numbers, starts, ends = self._ends[tensor]
            rows = numbers[(starts <= segment.last) & (ends >= segment.dst)].tolist()
        return [number for number in rows if not disjoint(self.rows[number].canonical_box, segment)]

    def add(self, copy: Copy, *, tensor: int, offset: int, repack: Repack | None) -> None:
        """Add one copy as a box with its rows, or as several boxes if it has more axes than one box can have.

        Args:
            offset: live storage element at which the parameter's own element 0 lies.

        Raises:
            Unplaceable: it would need more than `MAX_CUTS` boxes, or a permuted block is too large.
        """
        spare = sorted(copy.region.shape)[:-MAX_RANK]
        if math.prod(spare) > MAX_CUTS:
            raise Unplaceable(f"a copy with {len(copy.region.shape)} axes, cut {math.prod(spare)} times")
        for piece in wire_pieces(copy.region):
            parts = split_rows(piece, repack)
            rows = [
                PlacementRow(len(self.boxes), tensor, copy.parameter, part, offset, box(part), repack) for part in parts
            ]
            self.boxes.append(box_row(piece, tensor))
            self.by_tensor.setdefault(tensor, []).extend(range(len(self.rows), len(self.rows) + len(rows)))
            self.rows.extend(rows)

    def overlaps(self, storages: Mapping[str, int] | None = None) -> Iterator[tuple[int, int]]:
        """Numbers of rows that share live elements: an update of one canonical tensor would change another.

        `storages` gives an id of each parameter's storage; without it every parameter has a storage of its own.
        """
        by_storage: dict[object, list[tuple[int, int, Region]]] = {}
        for number, row in enumerate(self.rows):
            home = storages[row.parameter] if storages else row.parameter
            region = row.in_storage()
            by_storage.setdefault((home, row.repack is None), []).append((region.src, number, region))
        for held in by_storage.values():
            held.sort(key=lambda entry: (entry[0], entry[2].src_last))
            for i, (_, number, region) in enumerate(held):
                last = region.src_last
                for start, other_number, other in held[i + 1 :]:
                    if start > last:
                        break
                    if compose(invert(region), other):
                        yield number, other_number
