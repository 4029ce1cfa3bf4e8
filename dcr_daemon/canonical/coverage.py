"""Does every canonical element have exactly one source? Answered by arithmetic on strided boxes, element counts of a
trillion included: nothing is allocated per element.

A tensor's boxes are swept by address. Where boxes with axes interlock, all are folded over the largest stride: the
blocks of that length see the same few boxes over long stretches, and each stretch is one smaller question. Column
shards of 64 ranks fold once into 64 intervals. Tensors cut alike (all experts of all layers) are judged once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.canonical.region import Region, intersect_dst, merge

Kind = Literal["missing", "double", "outside", "unknown"]
Steps = tuple[tuple[int, int], ...]  #: axes as (extent, stride), by falling stride


@dataclass(frozen=True, slots=True)
class Finding:
    """Canonical elements that no region holds (missing) or several do (double), as one strided box of them.

    `outside`: a region reaches beyond its tensor. `unknown`: no tensor is called so. `holders` are the numbers of the
    regions concerned, in the order in which `exactly_once` was given them.
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


@dataclass(frozen=True, slots=True)
class _Held:
    """One region's canonical side: `axes` by falling stride, merged, none of one place."""

    start: int
    axes: Steps
    holder: int

    @property
    def last(self) -> int:
        return self.start + sum((n - 1) * stride for n, stride in self.axes)

    @property
    def dense(self) -> bool:
        return not self.axes or (len(self.axes) == 1 and self.axes[0][1] == 1)

    def at(self, offset: int) -> _Held:
        return _Held(self.start + offset, self.axes, self.holder)

    def within(self, lo: int, hi: int) -> list[_Held]:
        """What lies at [lo, hi)."""
        if lo <= self.start and self.last < hi:
            return [self]
        strides = tuple(stride for _, stride in self.axes)
        side = Region("", tuple(n for n, _ in self.axes), self.start, strides, self.start, strides)
        return [_held(piece, self.holder) for piece in intersect_dst(side, lo, hi)]


_Found = tuple[Kind, int, Steps, tuple[int, ...]]


def exactly_once(regions: Iterable[Region], tensors: Layout | Mapping[str, Sequence[int]]) -> list[Finding]:
    """What keeps `regions` from covering every element of `tensors` exactly once; empty when nothing does.

    Args:
        regions: of all owners together; their local side plays no part.
        tensors: a layout, or shapes by name.
    """
    shapes = {spec.name: spec.shape for spec in tensors} if isinstance(tensors, Layout) else dict(tensors)
    held: dict[str, list[_Held]] = {name: [] for name in shapes}
    findings: list[Finding] = []
    for number, region in enumerate(regions):
        one = _held(region, number)
        if region.name not in shapes:
            findings.append(Finding("unknown", region.name, one.start, one.axes, (number,)))
        elif one.last >= math.prod(shapes[region.name]):
            findings.append(Finding("outside", region.name, one.start, one.axes, (number,)))
        else:
            held[region.name].append(one)
    seen: dict[tuple[int, tuple[tuple[int, Steps], ...]], list[_Found]] = {}
    for name, shape in shapes.items():
        ones = sorted(held[name], key=lambda one: (one.start, one.axes))
        pattern = math.prod(shape), tuple((one.start, one.axes) for one in ones)
        if pattern not in seen:
            numbered = [_Held(one.start, one.axes, place) for place, one in enumerate(ones)]
            seen[pattern] = list(_sweep(numbered, 0, pattern[0]))
        findings += [
            Finding(kind, name, first, axes, tuple(ones[place].holder for place in places))
            for kind, first, axes, places in seen[pattern]
        ]
    return findings


def _held(region: Region, holder: int) -> _Held:
    axes = merge((n, stride, stride) for n, stride in zip(region.shape, region.dst_strides, strict=True))
    return _Held(region.dst, tuple((n, stride) for n, stride, _ in axes), holder)


