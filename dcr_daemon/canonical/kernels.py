"""Fingerprint sums over raw bits, compiled. Bits are unsigned integers of 1, 2, 4 or 8 bytes; `per` is 16-bit units per
element.

Imported on first use only (numba is slow to import). Strided memory is summed where it lies: units of wide elements
are taken by shifting, so nothing is copied. Loops over one unit per element stand by themselves; the compiler turns
them into vector instructions, which is worth a factor of ten.
"""

from __future__ import annotations

from typing import Any

from numba import int64, uint32, uint64

from dcr_daemon.canonical.jit import kernel


@kernel
def mix(word: Any) -> Any:
    """murmur3's 64-bit finaliser of one uint64."""
    word = uint64(word)
    word ^= word >> uint64(33)
    word *= uint64(0xFF51AFD7ED558CCD)
    word ^= word >> uint64(33)
    word *= uint64(0xC4CEB9FE1A85EC53)
    return word ^ (word >> uint64(33))


@kernel
def summand(bits: Any, element: Any, key: Any, per: Any) -> Any:
    """What one canonical element contributes to its tensor's sum."""
    if per == 1:
        return mix(key ^ ((uint64(element) << uint64(16)) | uint64(bits)))
    total = uint64(0)
    unit = uint64(element) * uint64(per)
    for j in range(per):
        word = (uint64(bits) >> uint64(16 * j)) & uint64(0xFFFF)
        total += mix(key ^ (((unit + uint64(j)) << uint64(16)) | word))
    return total


@kernel
def sum_units(units: Any, key: Any, first: Any) -> Any:
    """`units[i]` (1- or 2-byte elements, or the words of wider ones) is unit `first + i`. The compiler vectorises
    this."""
    total = uint64(0)
    for i in range(units.size):
        total += mix(key ^ (((uint64(first) + uint64(i)) << uint64(16)) | uint64(units[i])))
    return total


@kernel
def sum_at(bits: Any, elements: Any, dst: Any, key: Any, per: Any) -> Any:
    """`bits[i]` stands at canonical element `dst + elements[i]`."""
    total = uint64(0)
    if per == 1:  # a loop of its own, without a branch inside, because it is vectorised then
        for i in range(elements.size):
            total += mix(key ^ (((uint64(dst) + uint64(elements[i])) << uint64(16)) | uint64(bits[i])))
        return total
    for i in range(elements.size):
        total += summand(bits[i], uint64(dst) + uint64(elements[i]), key, per)
    return total


@kernel
def sum_lattice(bits: Any, dst: Any, strides: Any, key: Any, per: Any) -> Any:
    """`bits[a, b, c, d]` stands at canonical element `dst + a*strides[0] + ... + d*strides[3]`."""
    total = uint64(0)
    step = uint64(strides[3])
    for a in range(bits.shape[0]):
        for b in range(bits.shape[1]):
            for c in range(bits.shape[2]):
                first = uint64(dst + a * strides[0] + b * strides[1] + c * strides[2])
                row = bits[a, b, c]
                if per == 1:
                    for d in range(row.size):
                        total += mix(key ^ (((first + uint64(d) * step) << uint64(16)) | uint64(row[d])))
                else:
                    for d in range(row.size):
                        total += summand(row[d], first + uint64(d) * step, key, per)
    return total


@kernel
def place(ordinals: Any, dst: Any, shape: Any, strides: Any, found: Any) -> None:
    """Canonical element of each ordinal in a box of rank 4."""
    small = shape[0] * shape[1] * shape[2] * shape[3] <= int64(0xFFFFFFFF)  # then in 32 bits, twice as fast
    for i in range(ordinals.size):
        element = int64(dst)
        rest = ordinals[i]
        for axis in range(3, 0, -1):
            n = shape[axis]
            if n == 1:
                continue
            above = int64(uint32(rest) // uint32(n)) if small else rest // n
            element += (rest - above * n) * strides[axis]
            rest = above
        found[i] = element + rest * strides[0]
