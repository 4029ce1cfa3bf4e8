"""Boxes: bounds against a tensor, injectivity, ordinals to canonical elements."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr_daemon.canonical.box import Box


def elements_of(box: Box) -> list[int]:
    """Canonical elements in row-major order, the slow and obvious way."""
    axes = [range(n) for n in box.shape]
    return [box.dst + sum(i * s for i, s in zip(at, box.strides, strict=True)) for at in itertools.product(*axes)]


boxes = st.integers(1, 4).flatmap(
    lambda rank: st.builds(
        Box,
        st.integers(0, 40),
        st.tuples(*[st.integers(1, 4)] * rank),
        st.tuples(*[st.integers(1, 30)] * rank),
    )
)


@settings(deadline=None)  # the first one compiles
@given(boxes)
def test_ordinals_name_elements_in_row_major_order(box: Box) -> None:
    slow = elements_of(box)
    assert box.canonical(np.arange(box.elements, dtype=np.int64)).tolist() == slow
    assert box.last == max(slow)
    assert box.elements == len(slow)


@given(boxes, st.integers(0, 200))
def test_a_box_that_fits_is_inside_and_visits_nothing_twice(box: Box, elements: int) -> None:
    slow = elements_of(box)
    if box.fits(elements):
        assert max(slow) < elements
        assert len(set(slow)) == len(slow)
    else:
        by_stride = sorted((s, n) for s, n in zip(box.strides, box.shape, strict=True) if n > 1)
        nested = all(s > sum((n - 1) * t for t, n in by_stride[:i]) for i, (s, _) in enumerate(by_stride))
        assert max(slow) >= elements or not nested


@pytest.mark.parametrize("strides", list(itertools.permutations((1, 3, 12))))
def test_every_transposition_of_a_dense_tensor_fits(strides: tuple[int, ...]) -> None:
    sizes = {1: 3, 3: 4, 12: 5}
    box = Box(0, tuple(sizes[s] for s in strides), strides)
    assert box.fits(60)
    assert not box.fits(59)
    assert sorted(elements_of(box)) == list(range(60))


def test_elements_beyond_32_bits() -> None:
    columns = Box(5_000_000_000, (3, 2), (1 << 33, 1))
    assert columns.fits(1 << 36)
    assert not columns.fits(1 << 34)
    found = columns.canonical(np.array([0, 1, 2, 5], dtype=np.int64))
    assert found.tolist() == [5_000_000_000, 5_000_000_001, 5_000_000_000 + (1 << 33), 5_000_000_001 + (1 << 34)]


@pytest.mark.parametrize(
    ("dst", "shape", "strides"),
    [(0, (), ()), (0, (1,) * 5, (1,) * 5), (0, (2,), (1, 1)), (-1, (2,), (1,)), (0, (0,), (1,)), (0, (2,), (0,))],
)
def test_nonsense_is_no_box(dst: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a box has"):
        Box(dst, shape, strides)


@pytest.mark.parametrize(
    "box", [Box.flat(3, 5), Box(1, (4, 2), (6, 1)), Box(0, (6, 4), (1, 6)), Box(7, (2, 3), (1, 4))]
)
def test_a_view_of_a_box_is_what_its_ordinals_name(box: Box) -> None:
    lanes = np.arange(24, dtype=np.uint16)
    places = box.canonical(np.arange(box.elements, dtype=np.int64))
    assert np.array_equal(box.view(lanes).reshape(-1), lanes[places])
    box.view(lanes)[...] = 99
    assert np.flatnonzero(lanes == 99).tolist() == sorted(places.tolist())
    with pytest.raises(ValueError, match="does not lie inside 7 elements"):
        box.view(lanes[:7])


@st.composite
def nested_boxes(draw: st.DrawFn) -> Box:
    """Pieces of dense tensors of up to 4 axes, in any order of their axes, some of several tensors' worth apart."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    step, strides = draw(st.integers(1, 3)), []
    for n in reversed(shape):
        strides.append(step)
        step *= n + draw(st.integers(0, 2))
    order = draw(st.permutations(range(len(shape))))
    flipped = strides[::-1]
    return Box(draw(st.integers(0, 12)), tuple(shape[a] for a in order), tuple(flipped[a] for a in order))


@given(nested_boxes())
def test_a_box_knows_whether_its_ordinals_rise(box: Box) -> None:
    elements = elements_of(box)
    assert box.ascending == (elements == sorted(elements))


@given(nested_boxes(), nested_boxes())
def test_boxes_that_are_seen_apart_share_no_element(one: Box, other: Box) -> None:
    shared = set(elements_of(one)) & set(elements_of(other))
    assert one.apart(other) == other.apart(one)
    if one.apart(other):
        assert not shared


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Box(0, (8, 4), (16, 1)), Box(4, (8, 4), (16, 1))),  # neighbouring columns
        (Box(0, (8, 4), (16, 1)), Box(16 * 5 + 8, (2, 8), (16, 1))),  # columns and a tile
        (Box(0, (4, 16), (32, 1)), Box(16, (4, 16), (32, 1))),  # every other row
        (Box(0, (8, 8), (16, 2)), Box(1, (8, 8), (16, 2))),  # gate and up in turn
        (Box.flat(0, 5), Box.flat(5, 5)),
        (Box(0, (4, 8), (1, 16)), Box(4, (8, 4), (16, 1))),  # transposed columns
    ],
)
def test_shards_that_share_nothing_are_seen_apart(one: Box, other: Box) -> None:
    assert one.apart(other)
