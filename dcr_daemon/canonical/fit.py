"""Regions from index lists: what an export, a loader or an adapter did, found by following where numbers went."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dcr_daemon.canonical.region import Axis, Indices, Region, normalise
from dcr_daemon.errors import Incompatible

CANDIDATES = 4  #: steps tried per level; the right one is among the most frequent
MAX_REGIONS = 4096  #: of one pair of tensors; what needs more is no strided layout


@dataclass(frozen=True, slots=True)
class _Runs:
    """Equal boxes at several places: `axes` of each, and where each begins on either side, by rising `dst`."""

    axes: tuple[Axis, ...]
    src: Indices
    dst: Indices


def fit(name: str, src: Indices, dst: Indices, *, limit: int = MAX_REGIONS) -> list[Region]:
    """Regions that pair `src[i]` with `dst[i]`, each pair once and no other.

    Always exact; the number of regions is the least for what one strided box can say, and small for few boxes.

    Args:
        src: local places (int64), in any order.
        dst: canonical elements (int64), each once.

    Raises:
        Incompatible: more than `limit` regions.
        ValueError: the lists differ in length, or an element of `dst` occurs twice.
    """
    if src.shape != dst.shape or src.ndim != 1:
        raise ValueError(f"{name}: {src.shape} places for {dst.shape} elements")
    steps = np.diff(dst)
    if (steps <= 0).any():
        order = np.argsort(dst, kind="stable")
        src, dst = src[order], dst[order]
        if (np.diff(dst) == 0).any():
            raise ValueError(f"{name}: a canonical element occurs twice")
    waiting, done = ([_Runs((), src, dst)] if src.size else []), []
    while waiting:
        runs = waiting.pop()
        risen = _rise(runs) if runs.src.size > 1 else None
        if risen is None:
            done += [_region(name, runs, i) for i in range(runs.src.size)]
        else:
            waiting += risen
        if len(done) + len(waiting) > limit:
            raise Incompatible(
                f"{name} is not a strided layout: more than {limit} boxes",
                hint="it can only be published by the residual export",
            )
    return sorted(done, key=lambda region: region.dst)


def _rise(runs: _Runs) -> list[_Runs] | None:
    """Add one axis: the step between neighbours that leaves the fewest kinds of runs, then the fewest runs.

    `None` if no step occurs twice and there are more than two boxes: an axis would gain nothing.
    """
    steps = np.stack([np.diff(runs.src), np.diff(runs.dst)], 1)
    kinds, of_step, counts = np.unique(steps, axis=0, return_inverse=True, return_counts=True)
    of_step = of_step.reshape(-1)
    best: tuple[tuple[int, int], list[_Runs]] | None = None
    for kind in np.argsort(-counts, kind="stable")[:CANDIDATES]:
        if kinds[kind][0] <= 0 or (counts[kind] == 1 and runs.src.size > 2):
            continue
        starts, lengths = _even(np.concatenate([[0], np.flatnonzero(of_step != kind) + 1]), runs.src.size)
        shapes = np.unique(lengths)
        if best is None or (shapes.size, starts.size) < best[0]:
            axis = (int(kinds[kind][0]), int(kinds[kind][1]))
            best = (
                (shapes.size, starts.size),
                [
                    _Runs(((int(n), *axis), *runs.axes), runs.src[starts[lengths == n]], runs.dst[starts[lengths == n]])
                    for n in shapes
                ],
            )
    return best[1] if best else None


def _even(starts: Indices, size: int) -> tuple[Indices, Indices]:
    """Starts and lengths of runs, cut to their common divisor if they have one.

    Two rows that happen to lie behind one another look like one long row among short ones (the last row of a rotary
    head and the first of the next); cut, all rows are equal again, and a longer run joins up one level higher.
    """
    lengths = np.diff(np.append(starts, size))
    common = int(np.gcd.reduce(lengths))
    if common == 1 or (lengths == common).all():
        return starts, lengths
    cut = np.concatenate([np.arange(s, s + n, common) for s, n in zip(starts, lengths, strict=True)])
    return cut, np.full(cut.size, common)


def _region(name: str, runs: _Runs, i: int) -> Region:
    """Box number i. Before they are merged, its axes may be more than a region takes."""
    shape, src_strides, dst_strides = tuple(zip(*(a for a in runs.axes if a[0] > 1), strict=True)) or ((), (), ())
    return normalise(Region(name, shape, int(runs.src[i]), src_strides, int(runs.dst[i]), dst_strides))
