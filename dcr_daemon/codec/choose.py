"""The codec of a segment: a rule for positions, an estimate for values. Only the encoded size depends on the choice.

The rules come from measured sizes on real and synthetic updates (docs/FORMAT.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.codec.chunk import Codec, Operation, Positions

BITMASK_FROM = 0.20  #: share of changed elements from which a bitmask is smaller than gaps
SHIFTS = ((0.004, 0), (0.001, 2), (0.00025, 4), (0.0, 6))  #: (from this rate of changes, gap shift)
SAMPLE = 2048  #: changes looked at to estimate what each value codec would cost
FEW = 256  #: below this many changes an estimate says nothing, and ulp is taken
MARGIN = 0.95  #: another codec must promise this share of ulp's size: streams are shared, and a switch has its price


def choose_positions(where: npt.NDArray[np.uint32], elements: int) -> tuple[Positions, int]:
    """Position codec and gap shift for the changed ordinals of a box."""
    if where.size == elements:
        return Positions.ALL, 0
    if where.size >= BITMASK_FROM * elements:
        return Positions.BITMASK, 0
    rate = _rate(where, elements)
    return Positions.GAPS, next(shift for least, shift in SHIFTS if rate >= least)


def _rate(where: npt.NDArray[np.uint32], elements: int) -> float:
    """Rate of the geometric law whose median gap is that of a sample.

    Equal to the fraction of changed elements if they are spread evenly; higher if they cluster (a few rows of an
    embedding), because then most gaps are short.
    """
    if where.size < 2:
        return where.size / elements
    stride = -(-where.size // SAMPLE)
    gaps = where[1::stride] - where[:-1:stride]
    return float(np.log(2) / np.median(gaps))


def choose_operation(codec: Codec, old: Bits, *, now: Bits) -> Operation:
    """Value codec for old and new bits of the changed elements: as asked, or the one with the smallest estimate."""
    if now.itemsize == 8:
        return Operation.OVERWRITE
    if codec is not Codec.AUTO:
        return Operation(codec)
    if now.size < FEW:
        return Operation.ULP
    from dcr_daemon.codec import kernels

    stride = -(-now.size // SAMPLE)
    a, b = np.ascontiguousarray(old[::stride]), np.ascontiguousarray(now[::stride])
    codes, escapes = np.zeros((a.size + 3) // 4, dtype="u1"), np.empty(a.size + 1, dtype=b.dtype)
    count = kernels.emit_steps(a, b, codes, escapes)
    ulp = _planes(codes) + _planes(escapes[:count])
    costs = {Operation.ULP: MARGIN * ulp, Operation.XOR: _planes(a ^ b), Operation.OVERWRITE: _planes(b)}
    return min(costs, key=lambda operation: costs[operation])


def _planes(bits: Bits) -> float:
    """Bits that the byte planes of these elements take, each entropy-coded by itself."""
    from dcr_daemon.codec import kernels

    counts = np.zeros((bits.itemsize, 256), dtype=np.int64)
    kernels.histogram(bits, counts)
    return sum(_entropy(plane) for plane in counts)


def _entropy(counts: npt.NDArray[Any]) -> float:
    """Bits to code all symbols of a histogram, with the Miller-Madow correction for small samples."""
    seen = counts[counts > 0]
    n = float(seen.sum())
    if not n:
        return 0.0
    return float(n * np.log2(n) - (seen * np.log2(seen)).sum() + (seen.size - 1) / (2 * np.log(2)))
