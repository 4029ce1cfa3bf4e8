"""The part of a tensor that a rank holds, computed from how mesh dimensions cut it. Pure arithmetic; no torch.

torch's own answer (`compute_local_shape_and_global_offset`) is wrong for a packed dimension and for uneven FSDP over
TP, because it has one offset per tensor where the rank holds several intervals. Here a rank holds a list of intervals
per tensor axis, and the cuts are applied in the order in which the data were really cut:

    an ordinary cut      the list, as one row, in `ways` chunks of ceil(n / ways); the last ones short or empty
    a packed cut         `groups` equal parts (gate and up, say), each cut so; the rank holds its chunk of every part
    a deferred cut       FSDP over TP on one axis: TP cuts first although its mesh dimension comes later
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dcr_daemon.canonical.region import Axis, Region, normalise, row_major

Intervals = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Cut:
    """How one mesh dimension cuts a tensor: `axis` in `ways` parts, of which this rank holds number `at`.

    `groups` > 1 says that the axis was already in that many parts (DTensor's `_StridedShard` and its split factor).
    """

    axis: int
    ways: int
    at: int
    groups: int = 1


def intervals(size: int, cuts: Sequence[Cut]) -> Intervals:
    """Global index intervals [lo, hi) that a rank holds of an axis of `size`, in the order of its local tensor.

    Args:
        cuts: those of this axis, in mesh order.
    """
    held: Intervals = [(0, size)] if size else []
    for cut, packed in _in_order(cuts):
        total = sum(hi - lo for lo, hi in held)
        if packed:
            group = -(-total // cut.groups)
            parts = [(min(g * group, total), min((g + 1) * group, total)) for g in range(cut.groups)]
        else:
            parts = [(0, total)]
        held = [piece for part in parts for piece in _take(held, *_chunk(part, cut))]
    return _joined(held)


def _in_order(cuts: Sequence[Cut]) -> list[tuple[Cut, bool]]:
    """Cuts in the order of cutting, and whether each is packed.

    A grouped cut whose groups are exactly the later cuts of its axis was made after them: FSDP over TP. Such cuts come
    last, the innermost mesh dimension first. Any other grouped cut is packed.
    """
    now, deferred = [], []
    for i, cut in enumerate(cuts):
        later = math.prod(other.ways for other in cuts[i + 1 :])
        if cut.groups > 1 and i + 1 < len(cuts) and cut.groups == later:
            deferred.append((cut, False))
        else:
            now.append((cut, cut.groups > 1))
    return now + deferred[::-1]


def _chunk(part: tuple[int, int], cut: Cut) -> tuple[int, int]:
    """This rank's chunk of a part, as torch.chunk cuts it."""
    lo, hi = part
    size = -(-(hi - lo) // cut.ways)
    return min(lo + cut.at * size, hi), min(lo + (cut.at + 1) * size, hi)


def _take(held: Intervals, lo: int, hi: int) -> Intervals:
    """Places [lo, hi) of the concatenation of `held`."""
    taken, passed = [], 0
    for a, b in held:
        start, stop = max(lo - passed, 0), min(hi - passed, b - a)
        if start < stop:
            taken.append((a + start, a + stop))
        passed += b - a
    return taken


def _joined(held: Intervals) -> Intervals:
    """Neighbours that continue each other made one."""
    joined: Intervals = []
    for lo, hi in held:
        if joined and joined[-1][1] == lo:
            joined[-1] = joined[-1][0], hi
        else:
            joined.append((lo, hi))
    return joined


def local_shape(shape: Sequence[int], cuts: Sequence[Cut]) -> tuple[int, ...]:
    """Shape of the rank's local tensor."""
    return tuple(sum(hi - lo for lo, hi in held) for held in _by_axis(shape, cuts))


def shard(name: str, shape: Sequence[int], cuts: Sequence[Cut]) -> list[Region]:
    """Regions of the rank's dense local tensor in a tensor of `shape`; none if it holds nothing.

    Args:
        cuts: of all axes, in mesh order; mesh dimensions that replicate have none.
    """
    held = _by_axis(shape, cuts)
    local = row_major([sum(hi - lo for lo, hi in one) for one in held])
    strides = row_major(shape)
    per_axis = [_steps(one, src, dst) for one, src, dst in zip(held, local, strides, strict=True)]
    return [
        normalise(
            Region(name, (), sum(start[0] for start in starts), (), sum(start[1] for start in starts), ()).with_axes(
                axis for _, _, axes in starts for axis in axes
            )
        )
        for starts in itertools.product(*per_axis)
    ]


def _by_axis(shape: Sequence[int], cuts: Sequence[Cut]) -> list[Intervals]:
    return [intervals(size, [cut for cut in cuts if cut.axis == axis]) for axis, size in enumerate(shape)]


def _steps(held: Intervals, src: int, dst: int) -> list[tuple[int, int, list[Axis]]]:
    """Intervals of one axis as (local start, canonical start, axes): one entry if they are equal and evenly spaced."""
    sizes, gaps = {hi - lo for lo, hi in held}, {b - a for (a, _), (b, _) in itertools.pairwise(held)}
    if len(held) > 1 and len(sizes) == len(gaps) == 1:
        (size,), (gap,) = sizes, gaps
        return [(0, held[0][0] * dst, [(len(held), size * src, gap * dst), (size, src, dst)])]
    starts = itertools.accumulate((hi - lo for lo, hi in held), initial=0)
    return [(at * src, lo * dst, [(hi - lo, src, dst)]) for at, (lo, hi) in zip(starts, held, strict=False)]
