"""Composition: the pairs that two maps make together, and few regions where layouts are real ones."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tensors.regions import dense_regions, loose_regions, pairs

from dcr_daemon.canonical.compose import chain, compose
from dcr_daemon.canonical.region import Region, indices, invert, slab, whole


def joined(first: Region, second: Region) -> list[tuple[int, int]]:
    return sorted((s, c) for s, m in pairs([first]) for n, c in pairs([second]) if m == n)


@settings(max_examples=400)
@given(loose_regions(), loose_regions())
def test_any_two_regions_compose_to_the_pairs_that_meet(first: Region, second: Region) -> None:
    assert pairs(compose(first, second)) == joined(first, second)


@settings(max_examples=400)
@given(dense_regions(), dense_regions(name="canonical"))
def test_pieces_of_dense_tensors_compose_exactly(first: Region, second: Region) -> None:
    composed = compose(first, second)
    assert pairs(composed) == joined(first, second)
    assert {piece.name for piece in composed} <= {"canonical"}


@given(dense_regions())
def test_there_and_back_is_the_same_place(region: Region) -> None:
    back = compose(region, invert(region))
    places, _ = indices(region)
    assert pairs(back) == [(int(p), int(p)) for p in np.sort(places)]


def test_a_row_shard_of_a_packed_gate_up_is_one_region_per_half() -> None:
    experts, inner, hidden = 8, 6, 5
    fused = {
        "fused": [
            Region(f"{e}.{half}", (inner * hidden,), (e * 2 + h) * inner * hidden, (1,), 0, (1,))
            for e in range(experts)
            for h, half in enumerate(("gate", "up"))
        ]
    }
    mine = slab("fused", (experts, 2 * inner, hidden), starts=(2, 0, 0), sizes=(3, 2 * inner, hidden))
    assert sorted(piece.name for piece in chain(mine, fused)) == [f"{e}.{h}" for e in (2, 3, 4) for h in ("gate", "up")]


def test_a_column_shard_of_a_transposed_tensor_is_one_region() -> None:
    rows, columns = 1 << 20, 1 << 12
    transposed = Region("c", (columns, rows), 0, (1, columns), 0, (rows, 1))
    shard = slab("m", (rows, columns), starts=(0, 1024), sizes=(rows, 512))
    (piece,) = chain(shard, {"m": [transposed]})
    assert piece.elements == rows * 512
    assert (piece.dst, piece.shape, piece.dst_strides) == (1024 * rows, (512, rows), (rows, 1))


def test_what_the_second_map_does_not_mention_has_no_image() -> None:
    assert chain(whole("known", (4,)) + whole("other", (4,)), {"known": whole("c", (3,))}) == whole("c", (3,))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 9), st.integers(2, 9))
def test_strides_that_do_not_divide_each_other_are_exact_too(n: int, m: int, s: int, t: int) -> None:
    first, second = Region("m", (n,), 0, (1,), 3, (s,)), Region("c", (m,), 1, (t,), 0, (1,))
    assert pairs(compose(first, second)) == joined(first, second)
