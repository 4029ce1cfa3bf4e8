"""The fingerprint: kernels against a numpy oracle, independence of sharding, what it must tell apart."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.fingerprint import MASK, Bits, advance, fingerprint, mix, sum_at, sum_box, sum_run, total
from dcr_daemon.canonical.layout import Layout, TensorSpec

KEY = 0x9E3779B97F4A7C15
LANES = ["u1", "<u2", "<u4", "<u8"]


def draw(seed: int, count: int, lane: str) -> Bits:
    raw = np.random.default_rng(seed).integers(0, 256, count * np.dtype(lane).itemsize, dtype=np.uint8)
    return raw.view(lane)


def oracle(bits: Bits, elements: npt.NDArray[np.int64], key: int) -> int:
    """The formula of docs/FORMAT.md in plain numpy."""
    per = max(1, bits.itemsize // 2)
    units = bits if bits.itemsize <= 2 else np.ascontiguousarray(bits).view("<u2")
    numbers = (elements.astype(np.uint64)[:, None] * np.uint64(per) + np.arange(per, dtype=np.uint64)).reshape(-1)
    return int(np.sum(mix(np.uint64(key) ^ ((numbers << np.uint64(16)) | units.astype(np.uint64))), dtype=np.uint64))


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("first", [0, 7, (1 << 45) - 3])
def test_runs_equal_the_formula(lane: str, first: int) -> None:
    bits = draw(1, 1001, lane)
    assert sum_run(bits, KEY, first=first) == oracle(bits, np.arange(first, first + 1001), KEY)


@pytest.mark.parametrize("lane", LANES)
def test_scattered_elements_equal_the_formula(lane: str) -> None:
    bits = draw(2, 500, lane)
    elements = np.random.default_rng(3).integers(0, 1 << 45, 500)
    assert sum_at(bits, elements, key=KEY) == oracle(bits, elements, KEY)


@given(
    st.integers(1, 4).flatmap(
        lambda rank: st.tuples(st.tuples(*[st.integers(1, 5)] * rank), st.permutations(range(rank)))
    ),
    st.sampled_from(LANES),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_boxes_of_any_rank_and_order_equal_the_formula(
    case: tuple[tuple[int, ...], list[int]], lane: str, in_place: bool
) -> None:
    shape, order = case
    strides, span = [0] * len(shape), 1
    for axis in order:
        strides[axis], span = span, span * (shape[axis] + 1)
    box = Box(11, shape, tuple(strides))
    bits = draw(4, box.elements, lane)
    expected = oracle(bits, box.canonical(np.arange(box.elements)), KEY)
    if in_place:  # a view with other memory strides than the box's own order
        memory = np.zeros([n + 2 for n in reversed(shape)], dtype=lane).T
        view = memory[tuple(slice(1, n + 1) for n in shape)]
        view[...] = bits.reshape(shape)
        assert sum_box(view, box, key=KEY) == expected
    else:
        assert sum_box(bits, box, key=KEY) == expected


def test_the_numbers_are_frozen() -> None:
    """What every stream written so far relies on."""
    layout = Layout([TensorSpec("w", "BF16", (4,)), TensorSpec("b", "F32", (2,)), TensorSpec("q", "U8", (3,))])
    assert layout.digest == "32d42c034557001027104f28016f69c1e04132cf1d2dad39fed6b6515e1385cd"
    vector = fingerprint(
        layout,
        [
            np.array([0x3F800000, 0xBF800000], dtype="<u4"),
            np.array([1, 2, 255], dtype="u1"),
            np.array([0, 0x8000, 0x3F80, 0x7FC0], dtype="<u2"),
        ],
    )
    assert [hex(value) for value in vector.tolist()] == [
        "0x7778cf4348e22c84",
        "0x741c2a70921ec161",
        "0x6e9ee64856ec7918",
    ]
    assert hex(total(vector)) == "0x5a33dffc31ed66fd"


@pytest.mark.parametrize("lane", LANES)
def test_zeros_do_not_sum_to_zero(lane: str) -> None:
    zeros = np.zeros(64, dtype=lane)
    assert sum_run(zeros, KEY) != 0
    assert sum_run(zeros[:32], KEY) != sum_run(zeros, KEY)
    assert sum_run(zeros[:0], KEY) == 0


def test_bits_count_not_values() -> None:
    def of(*words: int) -> int:
        return sum_run(np.array(words, dtype="<u2"), KEY)

    assert of(0x0000) != of(0x8000)  # 0.0 and -0.0
    assert of(0x7FC0) != of(0x7FC1)  # NaN payloads
    assert of(1, 2) != of(2, 1)  # order
    assert of(0x3F80, 0xBF80) != of(0xBF80, 0x3F80)  # two sign flips that cancel in a multilinear form


@given(st.data(), st.sampled_from(LANES))
@settings(max_examples=40, deadline=None)
def test_however_a_tensor_is_sharded_the_shards_sum_to_the_whole(data: st.DataObject, lane: str) -> None:
    rows, columns = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    tensor = draw(5, rows * columns, lane).reshape(rows, columns)
    row_cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=3))})
    column_cuts = sorted({0, columns, *data.draw(st.lists(st.integers(0, columns), max_size=3))})
    transposed = data.draw(st.booleans())
    summed = 0
    for top, bottom in pairwise(row_cuts):
        for left, right in pairwise(column_cuts):
            piece = tensor[top:bottom, left:right]
            box = Box(top * columns + left, piece.shape, (columns, 1))
            if transposed:
                piece, box = piece.T, Box(box.dst, box.shape[::-1], box.strides[::-1])
            summed += sum_box(np.ascontiguousarray(piece).reshape(-1), box, key=KEY)
    assert summed & MASK == sum_run(tensor, KEY)


def test_tensors_beyond_32_bits_of_elements_need_no_memory_to_be_summed_in_part() -> None:
    spec = TensorSpec("huge", "BF16", (1 << 20, 1 << 14))
    box = Box((1 << 33) + 5, (8, 4), (1 << 14, 1))
    assert box.fits(spec.elements)
    bits = draw(6, 32, "<u2")
    elements = box.canonical(np.arange(32, dtype=np.int64))
    assert int(elements[-1]) > 1 << 33
    assert sum_box(bits, box, key=KEY) == oracle(bits, elements, KEY)


@dataclass(frozen=True)
class Change:
    tensor: int
    before: int
    after: int


def test_advance_moves_a_vector_as_a_rescan_would() -> None:
    layout = Layout([TensorSpec("a", "BF16", (100,)), TensorSpec("b", "F32", (50,)), TensorSpec("c", "U8", ())])
    old = [draw(7, 100, "<u2"), draw(8, 50, "<u4"), draw(9, 1, "u1")]
    new = [bits.copy() for bits in old]
    where = np.array([3, 50, 99])
    new[0][where] ^= 0x8000
    new[1][10:20] += 1
    first, second = int(layout.keys[0]), int(layout.keys[1])
    changes = [
        Change(0, sum_at(old[0][where], where, key=first), sum_at(new[0][where], where, key=first)),
        Change(1, sum_run(old[1][10:20], second, first=10), sum_run(new[1][10:20], second, first=10)),
    ]
    start = fingerprint(layout, old)
    kept = start.copy()
    moved = advance(start, changes)
    assert np.array_equal(moved, fingerprint(layout, new))
    assert np.array_equal(start, kept)
    assert moved[2] == start[2]
    back = advance(moved, [Change(c.tensor, c.after, c.before) for c in changes])
    assert np.array_equal(back, start)


def test_wrong_lengths_are_refused() -> None:
    bits = draw(10, 6, "<u2")
    with pytest.raises(ValueError, match="6 bits for 5"):
        sum_at(bits, np.arange(5), key=KEY)
    with pytest.raises(ValueError, match="do not fill"):
        sum_box(bits, Box.flat(0, 7), key=KEY)
    with pytest.raises(ValueError, match="do not fill"):
        sum_box(bits.reshape(2, 3), Box(0, (3, 2), (2, 1)), key=KEY)
