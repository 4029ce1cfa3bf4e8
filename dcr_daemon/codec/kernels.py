"""Compiled inner loops of the codec: detect, emit, unpack. All release the GIL; none allocates more than its answer.

Imported on first use only. Bits are unsigned integers of 1, 2, 4 or 8 bytes; positions are ordinals in a segment's box.
The unpacking kernels read untrusted bytes: they never index outside an array and return a status instead of raising, 0
if all is well. The tests compare them with implementations in numpy.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import int64, uint8, uint64

from dcr_daemon.canonical.jit import kernel
from dcr_daemon.canonical.kernels import sum_at, summand

BLOCK = 2048  #: 64-bit words detected, then looked at and summed while they are still in the first cache level


@kernel
def locate(ordinal: Any, dst: Any, shape: Any, strides: Any) -> Any:
    """Canonical element of an ordinal in a box of rank 4."""
    element = int64(dst)
    rest = int64(ordinal)
    for axis in range(3, 0, -1):
        n = shape[axis]
        above = rest // n
        element += (rest - above * n) * strides[axis]
        rest = above
    return element + rest * strides[0]


@kernel
def sum_changes(old: Any, now: Any, where: Any, dst: Any, shape: Any, strides: Any, flat: Any, key: Any) -> Any:
    """Sums of the old and of the new bits at ascending ordinals of a box; `flat`: it is contiguous."""
    per = max(int64(1), int64(old.itemsize // 2))
    if flat:
        return sum_at(old, where, dst, key, per), sum_at(now, where, dst, key, per)
    before = uint64(0)
    after = uint64(0)
    row = end = at = int64(0)  # of the run along the innermost axis: most neighbours are in one
    for i in range(where.size):
        ordinal = int64(where[i])
        if ordinal >= end:
            row = ordinal // shape[3] * shape[3]
            end = row + shape[3]
            at = locate(row, dst, shape, strides)
        element = at + (ordinal - row) * strides[3]
        before += summand(old[i], element, key, per)
        after += summand(now[i], element, key, per)
    return before, after


@kernel
def detect(
    base: Any, new: Any, where: Any, old: Any, now: Any, dst: Any, shape: Any, strides: Any, flat: Any, key: Any
) -> Any:
    """One pass over a box: positions, old and new bits of what differs, sums before and after; `base` becomes `new`.

    Memory is compared in 64-bit words; what is left over is taken element by element. Lists are appended branch-free,
    because a mispredicted branch costs more than four elements: every candidate is written and only a changed one moves
    the cursor, so the outputs need one slot more than there are elements. Returns (changed, before, after).
    `vector_kernels.detect` finds the same.
    """
    k = int64(0)
    before = uint64(0)
    after = uint64(0)
    per_word = int64(8 // base.itemsize)
    words = base.size // per_word
    base_words = base[: words * per_word].view(np.uint64)
    new_words = new[: words * per_word].view(np.uint64)
    hits = np.empty(BLOCK + 1, dtype=np.uint32)
    for start in range(0, words + 1, BLOCK):
        stop = min(start + BLOCK, words)
        first = k
        n = int64(0)
        for w in range(start, stop):
            hits[n] = w
            n += int64(base_words[w] != new_words[w])
        for h in range(n):
            at_word = int64(hits[h]) * per_word
            for i in range(per_word):
                o = base[at_word + i]
                v = new[at_word + i]
                where[k] = at_word + i
                old[k] = o
                now[k] = v
                k += int64(o != v)
            base_words[hits[h]] = new_words[hits[h]]
        if start + BLOCK > words:
            for i in range(words * per_word, base.size):
                o = base[i]
                v = new[i]
                where[k] = i
                old[k] = o
                now[k] = v
                k += int64(o != v)
                base[i] = v
        b, a = sum_changes(old[first:k], now[first:k], where[first:k], dst, shape, strides, flat, key)
        before += b
        after += a
    return k, before, after


@kernel
def emit_gaps(where: Any, shift: Any, gaps: Any, low: Any) -> Any:
    """Positions as u8 gaps >> shift with carries of 255, low bits packed apart (`low` zeroed). Returns gap bytes."""
    written = int64(0)
    previous = int64(-1)
    mask = (int64(1) << shift) - 1
    for i in range(where.size):
        position = int64(where[i])
        gap = position - previous - 1
        previous = position
        if shift:
            bit = int64(i) * shift
            word = (gap & mask) << (bit & 7)
            low[bit >> 3] |= uint8(word & 255)
            if word > 255:
                low[(bit >> 3) + 1] |= uint8(word >> 8)
            gap >>= shift
        while gap >= 255:
            gaps[written] = 255
            written += 1
            gap -= 255
        gaps[written] = gap
        written += 1
    return written


@kernel
def emit_bitmask(where: Any, mask: Any) -> None:
    """One bit per element of the box, least significant first (`mask` zeroed)."""
    for i in range(where.size):
        mask[where[i] >> 3] |= uint8(1 << (where[i] & 7))


@kernel
def emit_steps(old: Any, now: Any, codes: Any, escapes: Any) -> Any:
    """Differences of bit patterns mod 2^w, as two's complement, zigzagged: -1 -> 1, 1 -> 2, -2 -> 3, …

    2-bit codes: 0 for -1, 1 for +1, 2 for an escape (`codes` zeroed); escapes hold the zigzag less 3 and need one
    slot more than there are elements. Returns the number of escapes.
    """
    top = uint64(old.itemsize * 8 - 1)
    full = (uint64(2) << top) - uint64(1)  # numba computes in 64 bits whatever the width
    count = int64(0)
    for i in range(old.size):
        d = (uint64(now[i]) - uint64(old[i])) & full
        step = int64(((d << uint64(1)) ^ (uint64(0) - (d >> top))) & full)
        escapes[count] = max(step - 3, 0)
        count += int64(step > 2)
        codes[i >> 2] |= uint8(min(step - 1, 2) << (2 * (i & 3)))
    return count


@kernel
def unpack_gaps(gaps: Any, low: Any, shift: Any, elements: Any, where: Any) -> Any:
    """Positions from gaps. 1: too many or too few positions; 2: a position outside the box; 3: stray low bits."""
    k = int64(0)
    position = int64(-1)
    run = int64(0)
    mask = (int64(1) << shift) - 1
    for t in range(gaps.size):
        run += int64(gaps[t])
        if gaps[t] == 255:
            continue
        if k >= where.size:
            return 1
        gap = run << shift
        run = 0
        if shift:
            bit = k * shift
            word = int64(low[bit >> 3])
            if (bit >> 3) + 1 < low.size:
                word |= int64(low[(bit >> 3) + 1]) << 8
            gap |= (word >> (bit & 7)) & mask
        position += gap + 1
        if position >= elements:
            return 2
        where[k] = position
        k += 1
    if k != where.size or run != 0:
        return 1
    used = (where.size * shift) & 7
    if used and low[low.size - 1] >> used:
        return 3
    return 0


@kernel
def unpack_bitmask(mask: Any, elements: Any, where: Any) -> Any:
    """Positions from a bitmask; `where` has one slot more than there are positions.

    1: another number of bits than positions; 2: a bit outside the box.
    """
    count = int64(0)
    for byte in range(mask.size):
        bits = int64(mask[byte])
        while bits:
            bits &= bits - 1
            count += 1
    if count != where.size - 1:
        return 1
    if elements & 7 and mask[mask.size - 1] >> (elements & 7):
        return 2
    k = int64(0)
    for byte in range(mask.size):
        bits = int64(mask[byte])
        for bit in range(8):
            where[k] = byte * 8 + bit
            k += bits >> bit & 1
    return 0


@kernel
def unpack_steps(codes: Any, escapes: Any, operands: Any) -> Any:
    """Differences from codes and escapes. 1: code 3; 2: escapes do not fit the codes; 3: stray code bits."""
    used = int64(0)
    full = (uint64(2) << uint64(operands.itemsize * 8 - 1)) - uint64(1)
    for i in range(operands.size):
        code = (codes[i >> 2] >> uint8(2 * (i & 3))) & uint8(3)
        step = uint64(code) + uint64(1)
        if code >= 2:
            if code == 3:
                return 1
            if used >= escapes.size or uint64(escapes[used]) > full - uint64(3):
                return 2
            step = uint64(escapes[used]) + uint64(3)
            used += 1
        operands[i] = ((step >> uint64(1)) ^ (uint64(0) - (step & uint64(1)))) & full
    if used != escapes.size:
        return 2
    last = operands.size & 3
    if last and codes[codes.size - 1] >> uint8(2 * last):
        return 3
    return 0


@kernel
def histogram(bits: Any, counts: Any) -> None:
    """Byte counts of every plane, into counts[plane, byte]."""
    for i in range(bits.size):
        for plane in range(counts.shape[0]):
            counts[plane, np.uint64(bits[i]) >> np.uint64(8 * plane) & np.uint64(255)] += 1


@kernel
def _coded_bits(bits: Any) -> Any:
    """Bits that the byte planes of these elements take, each entropy-coded by itself, with the Miller-Madow correction
    for small samples."""
    counts = np.zeros((bits.itemsize, 256), dtype=np.int64)
    histogram(bits, counts)
    total = 0.0
    if bits.size:
        for plane in range(bits.itemsize):
            seen = 0
            total += bits.size * math.log2(bits.size)
            for byte in range(256):
                if counts[plane, byte]:
                    seen += 1
                    total -= counts[plane, byte] * math.log2(counts[plane, byte])
            total += (seen - 1) / (2 * math.log(2))
    return total


@kernel
def estimate_bits(old: Any, now: Any, stride: Any) -> Any:
    """What every `stride`-th change would take as a step, as a mask of flipped bits, and as its new bits."""
    size = (old.size + stride - 1) // stride
    a = np.empty(size, dtype=old.dtype)
    b = np.empty(size, dtype=old.dtype)
    flips = np.empty(size, dtype=old.dtype)
    for i in range(size):
        a[i] = old[i * stride]
        b[i] = now[i * stride]
        flips[i] = a[i] ^ b[i]
    codes, escapes = np.zeros((size + 3) // 4, dtype=np.uint8), np.empty(size + 1, dtype=old.dtype)
    count = emit_steps(a, b, codes, escapes)
    return _coded_bits(codes) + _coded_bits(escapes[:count]), _coded_bits(flips), _coded_bits(b)
