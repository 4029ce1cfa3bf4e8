"""The codec of a segment: a rule for positions, an estimate for values. Only the encoded size depends on the choice.

The rules come from measured sizes on real and synthetic updates (docs/FORMAT.md).
"""

from __future__ import annotations

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
    middle = (gaps.size - 1) // 2, gaps.size // 2
    return float(np.log(2) / np.partition(gaps, middle)[list(middle)].mean())


def choose_operation(codec: Codec, old: Bits, *, now: Bits) -> Operation:
    """Value codec for old and new bits of the changed elements: as asked, or the one with the smallest estimate."""
    if now.itemsize == 8:
        return Operation.OVERWRITE
    if codec is not Codec.AUTO:
        return Operation(codec)
    if now.size < FEW:
        return Operation.ULP
    from dcr_daemon.codec import kernels

    ulp, xor, overwrite = kernels.estimate_bits(old, now, -(-now.size // SAMPLE))
    costs = {Operation.ULP: MARGIN * ulp, Operation.XOR: xor, Operation.OVERWRITE: overwrite}
    return min(costs, key=lambda operation: costs[operation])
