"""Regions: every operation against index tensors."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tensors.regions import dense_regions, loose_regions, pairs

from dcr_daemon.canonical.box import MAX_RANK
from dcr_daemon.canonical.region import (
    Region,
    boxes,
    digest,
    indices,
    intersect_dst,
    intersect_src,
    invert,
    normalise,
    restrict,
    slab,
    whole,
    wire_pieces,
)


@given(loose_regions())
def test_normal_form_keeps_every_pair_and_orders_them_by_canonical_element(region: Region) -> None:
    normal = normalise(region)
    assert pairs([normal]) == pairs([region])
    assert normalise(normal) == normal
    assert all(n > 1 for n in normal.shape)
    assert list(normal.dst_strides) == sorted(normal.dst_strides, reverse=True)


@given(dense_regions())
def test_the_order_of_a_normal_piece_of_a_dense_tensor_is_canonical(region: Region) -> None:
    _, dst = indices(normalise(region))
    assert (np.diff(dst) > 0).all()


@given(loose_regions())
def test_inverting_twice_is_nothing(region: Region) -> None:
    assert invert(invert(region)) == region
    assert pairs([invert(region)]) == sorted((dst, src) for src, dst in pairs([region]))


@given(loose_regions(least=1), st.data())
def test_restrict_keeps_an_interval_of_one_axis(region: Region, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, len(region.shape) - 1))
    lo, hi = data.draw(st.integers(-2, 6)), data.draw(st.integers(-2, 6))
    src, dst = (side.reshape(region.shape) for side in indices(region))
    at = tuple(slice(max(lo, 0), max(hi, 0)) if a == axis else slice(None) for a in range(len(region.shape)))
    assert pairs(restrict(region, axis, lo=lo, hi=hi)) == sorted(zip(src[at].ravel(), dst[at].ravel(), strict=True))


@given(loose_regions(), st.integers(0, 80), st.integers(0, 80))
def test_a_flat_range_of_either_side_keeps_exactly_what_lies_in_it(region: Region, lo: int, hi: int) -> None:
    assert pairs(intersect_src(region, lo, hi)) == [pair for pair in pairs([region]) if lo <= pair[0] < hi]
    assert pairs(intersect_dst(region, lo, hi)) == [pair for pair in pairs([region]) if lo <= pair[1] < hi]


@given(dense_regions(), st.integers(0, 200), st.integers(0, 200))
def test_a_flat_range_of_a_dense_tensor_is_at_most_two_regions_per_axis(region: Region, lo: int, hi: int) -> None:
    assert len(intersect_src(region, lo, hi)) <= max(1, 2 * len(region.shape))
    assert len(intersect_dst(region, lo, hi)) <= max(1, 2 * len(region.shape))


@settings(deadline=None)  # the first one compiles
@given(loose_regions(most=8))
def test_boxes_name_the_same_elements_in_the_same_order(region: Region) -> None:
    pieces = wire_pieces(region)
    assert pairs(pieces) == pairs([region])
    for piece, box in zip(pieces, boxes(region), strict=True):
        assert len(box.shape) <= MAX_RANK
        assert box.canonical(np.arange(box.elements, dtype=np.int64)).tolist() == indices(piece)[1].tolist()


def test_a_box_merges_what_only_the_local_side_keeps_apart() -> None:
    transposed = Region("t", (3, 5), 0, (1, 3), 0, (5, 1))
    assert [box.contiguous for box in boxes(transposed)] == [True]


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=4))
def test_a_slab_is_the_slice_that_numpy_takes(axes: list[tuple[int, int, int]]) -> None:
    shape = tuple(n for n, _, _ in axes)
    starts = tuple(min(a, n) for n, a, _ in axes)
    sizes = tuple(min(k, n - a) for (n, _, k), a in zip(axes, starts, strict=True))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    wanted = numbers[tuple(slice(a, a + k) for a, k in zip(starts, sizes, strict=True))].ravel()
    assert pairs(slab("t", shape, starts=starts, sizes=sizes, src=7)) == [(7 + i, int(f)) for i, f in enumerate(wanted)]


def test_a_slab_outside_its_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="does not lie inside"):
        slab("t", (4, 4), starts=(2, 0), sizes=(3, 4))


def test_scalars_and_empty_tensors() -> None:
    assert pairs(whole("t", ())) == [(0, 0)]
    assert whole("t", (3, 0)) == []
    assert [box.elements for box in boxes(Region("t", (), 0, (), 5, ()))] == [1]


@pytest.mark.parametrize(
    "bad",
    [
        ((2,), 0, (0,), 0, (1,)),
        ((0,), 0, (1,), 0, (1,)),
        ((2,), -1, (1,), 0, (1,)),
        ((2,), 0, (1, 1), 0, (1,)),
        ((1,) * 9, 0, (1,) * 9, 0, (1,) * 9),
    ],
)
def test_what_no_memory_view_could_say_is_refused(
    bad: tuple[tuple[int, ...], int, tuple[int, ...], int, tuple[int, ...]],
) -> None:
    with pytest.raises(ValueError, match="a region has"):
        Region("t", *bad)


@given(st.permutations([Region("a", (2, 3), 0, (3, 1), 0, (3, 1)), Region("b", (4,), 9, (1,), 0, (2,))]))
def test_a_digest_sees_regions_and_not_their_spelling(regions: list[Region]) -> None:
    spelt = {"local": [Region("a", (6,), 0, (1,), 0, (1,)), Region("b", (4, 1), 9, (1, 5), 0, (2, 5))]}
    assert digest({"local": regions}) == digest(spelt)
    assert digest({"other": regions}) != digest(spelt)
    assert digest({"local": [regions[0], regions[1].shifted(src=1)]}) != digest(spelt)
