"""How Megatron-core splits one parameter over its tensor-parallel ranks, in closed form.

A split knows only sizes, no names, layers or processes. `held(split, rank, ranks)` gives the shape that
the rank has in memory and its regions. A region is called "0", "1", … by the number of the canonical tensor among those
that the parameter is made of, and counts from that tensor's (or that expert's slice's) first element. Equal splits are
equal objects, so that a model of a thousand experts computes each once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from dcr_daemon.canonical.region import Region, intersect_src, normalise, slab, whole

Shape = tuple[int, ...]


class Uneven(ValueError):
    """A parameter cannot be split over so many ranks; Megatron refuses it, too."""


@dataclass(frozen=True, slots=True)
class SplitPart:
    """What one rank has of a parameter. Padding is in no region."""

    shape: Shape
    regions: tuple[Region, ...]


class Split(Protocol):
    """Frozen and hashable.

    `sizes` are the elements of each canonical tensor (or slice of one) that the parameter is made of; `axis` is the
    local dimension that tensor-parallel ranks share, `None` where every one of them holds everything.
    """

    @property
    def sizes(self) -> tuple[int, ...]: ...

    @property
    def axis(self) -> int | None: ...

    def held(self, rank: int, ranks: int) -> SplitPart: ...

    def __hash__(self) -> int: ...


@lru_cache(maxsize=1 << 16)
def held(split: Split, rank: int, ranks: int) -> SplitPart:
    """`split.held`, computed once. Raises `Uneven`."""
    return split.held(rank, ranks)


def share(total: int, ranks: int, what: str) -> int:
    """One of `ranks` equal shares."""
    if total % ranks:
        raise Uneven(f"{total} {what} over {ranks} ranks")
    return total // ranks


@dataclass(frozen=True, slots=True)
class Replicated:
    shape: Shape
    axis: None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        return (math.prod(self.shape),)

    def held(self, rank: int, ranks: int) -> SplitPart:
        return SplitPart(self.shape, tuple(whole("0", self.shape)))


@dataclass(frozen=True, slots=True)
class Rows:
    """Column parallel, as Megatron calls it: dimension 0."""

    shape: Shape
    axis: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        return (math.prod(self.shape),)

    def held(self, rank: int, ranks: int) -> SplitPart:
        rows = share(self.shape[0], ranks, "rows")
        shape = (rows, *self.shape[1:])
        return SplitPart(
            shape, tuple(slab("0", self.shape, starts=(rank * rows, *[0] * (len(shape) - 1)), sizes=shape))
        )


@dataclass(frozen=True, slots=True)
class Columns:
    """Row parallel: dimension 1 of two."""

    shape: tuple[int, int]
    axis: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        return (math.prod(self.shape),)

    def held(self, rank: int, ranks: int) -> SplitPart:
        rows, columns = self.shape
        columns = share(columns, ranks, "columns")
        return SplitPart(
            (rows, columns), tuple(slab("0", self.shape, starts=(0, rank * columns), sizes=(rows, columns)))
        )


@dataclass(frozen=True, slots=True)
class Padded:
    """Rows of a vocabulary, padded at the end to a multiple of `multiple` · ranks; the padding has no owner."""

    shape: tuple[int, int]
    multiple: int
    axis: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        return (math.prod(self.shape),)

    def held(self, rank: int, ranks: int) -> SplitPart:
        vocabulary, width = self.shape
        rows = -(-vocabulary // (self.multiple * ranks)) * self.multiple
        first = min(rank * rows, vocabulary)
        real = min(first + rows, vocabulary) - first
        return SplitPart((rows, width), tuple(slab("0", self.shape, starts=(first, 0), sizes=(real, width))))


@dataclass(frozen=True, slots=True)
class Section:
    """Blocks of `rows` rows, one every `apart` rows, in canonical tensor number `of` from row `first` on."""

    of: int
    first: int
    blocks: int
    rows: int = 1
    apart: int = 1


@dataclass(frozen=True, slots=True)
class Joined:
    """Sections one after the other in a rank's memory, each of them split over the ranks by itself: gate and up,
    Mamba's projections, a delta net's.

    `tail` is the shape of a row. Sections that lie beside each other on both sides become one region, and so do equal
    ones at equal distances.
    """

    sections: tuple[Section, ...]
    tail: Shape
    axis: int = 0

    @property
    def width(self) -> int:
        return math.prod(self.tail)

    @property
    def sizes(self) -> tuple[int, ...]:
        sizes = [0] * (max(section.of for section in self.sections) + 1)
        for section in self.sections:
            sizes[section.of] += section.blocks * section.rows * self.width
        return tuple(sizes)

    def held(self, rank: int, ranks: int) -> SplitPart:
        width, at, regions = self.width, 0, []
        for section in self.sections:
            blocks = share(section.blocks, ranks, "rows" if section.rows == 1 else "heads")
            block = section.rows * width
            dst = (section.first + rank * blocks * section.apart) * width
            step = section.apart * width
            regions.append(normalise(Region(str(section.of), (blocks, block), at * width, (block, 1), dst, (step, 1))))
            at += blocks * section.rows
        return SplitPart((at, *self.tail), tuple(_fused(regions)))


def _fused(regions: list[Region]) -> list[Region]:
    """Fewer regions for the same pairs: runs that continue each other, then equal boxes at equal distances."""
    runs = regions[:1]
    for region in regions[1:]:
        last = runs[-1]
        dense = last.src_strides == last.dst_strides == region.src_strides == region.dst_strides == (1,)
        if dense and region.name == last.name:
            length = last.shape[0]
            if (region.src, region.dst) == (last.src + length, last.dst + length):
                runs[-1] = replace(last, shape=(length + region.shape[0],))
                continue
        runs.append(region)
    fused: list[Region] = []
    at = 0
    while at < len(runs):
        first, count = runs[at], 1
        while at + count < len(runs) and _continues(runs[at : at + count + 1]):
            count += 1
        if count > 1:
            src, dst = runs[at + 1].src - first.src, runs[at + 1].dst - first.dst
            fused.append(normalise(first.with_axes([(count, src, dst), *first.axes])))
        else:
            fused.append(first)
        at += count
    return fused


def _continues(row: list[Region]) -> bool:
    first, last = row[0], row[-1]
    src, dst = row[1].src - first.src, row[1].dst - first.dst
    steps = len(row) - 1
    return (
        last.name == first.name
        and last.axes == first.axes
        and min(src, dst) > 0
        and (last.src, last.dst) == (first.src + steps * src, first.dst + steps * dst)
    )


@dataclass(frozen=True, slots=True)
class QueryGroups:
    """Queries, keys and values of one group after the other, cut into equal flat ranges, wherever these cut.

    A group's rows: its queries, with a gate as many rows of it, one key, one value. With fewer groups than ranks a rank
    holds a part of a group, and maybe no key or value. With a gate, the checkpoint has a head's gate after its query.
    `width` is a row's length, 1 for a bias.
    """

    heads: int
    groups: int
    head: int
    width: int
    gate: bool = False
    bias: bool = False
    axis: int = 0

    @property
    def rows(self) -> int:
        return (self.heads * (1 + self.gate) + 2 * self.groups) * self.head

    @property
    def sizes(self) -> tuple[int, ...]:
        one = self.head * self.width
        return self.heads * (1 + self.gate) * one, self.groups * one, self.groups * one

    def packed(self) -> list[Region]:
        """The unsplit parameter's places ↔ query, key and value."""
        each, one = self.heads // self.groups, self.head * self.width
        group, per = self.rows // self.groups * self.width, 1 + self.gate
        query = (self.groups, each, one), (group, one, 1), (each * per * one, per * one, 1)
        single = (self.groups, one), (group, 1), (one, 1)
        regions = [Region("0", query[0], 0, query[1], 0, query[2])]
        if self.gate:
            regions.append(Region("0", query[0], each * one, query[1], one, query[2]))
        for name, place in (("1", each * per), ("2", each * per + 1)):
            regions.append(Region(name, single[0], place * one, single[1], 0, single[2]))
        return [normalise(region) for region in regions]

    def held(self, rank: int, ranks: int) -> SplitPart:
        rows = share(self.rows, ranks, "query, key and value rows")
        lo, hi = rank * rows * self.width, (rank + 1) * rows * self.width
        pieces = [piece.shifted(src=-lo) for region in self.packed() for piece in intersect_src(region, lo, hi)]
        return SplitPart((rows,) if self.bias else (rows, self.width), tuple(pieces))


