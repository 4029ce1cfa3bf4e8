"""Fingerprint sums over raw bits, compiled. Lanes are unsigned 1, 2, 4 or 8 bytes; `per` is 16-bit units per element.

Imported on first use only (numba is slow to import). Units of wide lanes are taken by shifting, so no lane is ever
copied or re-viewed, and strided memory is summed where it lies.
"""

from __future__ import annotations

from typing import Any

from numba import uint64

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
def sum_run(bits: Any, key: Any, first: Any, per: Any) -> Any:
    """`bits[i]` stands at canonical element `first + i`."""
    total = uint64(0)
    for i in range(bits.size):
        total += summand(bits[i], uint64(first) + uint64(i), key, per)
    return total


@kernel
def sum_at(bits: Any, elements: Any, key: Any, per: Any) -> Any:
    """`bits[i]` stands at canonical element `elements[i]`."""
    total = uint64(0)
    for i in range(elements.size):
        total += summand(bits[i], elements[i], key, per)
    return total


@kernel
def sum_lattice(bits: Any, dst: Any, strides: Any, key: Any, per: Any) -> Any:
    """`bits[a, b, c, d]` stands at canonical element `dst + a*strides[0] + ... + d*strides[3]`."""
    total = uint64(0)
    step = uint64(strides[3])
    for a in range(bits.shape[0]):
        for b in range(bits.shape[1]):
            for c in range(bits.shape[2]):
                element = uint64(dst + a * strides[0] + b * strides[1] + c * strides[2])
                for d in range(bits.shape[3]):
                    total += summand(bits[a, b, c, d], element, key, per)
                    element += step
    return total
