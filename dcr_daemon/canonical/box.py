"""A box: a strided piece of one canonical tensor, in elements (docs/FORMAT.md 2).

Positions of a segment are ordinals in the box's own row-major order, so a column shard costs no more bits than
a contiguous one. A whole or row-sharded tensor is a box of rank 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_RANK = 4


@dataclass(frozen=True, slots=True)
class Box:
    """`shape[i]` elements along axis i, `strides[i]` canonical elements apart, the first one at `dst`."""

    dst: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.shape) <= MAX_RANK or len(self.shape) != len(self.strides):
            raise ValueError(f"a box has rank 1 to {MAX_RANK} and one stride per axis: {self}")
        if self.dst < 0 or any(n < 1 for n in self.shape) or any(s < 1 for s in self.strides):
            raise ValueError(f"a box has a positive shape, positive strides and no negative start: {self}")

    @classmethod
    def flat(cls, start: int, count: int) -> Box:
        """`count` consecutive canonical elements from `start`."""
        return cls(start, (count,), (1,))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def last(self) -> int:
        """Canonical index of the last element."""
        return self.dst + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    @property
    def contiguous(self) -> bool:
        return len(self.shape) == 1 and self.strides == (1,)

    def fits(self, elements: int) -> bool:
        """Whether the box lies inside a tensor of `elements` and visits no element twice.

        Sorted by stride, an axis must step over everything the finer axes span. Every piece of a dense tensor
        does, transposed or interleaved; what does not could name one element under two positions.
        """
        span = 0
        for stride, n in sorted(zip(self.strides, self.shape, strict=True)):
            if n == 1:
                continue
            if stride <= span:
                return False
            span += (n - 1) * stride
        return self.dst + span < elements

    def canonical(self, ordinals: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Canonical element index of each ordinal (int64, same length)."""
        if self.contiguous:
            return ordinals + self.dst
        rest, index = ordinals, np.full_like(ordinals, self.dst)
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            rest, place = np.divmod(rest, n)
            index += place * stride
        return index
