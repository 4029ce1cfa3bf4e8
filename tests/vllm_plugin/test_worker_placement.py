"""Rows say of every element exactly what the recorded copy did, however it was cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr_daemon.vllm_plugin import placement
from dcr_daemon.vllm_plugin.calls import Held
from dcr_daemon.vllm_plugin.placement import Piece, Placement, Repack, Unplaceable, identity, rows_of, simplify


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    """A strided view of one tensor onto a strided view of another, axes in any order."""
    rank = draw(st.integers(1, 4))
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=rank, max_size=rank)))
    order = draw(st.permutations(range(rank)))
    other = draw(st.permutations(range(rank)))

    def strides(axes: list[int]) -> tuple[int, ...]:
        out, step = [0] * rank, draw(st.integers(1, 3))
        for axis in reversed(axes):
            out[axis] = step
            step *= shape[axis] + draw(st.integers(0, 2))
        return tuple(out)

    return Piece("t", draw(st.integers(0, 9)), shape, strides(order), "p", draw(st.integers(0, 9)), strides(other))


def pairs(piece: Piece) -> dict[int, int]:
    """Canonical element -> place, by brute force."""
    index = np.indices(piece.shape).reshape(len(piece.shape), -1)
    src = piece.src + (index.T * piece.src_strides).sum(axis=1)
    dst = piece.dst + (index.T * piece.dst_strides).sum(axis=1)
    return dict(zip(src.tolist(), dst.tolist(), strict=True))


def row_pairs(rows: list[placement.Row]) -> dict[int, int]:
    out: dict[int, int] = {}
    for row in rows:
        canonical = np.zeros(row.shape, dtype=np.int64) + row.start
        for axis, (n, stride) in enumerate(zip(row.shape, row.src_strides, strict=True)):
            canonical += (np.arange(n) * stride).reshape([-1 if a == axis else 1 for a in range(len(row.shape))])
        flat = canonical.reshape(-1)
        assert row.last == flat.max()
        assert (np.diff(flat) > 0).all(), "a row's ordinals ascend in canonical order"
        assert not out.keys() & set(flat.tolist()), "rows do not overlap"
        out |= dict(zip(flat.tolist(), row.targets().tolist(), strict=True))
    return out


@settings(max_examples=300, deadline=None)
@given(pieces())
def test_rows_map_as_the_copy_did(piece: Piece) -> None:
    rows = rows_of(simplify(piece), tensor=0, box=0, offset=100, repack=None)
    assert row_pairs(rows) == {src: 100 + dst for src, dst in pairs(piece).items()}


@settings(max_examples=200, deadline=None)
@given(pieces(), st.integers(4, 40), st.integers(0, 5), st.randoms(use_true_random=False))
def test_rows_of_a_repacked_parameter_stay_inside_one_block(piece: Piece, block: int, padding: int, rng) -> None:
    live = block + padding
    table = np.array(rng.sample(range(live), block), dtype=np.uint32)
    rows = rows_of(simplify(piece), tensor=0, box=0, offset=7, repack=Repack(block, live, table))
    wanted = {src: 7 + dst // block * live + int(table[dst % block]) for src, dst in pairs(piece).items()}
    assert row_pairs(rows) == wanted


@settings(max_examples=200, deadline=None)
@given(pieces(), st.integers(2, 30))
def test_wide_copies_are_cut_until_places_fit(piece: Piece, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "WIDE", limit)
        rows = rows_of(simplify(piece), tensor=0, box=0, offset=0, repack=None)
        assert all(row.last - row.start < limit and row.reach[1] - row.reach[0] < limit for row in rows)
    assert row_pairs(rows) == pairs(piece)


@settings(max_examples=200, deadline=None)
@given(pieces(), pieces())
def test_identity_names_the_canonical_elements_and_nothing_else(one: Piece, two: Piece) -> None:
    same = sorted(pairs(one)) == sorted(pairs(two))
    if same:
        assert identity(one, 0) == identity(two, 0)
    if identity(one, 0) == identity(two, 0):
        assert same


@pytest.mark.parametrize(
    ("shape", "src", "dst"),
    [((4,), (0,), (1,)), ((4,), (1,), (0,)), ((3, 3), (2, 1), (3, 1)), ((0,), (1,), (1,))],
    ids=["broadcast source", "broadcast target", "overlapping source", "empty"],
)
def test_copies_that_are_no_bijection_are_refused(
    shape: tuple[int, ...], src: tuple[int, ...], dst: tuple[int, ...]
) -> None:
    with pytest.raises(Unplaceable):
        simplify(Piece("t", 0, shape, src, "p", 0, dst))


def test_more_axes_than_the_format_has_are_refused() -> None:
    strides = (20000, 2000, 200, 20, 2)
    with pytest.raises(Unplaceable, match="5 axes"):
        rows_of(simplify(Piece("t", 0, (2,) * 5, strides, "p", 0, strides)), tensor=0, box=0, offset=0, repack=None)


def test_shared_live_elements_are_found_and_neighbours_are_not() -> None:
    def with_second(dst: int, strides: tuple[int, ...]) -> list[tuple[int, int]]:
        both = Placement(held=[Held.PLACED, Held.PLACED])
        both.add(Piece("a", 0, (4, 2), (2, 1), "p", 0, (4, 1)), tensor=0, offset=0, repack=None)
        both.add(Piece("b", 0, (4, 2), (2, 1), "p", dst, strides), tensor=1, offset=0, repack=None)
        return list(both.overlaps())

    assert with_second(2, (4, 1)) == [], "interleaved columns share no element"
    assert with_second(16, (4, 1)) == []
    assert len(with_second(1, (4, 1))) == 1
