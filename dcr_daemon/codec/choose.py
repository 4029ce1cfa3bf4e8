"""Which codec a segment gets: a rule for positions, an estimate for values. Only the size depends on it.

The rules come from measured sizes on real and synthetic updates (docs/FORMAT.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.codec.chunk import Codec, Positions
from dcr_daemon.codec.format import Values

BITMASK_FROM = 0.20  #: share of changed elements from which a bitmask is smaller than gaps
SHIFTS = ((0.004, 0), (0.001, 2), (0.00025, 4), (0.0, 6))  #: (from this share of changed elements, gap shift)
SAMPLE = 4096  #: changes looked at to estimate what each value codec would cost
FEW = 64  #: below this many changes an estimate says nothing, and steps are the default

FORCED = {Codec.ULP: Values.STEP, Codec.XOR: Values.MASK, Codec.OVERWRITE: Values.VALUE}


def choose_positions(where: npt.NDArray[np.uint32], elements: int) -> tuple[Positions, int]:
    """Position codec and gap shift for the changed ordinals of a box."""
    if where.size == elements:
        return Positions.ALL, 0
    share = where.size / elements
    if share >= BITMASK_FROM:
        return Positions.BITMASK, 0
    return Positions.GAPS, next(shift for least, shift in SHIFTS if share >= least)


def choose_values(codec: Codec, old: Bits, now: Bits) -> Values:
    """Value codec for old and new bits of the changed elements."""
    if now.itemsize == 8:
        return Values.VALUE
    if codec is not Codec.AUTO:
        return FORCED[codec]
    if now.size < FEW:
        return Values.STEP
    from dcr_daemon.codec import kernels

    stride = -(-now.size // SAMPLE)
    a, b = np.ascontiguousarray(old[::stride]), np.ascontiguousarray(now[::stride])
    steps = np.empty_like(b)
    kernels.zigzag(a, b, steps)
    large = steps[steps > 2] - steps.dtype.type(3)
    codes = np.minimum(steps, 3)
    costs = {
        Values.STEP: _entropy(np.bincount(codes.astype(np.int64))) + _planes(large),
        Values.ZIGZAG: _planes(steps),
        Values.MASK: _planes(a ^ b),
        Values.VALUE: _planes(b),
    }
    return min(costs, key=lambda values: costs[values])


def _planes(lanes: Bits) -> float:
    """Bits that the byte planes of `lanes` take, each entropy-coded by itself."""
    from dcr_daemon.codec import kernels

    counts = np.zeros((lanes.itemsize, 256), dtype=np.int64)
    kernels.histogram(lanes, 1, counts)
    return sum(_entropy(plane) for plane in counts)


def _entropy(counts: npt.NDArray[Any]) -> float:
    """Bits to code all symbols of a histogram, with the Miller-Madow correction for small samples."""
    seen = counts[counts > 0]
    n = float(seen.sum())
    if not n:
        return 0.0
    return float(n * np.log2(n) - (seen * np.log2(seen)).sum() + (seen.size - 1) / (2 * np.log(2)))