def _sweep(ones: list[_Held], lo: int, hi: int) -> Iterator[_Found]:
    """Judge [lo, hi), in which all of `ones` lie."""
    groups = list(_groups(ones))
    limits = [*(group[0].start for group in groups[1:]), hi]
    at = lo
    for group, limit in zip(groups, limits, strict=False):
        start, stop = group[0].start, max(one.last for one in group) + 1
        interlocked = [axes[0][1] for axes in (one.axes for one in group if not one.dense)]
        stride = max(interlocked, default=1)
        # Whole blocks where there is room, so that a hole in every block is one finding and not two.
        start, stop = max(at, start - start % stride), min(limit, -(-stop // stride) * stride)
        if at < start:
            yield "missing", at, _along(start - at), ()
        yield from _fold(group, start, stop, stride) if interlocked else _intervals(group)
        at = stop
    if at < hi:
        yield "missing", at, _along(hi - at), ()


def _along(places: int, stride: int = 1) -> Steps:
    return ((places, stride),) if places > 1 else ()


def _groups(ones: list[_Held]) -> Iterator[list[_Held]]:
    """Boxes whose address ranges overlap belong together."""
    group: list[_Held] = []
    reach = -1
    for one in sorted(ones, key=lambda one: one.start):
        if group and one.start > reach:
            yield group
            group = []
        group.append(one)
        reach = max(reach, one.last)
    if group:
        yield group


def _intervals(ones: list[_Held]) -> Iterator[_Found]:
    """Overlapping intervals: where two or more run at once is double. Nothing is missing inside a group."""
    edges = sorted([(one.start, 1, one.holder) for one in ones] + [(one.last + 1, 0, one.holder) for one in ones])
    running: list[int] = []
    for (at, opens, holder), (then, _, _) in zip(edges, [*edges[1:], (edges[-1][0], 0, 0)], strict=True):
        if opens:
            running.append(holder)
        else:
            running.remove(holder)
        if len(running) > 1 and at < then:
            yield "double", at, _along(then - at), tuple(sorted(running))


def _fold(ones: list[_Held], lo: int, hi: int, stride: int) -> Iterator[_Found]:
    """Fold [lo, hi) over the largest stride: stretches of equal blocks are judged once each, in one block."""
    rows = [row for one in ones for row in _rows(one, stride)]
    # A first or last block that is seen in part only stands alone.
    edges = {lo // stride, -(-lo // stride), hi // stride, -(-hi // stride)}
    edges.update(edge for start, stop, _ in rows for edge in (start, stop))
    marks = sorted(edges)
    for start, stop in itertools.pairwise(marks):
        base = start * stride
        inside = [one for first, last, one in rows if first <= start < last]
        for kind, at, axes, holders in _sweep(inside, max(lo - base, 0), min(hi - base, stride)):
            yield kind, base + at, (*_along(stop - start, stride), *axes), holders


_Row = tuple[int, int, _Held]  #: in blocks [first, last) lies this, counted from the block's start


def _rows(one: _Held, stride: int) -> Iterator[_Row]:
    """One box as boxes inside blocks of `stride` elements; no stride of it is larger."""
    block = one.start // stride
    if one.last // stride == block:
        yield block, block + 1, one.at(-block * stride)
        return
    (n, step), *rest = one.axes
    inner = _Held(one.start, tuple(rest), one.holder)
    if step == stride:
        for b in range(block, inner.last // stride + 1):
            for part in inner.within(b * stride, (b + 1) * stride):
                yield b, b + n, part.at(-b * stride)
        return
    by, left = divmod(stride, step)
    head = min(n, -(-((block + 1) * stride - one.start) // step)) if one.start % stride else 0
    groups = 0 if left else (n - head) // by
    if groups < 2:
        for b in range(block, one.last // stride + 1):
            for part in one.within(b * stride, (b + 1) * stride):
                yield b, b + 1, part.at(-b * stride)
        return
    if head:
        yield from _rows(_Held(one.start, (*_along(head, step), *rest), one.holder), stride)
    middle = one.start + head * step
    yield from _rows(_Held(middle, ((groups, stride), (by, step), *rest), one.holder), stride)
    if tail := n - head - groups * by:
        yield from _rows(_Held(middle + groups * stride, (*_along(tail, step), *rest), one.holder), stride)
