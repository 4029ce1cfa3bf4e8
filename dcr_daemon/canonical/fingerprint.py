"""The fingerprint: one 64-bit sum per canonical tensor, the same however the model is sharded (must F2).

    F_t = Σ mix(key_t XOR (unit << 16 | bits))  mod 2^64

A unit is an element of a 1- or 2-byte dtype, or one of the 2 or 4 little-endian 16-bit words of a 4- or 8-byte
element; `unit` is its number inside the tensor (< 2^48); `mix` is the finaliser of murmur3. The sums detect
accidents; they are no protection against an attacker. Every function takes raw bits: arrays of u1, <u2, <u4 or <u8.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dcr_daemon.canonical.box import MAX_RANK, Box
from dcr_daemon.canonical.layout import Layout

Vector = npt.NDArray[np.uint64]
Bits = npt.NDArray[Any]
MASK = (1 << 64) - 1


class Change(Protocol):
    """What `advance` needs of a segment: its tensor (layout index) and the sums over its changed elements."""

    @property
    def tensor(self) -> int: ...
    @property
    def before(self) -> int: ...
    @property
    def after(self) -> int: ...


def mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """murmur3's 64-bit finaliser, element-wise; the numpy reference of the kernels."""
    words = words ^ (words >> np.uint64(33))
    words = words * np.uint64(0xFF51AFD7ED558CCD)
    words = words ^ (words >> np.uint64(33))
    words = words * np.uint64(0xC4CEB9FE1A85EC53)
    return words ^ (words >> np.uint64(33))


def units_per(width: int) -> int:
    """16-bit units of a `width`-byte element."""
    return max(1, width // 2)


def sum_run(bits: Bits, key: int, *, first: int = 0) -> int:
    """Sum over consecutive canonical elements, the first being number `first` of its tensor."""
    from dcr_daemon.canonical import kernels

    flat = np.ascontiguousarray(bits).reshape(-1)
    units = flat if bits.itemsize <= 2 else flat.view("<u2")
    return int(kernels.sum_units(units, np.uint64(key), first * units_per(bits.itemsize)))


def sum_at(bits: Bits, elements: npt.NDArray[np.int64], *, key: int) -> int:
    """Sum over scattered elements: `bits[i]` stands at canonical element `elements[i]`.

    Raises:
        ValueError: the two differ in length.
    """
    from dcr_daemon.canonical import kernels

    if bits.size != elements.size:
        raise ValueError(f"{bits.size} bits for {elements.size} elements")
    where = np.ascontiguousarray(elements, dtype=np.int64)
    flat = np.ascontiguousarray(bits).reshape(-1)
    return int(kernels.sum_at(flat, where, 0, np.uint64(key), units_per(bits.itemsize)))


def sum_box(bits: Bits, box: Box, *, key: int) -> int:
    """Sum over a box.

    `bits` is flat, in the box's row-major order, or an array of the box's own shape with any memory strides
    (a view into live weights is summed where it lies).

    Raises:
        ValueError: `bits` has neither shape.
    """
    from dcr_daemon.canonical import kernels

    if bits.shape != box.shape:
        if bits.ndim != 1 or bits.size != box.elements:
            raise ValueError(f"bits of shape {bits.shape} do not fill {box}")
        bits = bits.reshape(box.shape)
    if box.contiguous and bits.flags.c_contiguous:
        return sum_run(bits, key, first=box.dst)
    lattice = bits.reshape((1,) * (MAX_RANK - bits.ndim) + bits.shape)
    strides = np.array((0,) * (MAX_RANK - bits.ndim) + box.strides, dtype=np.int64)
    return int(kernels.sum_lattice(lattice, box.dst, strides, np.uint64(key), units_per(bits.itemsize)))


def fingerprint(layout: Layout, tensors: Iterable[Bits]) -> Vector:
    """The vector (u64, one per canonical tensor) of a whole model, tensors given in layout order."""
    sums = [sum_run(bits, int(key)) for bits, key in zip(tensors, layout.keys, strict=True)]
    return np.array(sums, dtype=np.uint64)


def advance(vector: Vector, changes: Iterable[Change]) -> Vector:
    """A new vector: `vector` with each segment's before taken out and its after put in, mod 2^64 (must F1)."""
    moved = vector.astype(np.uint64)
    for change in changes:
        moved[change.tensor] = (int(moved[change.tensor]) + change.after - change.before) & MASK
    return moved


def total(vector: Vector) -> int:
    """Sum of the vector mod 2^64: the number that records show."""
    return int(np.sum(vector, dtype=np.uint64))
