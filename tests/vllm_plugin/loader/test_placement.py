"""Rows say of every element exactly what the recorded copy did, however it was cut."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tensors.regions import dense_regions
from support.tensors.regions import pairs as pairs_of

from dcr_daemon.canonical.region import Region, indices, normalise
from dcr_daemon.vllm_plugin.calls import TensorHandling
from dcr_daemon.vllm_plugin.weights import placement
from dcr_daemon.vllm_plugin.weights.placement import (
    Copy,
    Placement,
    PlacementRow,
    Repack,
    Unplaceable,
    box_row,
    copy_region,
)


def pairs(regions: Iterable[Region]) -> dict[int, int]:
    """Canonical element -> place, by brute force."""
    listed = pairs_of(regions)
    assert len({element for _, element in listed}) == len(listed)
    return {element: place for place, element in listed}


def row_pairs(rows: list[PlacementRow]) -> dict[int, int]:
    out: dict[int, int] = {}
    for row in rows:
        elements = indices(row.region)[1]
        assert (np.diff(elements) > 0).all(), "a row's ordinals ascend in canonical order"
        assert not out.keys() & set(elements.tolist()), "rows do not overlap"
        out |= dict(zip(elements.tolist(), row.targets().tolist(), strict=True))
    return out


def rows_of(region: Region, *, offset: int = 0, repack: Repack | None = None) -> list[PlacementRow]:
    placed = Placement(held=[TensorHandling.PLACED])
    placed.add(
        Copy("p", copy_region("t", region.src, element=region.dst, axes=region.axes)),
        tensor=0,
        offset=offset,
        repack=repack,
    )
    return placed.rows


@settings(max_examples=300, deadline=None)
@given(dense_regions())
def test_rows_map_as_the_copy_did(region: Region) -> None:
    rows = rows_of(region, offset=100)
    assert row_pairs(rows) == {element: 100 + place for element, place in pairs([region]).items()}


@settings(max_examples=200, deadline=None)
@given(dense_regions(), st.integers(4, 40), st.integers(0, 5), st.randoms(use_true_random=False))
def test_rows_of_a_repacked_parameter_stay_inside_one_block(region: Region, block: int, padding: int, rng) -> None:
    live = block + padding
    table = np.array(rng.sample(range(live), block), dtype=np.uint32)
    rows = rows_of(region, offset=7, repack=Repack(block, live, table))
    wanted = {e: 7 + at // block * live + int(table[at % block]) for e, at in pairs([region]).items()}
    assert row_pairs(rows) == wanted


@settings(max_examples=200, deadline=None)
@given(dense_regions(), st.integers(2, 30))
def test_wide_copies_are_cut_until_places_fit(region: Region, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "WIDE", limit)
        rows = rows_of(region)
    for row in rows:
        assert max(row.region.dst_last - row.region.dst, row.region.src_last - row.region.src) < limit
    assert row_pairs(rows) == pairs([region])


@settings(max_examples=200, deadline=None)
@given(dense_regions(), dense_regions())
def test_identity_names_the_canonical_elements_and_nothing_else(one: Region, two: Region) -> None:
    same = sorted(pairs([one])) == sorted(pairs([two]))
    assert (box_row(normalise(one), 0) == box_row(normalise(two), 0)) == same


@pytest.mark.parametrize(
    ("shape", "src", "dst"),
    [((4,), (0,), (1,)), ((4,), (1,), (0,)), ((3, 3), (2, 1), (3, 1)), ((3, 3), (3, 1), (2, 1))],
    ids=["broadcast source", "broadcast target", "overlapping source", "overlapping target"],
)
def test_copies_that_are_no_bijection_are_refused(
    shape: tuple[int, ...], src: tuple[int, ...], dst: tuple[int, ...]
) -> None:
    with pytest.raises(Unplaceable):
        copy_region("t", 0, element=0, axes=zip(shape, dst, src, strict=True))


@settings(max_examples=100, deadline=None)
@given(dense_regions(most=7))
def test_a_copy_of_many_axes_becomes_boxes_and_rows_of_few(region: Region) -> None:
    placed = Placement(held=[TensorHandling.PLACED])
    placed.add(Copy("p", normalise(region)), tensor=0, offset=0, repack=None)
    assert all(len(row.region.shape) <= 4 for row in placed.rows)
    assert all(len(box.shape) <= 4 for box in placed.boxes)
    assert row_pairs(placed.rows) == pairs([region])
    sizes = [math.prod(box.shape) for box in placed.boxes]
    assert [sum(r.region.elements for r in placed.rows if r.box == n) for n in range(len(sizes))] == sizes


def test_a_copy_that_would_be_cut_without_end_is_refused() -> None:
    strides = (10**15, 10**12, 10**9, 10**6, 1000, 1)
    with pytest.raises(Unplaceable, match="6 axes, cut 8100 times"):
        rows_of(Region("t", (90,) * 6, 0, strides, 0, strides))


def test_shared_live_elements_are_found_and_neighbours_are_not() -> None:
    def with_second(dst: int, strides: tuple[int, ...]) -> list[tuple[int, int]]:
        both = Placement(held=[TensorHandling.PLACED, TensorHandling.PLACED])
        for tensor, region in enumerate([Region("a", (4, 2), 0, (4, 1), 0, (2, 1)),
                                         Region("b", (4, 2), dst, strides, 0, (2, 1))]):  # fmt: skip
            both.add(Copy("p", region), tensor=tensor, offset=0, repack=None)
        return list(both.overlaps())

    assert with_second(2, (4, 1)) == [], "interleaved columns share no element"
    assert with_second(16, (4, 1)) == []
    assert len(with_second(1, (4, 1))) == 1
