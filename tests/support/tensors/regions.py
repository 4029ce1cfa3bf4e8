"""Regions as hypothesis draws them, and the plain lists of pairs that they stand for."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st

from dcr_daemon.canonical.region import Region, indices, row_major


def pairs(regions: Iterable[Region]) -> list[tuple[int, int]]:
    """Every (local place, canonical element), sorted; a pair that two regions name occurs twice."""
    return sorted((int(s), int(d)) for region in regions for s, d in zip(*indices(region), strict=True))


@st.composite
def loose_regions(draw: st.DrawFn, *, least: int = 0, most: int = 4, name: str = "t") -> Region:
    """Any region at all: strides may interlock and elements may meet."""
    rank = draw(st.integers(least, most))
    extents = st.integers(1, 4 if rank <= 4 else 2)
    shape = tuple(draw(extents) for _ in range(rank))
    src_strides, dst_strides = (tuple(draw(st.integers(1, 20)) for _ in range(rank)) for _ in range(2))
    return Region(name, shape, draw(st.integers(0, 20)), src_strides, draw(st.integers(0, 20)), dst_strides)


@st.composite
def dense_regions(draw: st.DrawFn, *, name: str = "t", most: int = 4) -> Region:
    """A rectangular piece of a dense tensor on either side, with the axes in any order on the two sides."""
    rank = draw(st.integers(1, most))
    shape = tuple(draw(st.integers(1, 4)) for _ in range(rank))
    strides, offsets = [], []
    for _ in range(2):
        order = draw(st.permutations(range(rank)))
        room = [shape[a] + draw(st.integers(0, 2)) for a in order]
        start = [draw(st.integers(0, size - shape[a])) for a, size in zip(order, room, strict=True)]
        dense = row_major(room)
        of_axis = dict(zip(order, dense, strict=True))
        strides.append(tuple(of_axis[a] for a in range(rank)))
        offsets.append(sum(a * s for a, s in zip(start, dense, strict=True)))
    return Region(name, shape, offsets[0], strides[0], offsets[1], strides[1])
