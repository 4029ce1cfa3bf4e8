"""The fingerprint: one 64-bit sum per canonical tensor, the same however the model is sharded (must F2).

    F_t = Σ mix(key_t XOR (unit << 16 | bits))  mod 2^64

A unit is an element of a 1- or 2-byte dtype, or one of the 2 or 4 little-endian 16-bit words of a 4- or 8-byte
element; `unit` is its number inside the tensor (< 2^48); `mix` is the finaliser of murmur3. Sums guard against
accidents, never against people. Every function takes raw bits: arrays of u1, <u2, <u4 or <u8 lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.layout import Layout

Vector = npt.NDArray[np.uint64]
Bits = npt.NDArray[Any]
MASK = (1 << 64) - 1


def mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """murmur3's 64-bit finaliser, element-wise; the numpy reference of the kernels below."""
    words = words ^ (words >> np.uint64(33))
    words = words * np.uint64(0xFF51AFD7ED558CCD)
    words = words ^ (words >> np.uint64(33))
    words = words * np.uint64(0xC4CEB9FE1A85EC53)
    return words ^ (words >> np.uint64(33))


@cache
def mix_scalar() -> Callable[..., Any]:
    """The compiled scalar `mix`, for other kernels to inline."""
    from numba import njit, uint64

    @njit(inline="always", cache=True)
    def finalise(word):  # type: ignore[no-untyped-def]
        word = uint64(word)
        word ^= word >> uint64(33)
        word *= uint64(0xFF51AFD7ED558CCD)
        word ^= word >> uint64(33)
        word *= uint64(0xC4CEB9FE1A85EC53)
        return word ^ (word >> uint64(33))

    return finalise


@cache
def _kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from numba import njit, uint64

    mix = mix_scalar()

    @njit(nogil=True, cache=True)
    def run(bits, key, first):  # type: ignore[no-untyped-def]
        total = uint64(0)
        for i in range(bits.size):
            total += mix(key ^ ((uint64(first + i) << uint64(16)) | uint64(bits[i])))
        return total

    @njit(nogil=True, cache=True)
    def at(bits, elements, key, per):  # type: ignore[no-untyped-def]
        total = uint64(0)
        for i in range(elements.size):
            unit = uint64(elements[i] * per)
            for j in range(per):
                total += mix(key ^ (((unit + uint64(j)) << uint64(16)) | uint64(bits[i * per + j])))
        return total

    return run, at


def _units(bits: Bits) -> Bits:
    """1-byte lanes as they are, wider ones as 16-bit words."""
    flat = np.ascontiguousarray(bits).reshape(-1)
    return flat if flat.itemsize <= 2 else flat.view("<u2")


def sum_run(bits: Bits, key: int, first: int = 0) -> int:
    """Sum over consecutive canonical elements whose first is number `first` of its tensor."""
    units = _units(bits)
    per = max(1, bits.itemsize // 2)
    return int(_kernels()[0](units, np.uint64(key), first * per))


def sum_at(bits: Bits, elements: npt.NDArray[np.int64], key: int) -> int:
    """Sum over scattered elements: `bits[i]` stands at canonical element `elements[i]`."""
    per = max(1, bits.itemsize // 2)
    return int(_kernels()[1](_units(bits), np.ascontiguousarray(elements), np.uint64(key), per))


def sum_box(bits: Bits, box: Box, key: int) -> int:
    """Sum over a box whose elements `bits` holds in the box's row-major order."""
    if box.contiguous:
        return sum_run(bits, key, box.dst)
    return sum_at(bits.reshape(-1), box.canonical(np.arange(box.elements, dtype=np.int64)), key)


def fingerprint(layout: Layout, tensors: Iterable[Bits]) -> Vector:
    """The vector (u64, one per canonical tensor) of a whole model, tensors given in layout order."""
    sums = [sum_run(bits, int(key)) for bits, key in zip(tensors, layout.keys, strict=True)]
    return np.array(sums, dtype=np.uint64)


def total(vector: Vector) -> int:
    """Sum of the vector mod 2^64: the number that records show."""
    return int(np.sum(vector, dtype=np.uint64))
