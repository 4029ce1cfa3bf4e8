"""Each compiled loop against the same thing said in numpy or plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.fingerprint import mix
from dcr_daemon.codec import kernels

LANES = ["u1", "<u2", "<u4", "<u8"]
KEY = np.uint64(0xA5A5_0123_4567_89AB)


def changed_pair(lane: str, size: int, rate: float, seed: int = 1) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    old = random.integers(0, 256, size * np.dtype(lane).itemsize, dtype=np.uint8).view(lane)
    new = old.copy()
    new[random.random(size) < rate] ^= random.integers(0, 200, dtype=np.uint8)
    return old, new


def unit_sum(bits: Any, elements: Any) -> int:
    per = max(1, bits.itemsize // 2)
    units = bits if bits.itemsize <= 2 else np.ascontiguousarray(bits).view("<u2")
    numbers = (elements.astype(np.uint64)[:, None] * np.uint64(per) + np.arange(per, dtype=np.uint64)).reshape(-1)
    return int(np.sum(mix(KEY ^ ((numbers << np.uint64(16)) | units.astype(np.uint64))), dtype=np.uint64))


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("size", [1, 3, 7, 8, 9, 2047, 8192, 16384, 16385, 100_003])
@pytest.mark.parametrize("rate", [0.0, 0.01, 1.0])
def test_detect(lane: str, size: int, rate: float) -> None:
    old, new = changed_pair(lane, size, rate)
    base = old.copy()
    where, was, now = np.empty(size + 1, "<u4"), np.empty(size + 1, lane), np.empty(size + 1, lane)
    shapes = np.array([1, 1, 1, size]), np.array([0, 0, 0, 1])
    for flat in (True, False):
        base[:] = old
        k, before, after = kernels.detect(base, new, where, was, now, 17, *shapes, flat, KEY)
        expected = np.flatnonzero(old != new)
        assert np.array_equal(where[:k], expected)
        assert np.array_equal(was[:k], old[expected])
        assert np.array_equal(now[:k], new[expected])
        assert np.array_equal(base, new)
        assert (int(before), int(after)) == (
            unit_sum(old[expected], expected + 17),
            unit_sum(new[expected], expected + 17),
        )


def test_locate_is_the_boxs_own_arithmetic() -> None:
    box = Box(5, (3, 4, 2, 5), (1 << 34, 40, 7, 1))
    shape, strides = np.array(box.shape), np.array(box.strides)
    ordinals = np.arange(box.elements)
    assert [kernels.locate(i, box.dst, shape, strides) for i in ordinals] == box.canonical(ordinals).tolist()


@pytest.mark.parametrize("shift", range(9))
@pytest.mark.parametrize("rate", [0.0001, 0.01, 0.7])
def test_gaps(shift: int, rate: float) -> None:
    size = 200_000
    where = np.flatnonzero(np.random.default_rng(shift).random(size) < rate).astype("<u4")
    gaps, low = np.empty(where.size + (size >> shift) // 255, "u1"), np.zeros((where.size * shift + 7) // 8, "u1")
    written = kernels.emit_gaps(where, shift, gaps, low)
    differences = np.diff(where.astype(np.int64), prepend=-1) - 1
    slow = bytes(b for gap in differences for b in [255] * ((gap >> shift) // 255) + [(gap >> shift) % 255])
    assert gaps[:written].tobytes() == slow
    bits = [gap >> b & 1 for gap in differences for b in range(shift)]
    assert low.tobytes() == np.packbits(np.array(bits, dtype=np.uint8), bitorder="little").tobytes()
    found = np.empty(where.size, np.int64)
    assert kernels.unpack_gaps(gaps[:written], low, shift, size, found) == 0
    assert np.array_equal(found, where)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1001])
def test_bitmask(size: int) -> None:
    hit = np.random.default_rng(size).random(size) < 0.4
    hit[-1] = True
    where = np.flatnonzero(hit).astype("<u4")
    mask = np.zeros((size + 7) // 8, "u1")
    kernels.emit_bitmask(where, mask)
    assert mask.tobytes() == np.packbits(hit, bitorder="little").tobytes()
    found = np.empty(where.size + 1, np.int64)
    assert kernels.unpack_bitmask(mask, size, found) == 0
    assert np.array_equal(found[:-1], where)


@pytest.mark.parametrize("lane", LANES[:3])
def test_steps(lane: str) -> None:
    width = 8 * np.dtype(lane).itemsize
    old, new = changed_pair(lane, 5000, 1.0)
    ends = np.array([0, 0, (1 << width) - 1, 1 << (width - 1), 5, 5, 5, 5], dtype=lane)
    old = np.concatenate([old, ends])
    new = np.concatenate([new, np.array([1, (1 << width) - 1, 0, 0, 4, 6, 7, 3], dtype=lane)])
    keep = old != new
    old, new = old[keep], new[keep]
    codes, escapes = np.zeros((old.size + 3) // 4, "u1"), np.empty(old.size + 1, lane)
    count = kernels.emit_steps(old, new, codes, escapes)
    signed = [
        (int(n) - int(o) + (1 << (width - 1))) % (1 << width) - (1 << (width - 1))
        for o, n in zip(old, new, strict=True)
    ]
    symbols = [{-1: 0, 1: 1}.get(d, 2) for d in signed]
    assert [codes[i >> 2] >> 2 * (i & 3) & 3 for i in range(old.size)] == symbols
    assert escapes[:count].tolist() == [2 * d - 3 if d > 0 else -2 * d - 4 for d in signed if abs(d) != 1]
    operands = np.empty_like(old)
    assert kernels.unpack_steps(codes, escapes[:count], operands) == 0
    assert np.array_equal(old + operands, new)


@pytest.mark.parametrize("lane", LANES)
def test_histogram(lane: str) -> None:
    lanes, _ = changed_pair(lane, 999, 0.0)
    counts = np.zeros((lanes.itemsize, 256), np.int64)
    kernels.histogram(lanes, counts)
    planes = lanes.view("u1").reshape(-1, lanes.itemsize)
    assert all(np.array_equal(counts[b], np.bincount(planes[:, b], minlength=256)) for b in range(lanes.itemsize))


@pytest.mark.parametrize("lane", LANES[:3])
@pytest.mark.parametrize("stride", [1, 3])
def test_estimates_are_the_entropies_of_the_byte_planes(lane: str, stride: int) -> None:
    old, new = changed_pair(lane, 3000, 1.0)
    old[::7], new[::7] = 5, 6
    keep = old != new
    old, new = old[keep], new[keep]

    def entropy(bits: Any) -> float:
        total = 0.0
        for plane in bits.view("u1").reshape(-1, bits.itemsize).T:
            seen = np.unique(plane, return_counts=True)[1] / plane.size
            total += plane.size * -(seen * np.log2(seen)).sum() + (seen.size - 1) / (2 * np.log(2))
        return total

    a, b = old[::stride].copy(), new[::stride].copy()
    codes, escapes = np.zeros((a.size + 3) // 4, "u1"), np.empty(a.size + 1, lane)
    count = kernels.emit_steps(a, b, codes, escapes)
    expected = entropy(codes) + entropy(escapes[:count]), entropy(a ^ b), entropy(b)
    assert kernels.estimate_bits(old, new, stride) == pytest.approx(expected)
