"""Composition of regions: local → middle, then middle → canonical, without naming a single element.

The middle is any tensor that both maps refer to: the module's full parameter between a shard and the checkpoint, or the
canonical tensor itself between a trainer's shard and a receiver's placement. If strides divide each other, as they do
in every model seen so far, the result has as few regions as possible; otherwise it is exact and has more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from dcr_daemon.canonical.region import Axis, Region, intersect_dst, intersect_src, invert, merge


def compose(first: Region, second: Region) -> list[Region]:
    """Local places of `first` to canonical elements of `second`, wherever a middle element is in both.

    `first.dst` and `second.src` count elements of the same middle tensor; the result has the name of `second`.

    Raises:
        ValueError: a part of the result needs more axes than a region has.
    """
    if _is_run(first):  # most shards and most conversions are, and then one side is only cut
        pieces = intersect_src(second, first.dst, first.dst_last + 1)
        return [piece.shifted(src=first.src - first.dst) for piece in pieces]
    if _is_run(second):
        pieces = intersect_dst(first, second.src, second.src_last + 1)
        return [replace(piece, name=second.name, dst=piece.dst + second.dst - second.src) for piece in pieces]
    return list(_meet(first, second, []))


def _is_run(region: Region) -> bool:
    """Whether it is consecutive on both sides."""
    return not region.shape or (region.src_strides == (1,) and region.dst_strides == (1,))


def chain(first: Iterable[Region], second: Mapping[str, Sequence[Region]]) -> list[Region]:
    """`compose` of whole maps: each region of `first` with the regions that `second` has for the tensor it names.

    Elements that `second` does not mention are left out; `exactly_once` then reports them as missing.
    """
    return [
        piece
        for one in first
        for other in second.get(one.name, ())
        if one.dst <= other.src_last and other.src <= one.dst_last
        for piece in compose(one, other)
    ]


def _meet(a: Region, b: Region, done: list[Axis]) -> Iterator[Region]:
    """Finish the axis of the largest middle stride, or refine both sides until one can be finished."""
    if a.dst > b.src_last or b.src > a.dst_last:
        return
    top_a, top_b = _top(a, side=2), _top(b, side=1)
    if top_a is None:
        for point in intersect_src(b, a.dst, a.dst + 1):
            yield Region(b.name, (), a.src, (), point.dst, ()).with_axes(merge(done))
    elif top_b is None:
        for point in intersect_dst(a, b.src, b.src + 1):
            yield Region(b.name, (), point.src, (), b.dst, ()).with_axes(merge(done))
    elif top_a[2] == top_b[1]:
        yield from _same_stride(a, top_a, b=b, top_b=top_b, done=done)
    elif top_a[2] > top_b[1]:
        for wide, narrow in _refine(a, top_a, narrow=invert(b), top_n=_flip(top_b)):
            yield from _meet(wide, invert(narrow), done)
    else:
        for wide, narrow in _refine(invert(b), _flip(top_b), narrow=a, top_n=top_a):
            yield from _meet(narrow, invert(wide), done)


def _top(region: Region, *, side: int) -> Axis | None:
    """The axis of the largest stride on the middle side; none if the region is one element."""
    return max((axis for axis in region.axes if axis[0] > 1), key=lambda axis: axis[side], default=None)


def _flip(axis: Axis) -> Axis:
    n, src, dst = axis
    return n, dst, src


def _without(region: Region, top: Axis) -> Region:
    axes = list(region.axes)
    axes.remove(top)
    return region.with_axes(axes)


def _same_stride(a: Region, top_a: Axis, *, b: Region, top_b: Axis, done: list[Axis]) -> Iterator[Region]:
    """Both have the same largest stride: block i of one can meet block i + k of the other, for few k.

    Nested strides leave two k at most, and one where blocks are aligned.
    """
    (n_a, src, stride), (n_b, _, dst) = top_a, top_b
    a, b = _without(a, top_a), _without(b, top_b)
    lead = a.dst - b.src
    reach_a, reach_b = a.dst_last - a.dst, b.src_last - b.src
    for k in range(-((reach_b - lead) // stride), (reach_a + lead) // stride + 1):
        start, stop = max(0, -k), min(n_a, n_b - k)
        if start < stop:
            part = a.shifted(src=start * src, dst=start * stride)
            other = b.shifted(src=(start + k) * stride, dst=(start + k) * dst)
            yield from _meet(part, other, [*done, (stop - start, src, dst)])


def _refine(wide: Region, top_w: Axis, *, narrow: Region, top_n: Axis) -> Iterator[tuple[Region, Region]]:
    """Pairs that are nearer to a common top stride. Both have the middle as `dst`; `wide` has the larger stride there.

    The narrow top axis is grouped so that a group is one wide stride long and starts where a wide block does. If one
    stride does not divide the other, both are grouped to their least common multiple. What is too short to be grouped
    goes through the few wide blocks that it can meet, one by one.
    """
    n_w, src_w, stride_w = top_w
    n_n, _, stride_n = top_n
    common = math.lcm(stride_w, stride_n)
    by_w, by_n = common // stride_w, common // stride_n
    head = min(n_n, -(-((wide.dst - narrow.dst) % stride_w) // stride_n)) if by_w == 1 else 0
    if (by_w > 1 and n_w > by_w and n_n > by_n) or (by_w == 1 and n_n - head >= 2 * by_n):
        for part in _grouped(wide, top_w, head=0, by=by_w):
            for other in _grouped(narrow, top_n, head=head, by=by_n):
                yield part, other
        return
    block = _without(wide, top_w)
    reach = block.dst_last - block.dst
    first = max(0, -(-(narrow.dst - reach - block.dst) // stride_w))
    for i in range(first, min(n_w, (narrow.dst_last - block.dst) // stride_w + 1)):
        yield block.shifted(src=i * src_w, dst=i * stride_w), narrow


def _grouped(region: Region, top: Axis, *, head: int, by: int) -> Iterator[Region]:
    """The top axis in three: `head` places, whole groups of `by` as two axes, and what is left over."""
    if by == 1 and not head:
        yield region
        return
    n, src, dst = top
    rest = _without(region, top)
    groups, left = divmod(n - head, by)
    if head:
        yield rest.with_axes([(head, src, dst), *rest.axes])
    body = rest.shifted(src=head * src, dst=head * dst)
    yield body.with_axes([(groups, by * src, by * dst), (by, src, dst), *rest.axes])
    if left:
        tail = body.shifted(src=groups * by * src, dst=groups * by * dst)
        yield tail.with_axes([(left, src, dst), *rest.axes])
