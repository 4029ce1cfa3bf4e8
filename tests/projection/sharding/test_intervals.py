"""Intervals: what mesh dimensions leave to a rank, against cutting index tensors the way frameworks do."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tensors.regions import pairs

from dcr_daemon.canonical.coverage import exactly_once
from dcr_daemon.canonical.region import Region
from dcr_daemon.projection.sharding.intervals import Cut, intervals, local_shape, shard


def chunk(row: np.ndarray, ways: int, at: int) -> np.ndarray:
    """torch.chunk's pieces, as many as asked for: the last ones may be empty."""
    size = -(-row.size // ways)
    return row[at * size : (at + 1) * size]


def numbers(held: list[tuple[int, int]]) -> list[int]:
    return [i for lo, hi in held for i in range(lo, hi)]


@given(st.integers(0, 40), st.integers(1, 7))
def test_an_ordinary_cut_is_a_chunk(size: int, ways: int) -> None:
    for at in range(ways):
        assert numbers(intervals(size, [Cut(0, ways, at)])) == chunk(np.arange(size), ways, at).tolist()


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 5))
def test_fsdp_over_tensor_parallelism_cuts_the_inner_mesh_dimension_first(size: int, dp: int, tp: int) -> None:
    for d, t in itertools.product(range(dp), range(tp)):
        held = intervals(size, [Cut(0, dp, d, groups=tp), Cut(0, tp, t)])
        assert numbers(held) == chunk(chunk(np.arange(size), tp, t), dp, d).tolist()


@given(st.integers(0, 12), st.integers(2, 4), st.integers(1, 4))
def test_a_packed_cut_takes_its_chunk_of_every_part(part: int, groups: int, ways: int) -> None:
    row = np.arange(part * groups)
    for at in range(ways):
        wanted = [i for group in row.reshape(groups, part) for i in chunk(group, ways, at)]
        assert numbers(intervals(row.size, [Cut(0, ways, at, groups=groups)])) == wanted


@given(st.integers(0, 10), st.integers(1, 3), st.integers(1, 3))
def test_fsdp_over_a_packed_cut(part: int, dp: int, tp: int) -> None:
    row = np.arange(2 * part)
    for d, t in itertools.product(range(dp), range(tp)):
        mine = np.concatenate([chunk(half, tp, t) for half in row.reshape(2, part)])
        held = intervals(row.size, [Cut(0, dp, d, groups=tp), Cut(0, tp, t, groups=2)])
        assert numbers(held) == chunk(mine, dp, d).tolist()


def test_uneven_fsdp_over_tensor_parallelism_where_one_offset_cannot_say_it() -> None:
    """13 rows over dp 3 x tp 2: rank (2, 1) holds rows 11 and 12, although chunks of 13 over 6 would say row 12."""
    held = {(d, t): numbers(intervals(13, [Cut(0, 3, d, groups=2), Cut(0, 2, t)])) for d in range(3) for t in range(2)}
    assert held[0, 1] == [7, 8]
    assert held[2, 0] == [6]
    assert held[2, 1] == [11, 12]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.data())
def test_a_shard_is_the_local_tensor_read_in_order(shape: list[int], data: st.DataObject) -> None:
    mesh = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    axes = [data.draw(st.integers(0, len(shape) - 1)) for _ in mesh]
    groups = [data.draw(st.sampled_from([1, 1, 2])) for _ in mesh]
    whole = np.arange(math.prod(shape)).reshape(shape)
    regions: list[Region] = []
    for coordinate in itertools.product(*map(range, mesh)):
        cuts = [Cut(a, w, at, g) for a, w, at, g in zip(axes, mesh, coordinate, groups, strict=True)]
        local = whole
        for axis, size in enumerate(shape):
            local = local.take(numbers(intervals(size, [cut for cut in cuts if cut.axis == axis])), axis)
        mine = shard("t", shape, cuts)
        assert pairs(mine) == [(i, int(f)) for i, f in enumerate(local.ravel())]
        assert local_shape(shape, cuts) == local.shape
        regions += mine
    assert exactly_once(regions, {"t": shape}) == []


@pytest.mark.parametrize(("cuts", "count"), [([Cut(0, 4, 1, groups=2)], 1), ([Cut(0, 2, 1), Cut(1, 2, 0)], 1)])
def test_even_cuts_are_one_region(cuts: list[Cut], count: int) -> None:
    assert len(shard("t", (16, 6), cuts)) == count
