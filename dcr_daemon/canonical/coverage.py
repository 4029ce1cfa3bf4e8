"""Whether every canonical element has exactly one source.

Regions of all ranks come in; findings go out, none if all is well. The gate's `agreement.coverage`, `dcr plan`, the
reader and the probes ask. The answer is computed from strided boxes, without anything per element, so a tensor may have
a trillion of them.

The boxes of a tensor are swept by address. Where strided boxes interlock, all of them are folded over the largest
stride: the blocks of that length hold the same few boxes over long stretches, and each stretch is one smaller problem.
The column shards of 64 ranks fold once into 64 intervals. Tensors that are cut alike (all experts of all layers) are
checked once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.canonical.region import Region, intersect_dst, merge

Kind = Literal["missing", "double", "outside", "unknown"]
Steps = tuple[tuple[int, int], ...]  #: axes as (extent, stride), by falling stride, merged, none of extent 1


@dataclass(frozen=True, slots=True)
class Finding:
    """Canonical elements that no region holds (missing) or several do (double), as one strided box of them.

    `outside`: a region reaches beyond its tensor. `unknown`: no tensor has this name. `holders` are the numbers of the
    regions concerned, in the order in which they were given.
    """

    kind: Kind
    name: str
    first: int
    axes: Steps
    holders: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        return math.prod(n for n, _ in self.axes)

    def __str__(self) -> str:
        *outer, (run, stride) = self.axes or ((1, 1),)
        what = f"elements [{self.first}, {self.first + run})" if stride == 1 else f"{run} elements {stride} apart"
        if stride != 1:
            what += f" from {self.first}"
        times = "".join(f", {n} times every {step}" for n, step in reversed(outer))
        return f"{self.name}: {what}{times}: {self.kind}"


def exactly_once(regions: Iterable[Region], tensors: Layout | Mapping[str, Sequence[int]]) -> list[Finding]:
    """What keeps `regions` from covering every element of `tensors` exactly once; empty if they do.

    Args:
        regions: of all owners together; only their canonical side counts.
        tensors: a layout, or shapes by name.
    """
    shapes = {spec.name: spec.shape for spec in tensors} if isinstance(tensors, Layout) else dict(tensors)
    by_name: dict[str, list[tuple[int, Steps, int]]] = {name: [] for name in shapes}
    findings: list[Finding] = []
    for number, region in enumerate(regions):
        axes = _steps(region)
        if region.name in by_name:
            by_name[region.name].append((region.dst, axes, number))
        else:
            findings.append(Finding("unknown", region.name, region.dst, axes, (number,)))
    known: dict[tuple[int, tuple[tuple[int, Steps], ...]], list[Finding]] = {}
    for name, shape in shapes.items():
        held = sorted(by_name[name])
        pattern = math.prod(shape), tuple((start, axes) for start, axes, _ in held)
        if pattern not in known:
            known[pattern] = check_boxes(pattern[1], pattern[0])
        findings += [
            replace(finding, name=name, holders=tuple(held[n][2] for n in finding.holders))
            for finding in known[pattern]
        ]
    # What no tensor can hold comes first, in the order of the regions: it tends to explain the rest.
    findings.sort(key=lambda finding: (1,) if finding.kind in ("missing", "double") else (0, finding.holders))
    return findings


def check_boxes(boxes: Sequence[tuple[int, Steps]], elements: int) -> list[Finding]:
    """What keeps `boxes` (first element, axes) from covering one tensor of `elements` exactly once.

    The findings have no name; their holders number the boxes.
    """
    sides = [_Side(start, axes, number) for number, (start, axes) in enumerate(boxes)]
    outside = [side for side in sides if side.last >= elements]
    inside = [side for side in sides if side.last < elements] if outside else sides
    found = [Finding("outside", "", side.start, side.axes, (side.holder,)) for side in outside]
    return found + [
        Finding(kind, "", first, axes, holders) for kind, first, axes, holders in _sweep(inside, 0, elements)
    ]


def _steps(region: Region) -> Steps:
    merged = merge((n, stride, stride) for n, stride in zip(region.shape, region.dst_strides, strict=True))
    return tuple((n, stride) for n, stride, _ in merged)


@dataclass(frozen=True, slots=True)
class _Side:
    """The canonical side of one region; `holder` is its number."""

    start: int
    axes: Steps
    holder: int

    @property
    def last(self) -> int:
        return self.start + sum((n - 1) * stride for n, stride in self.axes)

    @property
    def dense(self) -> bool:
        return not self.axes or (len(self.axes) == 1 and self.axes[0][1] == 1)

    def at(self, offset: int) -> _Side:
        return _Side(self.start + offset, self.axes, self.holder)

    def within(self, lo: int, hi: int) -> list[_Side]:
        """The parts that lie at [lo, hi)."""
        if lo <= self.start and self.last < hi:
            return [self]
        strides = tuple(stride for _, stride in self.axes)
        region = Region("", tuple(n for n, _ in self.axes), self.start, strides, self.start, strides)
        return [_Side(piece.dst, _steps(piece), self.holder) for piece in intersect_dst(region, lo, hi)]


_Gap = tuple[Kind, int, Steps, tuple[int, ...]]  #: the fields of a finding without its name


def _sweep(sides: list[_Side], lo: int, hi: int) -> Iterator[_Gap]:
    """Check the elements [lo, hi), in which all of `sides` lie."""
    groups = list(_groups(sides))
    limits = [*(group[0].start for group in groups[1:]), hi]
    at = lo
    for group, limit in zip(groups, limits, strict=False):
        start, stop = group[0].start, max(side.last for side in group) + 1
        interlocked = [axes[0][1] for axes in (side.axes for side in group if not side.dense)]
        stride = max(interlocked, default=1)
        # Whole blocks where there is room, so that a hole in every block is one finding and not two.
        start, stop = max(at, start - start % stride), min(limit, -(-stop // stride) * stride)
        if at < start:
            yield "missing", at, _along(start - at), ()
        yield from _fold(group, start, hi=stop, stride=stride) if interlocked else _intervals(group)
        at = stop
    if at < hi:
        yield "missing", at, _along(hi - at), ()


def _along(places: int, stride: int = 1) -> Steps:
    return ((places, stride),) if places > 1 else ()


def _groups(sides: list[_Side]) -> Iterator[list[_Side]]:
    """Sides whose address ranges overlap, together."""
    group: list[_Side] = []
    reach = -1
    for side in sorted(sides, key=lambda side: side.start):
        if group and side.start > reach:
            yield group
            group = []
        group.append(side)
        reach = max(reach, side.last)
    if group:
        yield group


def _intervals(sides: list[_Side]) -> Iterator[_Gap]:
    """The places where two or more of overlapping intervals lie. Nothing is missing inside a group."""
    edges = sorted(
        [(side.start, 1, side.holder) for side in sides] + [(side.last + 1, 0, side.holder) for side in sides]
    )
    running: list[int] = []
    for (at, opens, holder), (then, _, _) in zip(edges, [*edges[1:], (edges[-1][0], 0, 0)], strict=True):
        if opens:
            running.append(holder)
        else:
            running.remove(holder)
        if len(running) > 1 and at < then:
            yield "double", at, _along(then - at), tuple(sorted(running))


def _fold(sides: list[_Side], lo: int, *, hi: int, stride: int) -> Iterator[_Gap]:
    """Fold [lo, hi) over the largest stride: stretches of equal blocks are checked once each, in one block."""
    parts = [part for side in sides for part in _in_blocks(side, stride)]
    # A first or last block that is seen in part only stands alone.
    edges = {lo // stride, -(-lo // stride), hi // stride, -(-hi // stride)}
    edges.update(edge for start, stop, _ in parts for edge in (start, stop))
    marks = sorted(edges)
    for start, stop in itertools.pairwise(marks):
        base = start * stride
        inside = [side for first, last, side in parts if first <= start < last]
        for kind, at, axes, holders in _sweep(inside, max(lo - base, 0), min(hi - base, stride)):
            yield kind, base + at, (*_along(stop - start, stride), *axes), holders


_InBlocks = tuple[int, int, _Side]  #: a side in each of the blocks [first, last), counted from a block's start


def _in_blocks(side: _Side, stride: int) -> Iterator[_InBlocks]:
    """One side as sides inside blocks of `stride` elements; none of its own strides is larger."""
    block = side.start // stride
    if side.last // stride == block:
        yield block, block + 1, side.at(-block * stride)
        return
    (n, step), *rest = side.axes
    inner = _Side(side.start, tuple(rest), side.holder)
    if step == stride:
        for b in range(block, inner.last // stride + 1):
            for part in inner.within(b * stride, (b + 1) * stride):
                yield b, b + n, part.at(-b * stride)
        return
    by, left = divmod(stride, step)
    head = min(n, -(-((block + 1) * stride - side.start) // step)) if side.start % stride else 0
    groups = 0 if left else (n - head) // by
    if groups < 2:
        for b in range(block, side.last // stride + 1):
            for part in side.within(b * stride, (b + 1) * stride):
                yield b, b + 1, part.at(-b * stride)
        return
    if head:
        yield from _in_blocks(_Side(side.start, (*_along(head, step), *rest), side.holder), stride)
    middle = side.start + head * step
    yield from _in_blocks(_Side(middle, ((groups, stride), (by, step), *rest), side.holder), stride)
    if tail := n - head - groups * by:
        yield from _in_blocks(_Side(middle + groups * stride, (*_along(tail, step), *rest), side.holder), stride)
