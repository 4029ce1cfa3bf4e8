"""Strided elements out of a source that reads consecutive ones: the right ones, no more memory than promised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr_daemon.canonical import gather as module
from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.gather import Fill, gather, gather_box
from dcr_daemon.canonical.region import Region, indices

SHAPE = (6, 4, 10)


def from_array(source: Any, sizes: list[int] | None = None) -> Fill:
    """Reads an array; notes how many elements each read had."""

    def fill(first: int, out: Any) -> None:
        assert out.ndim == 1
        assert out.flags.c_contiguous
        assert first + out.size <= source.size
        if sizes is not None:
            sizes.append(out.size)
        out[...] = source[first : first + out.size]

    return fill


@st.composite
def regions(draw: Any) -> Region:
    """A slab of a tensor of `SHAPE` to a dense array, the axes in any order on the other side."""
    starts = [draw(st.integers(0, n - 1)) for n in SHAPE]
    shape = [draw(st.integers(1, n - a)) for n, a in zip(SHAPE, starts, strict=True)]
    order = draw(st.permutations(range(3)))
    dense = {axis: int(np.prod([shape[a] for a in order[i + 1 :]])) for i, axis in enumerate(order)}
    src = sum(a * s for a, s in zip(starts, (40, 10, 1), strict=True))
    return Region("", tuple(shape), src, (40, 10, 1), draw(st.integers(0, 3)), tuple(dense[a] for a in range(3)))


@settings(deadline=None)
@given(
    regions(), st.sampled_from([0, 4, 16, 1 << 20]), st.sampled_from([1, 40, 1 << 20]), st.sampled_from([3, 60, 240])
)
def test_a_region_s_elements_go_to_their_places_and_no_others_change(
    region: Region, gap: int, rows: int, scratch: int
) -> None:
    source = np.arange(1000, 1240, dtype=np.uint16)
    out = np.full(region.dst_last + 3, 7, dtype=np.uint16)
    wanted = out.copy()
    places, targets = indices(region)
    wanted[targets] = source[places]
    sizes: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "GAP", gap)
        patch.setattr(module, "ROWS", rows)
        patch.setattr(module, "SCRATCH", scratch)
        gather(from_array(source, sizes), region, out)
    assert np.array_equal(out, wanted)


def test_consecutive_elements_are_read_into_their_places_at_once() -> None:
    sizes: list[int] = []
    out = np.zeros(100, dtype=np.uint16)
    gather_box(from_array(np.arange(500, dtype=np.uint16), sizes), Box.flat(300, 100), out=out)
    assert sizes == [100]
    assert np.array_equal(out, np.arange(300, 400))


def test_rows_far_apart_are_read_one_by_one() -> None:
    sizes: list[int] = []

    def fill(first: int, out: Any) -> None:
        assert (first - 5) % (1 << 20) == 0
        sizes.append(out.size)

    gather_box(fill, Box(5, (1000, 8), (1 << 20, 1)), out=np.zeros(8000, dtype=np.uint16))
    assert sizes == [8] * 1000


def test_rows_close_together_are_read_with_what_is_between_them() -> None:
    source, sizes = np.arange(64 * 4096, dtype=np.uint16), list[int]()
    out = np.empty(64 * 8, dtype=np.uint16)
    gather_box(from_array(source, sizes), Box(5, (64, 8), (4096, 1)), out=out)
    assert sizes == [63 * 4096 + 8]
    assert np.array_equal(out.reshape(64, 8), source.reshape(64, 4096)[:, 5:13])


def test_no_read_is_larger_than_the_scratch_memory() -> None:
    sizes: list[int] = []
    turned = Region("", (3000, 3000), 0, (3000, 1), 0, (1, 3000))
    gather(lambda first, out: sizes.append(out.size), turned, np.empty(9_000_000, dtype=np.uint8))
    assert max(sizes) <= module.SCRATCH
    assert sum(sizes) == 9_000_000