@dataclass(frozen=True, slots=True)
class InterleavedExpert:
    """One expert's [gate; up] in a slice of (hidden, 2 · width), transposed, gate and up in turn (gpt-oss)."""

    width: int
    hidden: int
    bias: bool = False
    axis: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        return (2 * self.width * self.hidden,)

    def held(self, rank: int, ranks: int) -> SplitPart:
        rows = share(self.width, ranks, "rows")
        axes = [(self.hidden, 1, 2 * self.width), (rows, self.hidden, 2), (2, rows * self.hidden, 1)]
        region = Region("0", (), 0, (), 2 * rank * rows, ()).with_axes(axes)
        return SplitPart((2 * rows,) if self.bias else (2 * rows, self.hidden), (normalise(region),))


@dataclass(frozen=True, slots=True)
class TransposedExpert:
    """One expert's (hidden, width), split by columns, in a slice of (width, hidden) (gpt-oss)."""

    width: int
    hidden: int
    axis: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.width * self.hidden,)

    def held(self, rank: int, ranks: int) -> SplitPart:
        columns = share(self.width, ranks, "columns")
        axes = [(columns, 1, self.hidden), (self.hidden, columns, 1)]
        region = Region("0", (), 0, (), rank * columns * self.hidden, ()).with_axes(axes)
        return SplitPart((self.hidden, columns), (normalise(region),))
