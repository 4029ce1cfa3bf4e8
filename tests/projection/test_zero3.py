"""Flat partitions: each canonical element in one of them, at its place, whatever the parameter is made of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from regions import pairs

from dcr_daemon.canonical.coverage import exactly_once
from dcr_daemon.canonical.region import Region, indices, whole
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.titan import grouped_experts, rotary_rows
from dcr_daemon.projection.zero3 import flat_range, partition, persistent


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6), st.integers(1, 9))
def test_partitions_of_a_packed_parameter_cover_it_once(experts: int, rows: int, columns: int, world: int) -> None:
    names = [f"experts.{e}" for e in range(experts)]
    regions = grouped_experts(names, rows, columns)
    elements = experts * rows * columns
    size = -(-elements // world)
    all_pieces = []
    for rank in range(world):
        pieces = partition(regions, elements, rank, world)
        lo = rank * size
        assert pairs(pieces) == sorted((s - lo, d) for s, d in pairs(regions) if lo <= s < lo + size)
        all_pieces += pieces
    assert exactly_once(all_pieces, dict.fromkeys(names, (rows, columns))) == []


def test_partitions_of_a_permuted_parameter_are_few() -> None:
    regions = rotary_rows("q", heads=8, head_dim=16, columns=32)
    parts = [partition(regions, 8 * 16 * 32, rank, 3) for rank in range(3)]
    assert exactly_once([piece for part in parts for piece in part], {"q": (128, 32)}) == []
    assert max(map(len, parts)) <= 2 * 4


def test_aligned_partitions_leave_padding_out() -> None:
    assert [sum(p.elements for p in partition(whole("t", (10,)), 10, rank, 3, size=8)) for rank in range(3)] == [
        8,
        2,
        0,
    ]
    with pytest.raises(Incompatible, match="cannot hold"):
        partition(whole("t", (10,)), 10, 0, 3, size=2)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 4))
def test_ranges_of_one_flat_buffer_cover_all_its_parameters(sizes: list[int], world: int) -> None:
    buffer = [(whole(f"p{i}", (n,)), n) for i, n in enumerate(sizes)] + [([], 3)]
    total = sum(sizes) + 3
    step = -(-total // world)
    found: list[Region] = []
    for rank in range(world):
        pieces = flat_range(buffer, rank * step, min((rank + 1) * step, total))
        starts = {f"p{i}": sum(sizes[:i]) for i in range(len(sizes))}
        for piece in pieces:
            src, dst = indices(piece)
            assert (src + rank * step == dst + starts[piece.name]).all()
        found += pieces
    assert exactly_once(found, {f"p{i}": (n,) for i, n in enumerate(sizes)}) == []


def test_what_every_rank_keeps_whole_has_one_owner() -> None:
    owners = [rank for rank in range(4) if persistent(whole("norm", (8,)), rank, 4)]
    assert len(owners) == 1
