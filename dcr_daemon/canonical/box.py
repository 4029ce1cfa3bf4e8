"""A box: a strided piece of one canonical tensor, in elements (docs/FORMAT.md 2).

Positions of a segment are ordinals in the box's own row-major order, so a column shard costs no more bits than
a contiguous one. A whole or row-sharded tensor is a box of rank 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_RANK = 4


def nested(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether each axis, sorted by stride, steps over all that the finer axes span: then no element is visited
    twice."""
    span = 0
    for stride, n in sorted(zip(strides, shape, strict=True)):
        if n == 1:
            continue
        if stride <= span:
            return False
        span += (n - 1) * stride
    return True


def split_shape(shape: Sequence[int], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a row-major array of `shape` into parts of at most `limit` consecutive elements each.

    Yields starts and sizes per axis, in order: whole rows while a row has at most `limit` elements, else parts of one.
    """
    if not shape:
        yield (), ()
        return
    rows, row = shape[0], math.prod(shape[1:])
    if row <= limit:
        step = max(1, limit // row)
        for at in range(0, rows, step):
            yield (at, *[0] * (len(shape) - 1)), (min(step, rows - at), *shape[1:])
        return
    for at in range(rows):
        for starts, sizes in split_shape(shape[1:], limit):
            yield (at, *starts), (1, *sizes)


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

    def split(self, limit: int) -> Iterator[Box]:
        """The box as boxes of at most `limit` elements, in its own row-major order."""
        if self.elements <= limit:
            yield self
            return
        for starts, sizes in split_shape(self.shape, limit):
            axes = [(n, stride) for n, stride in zip(sizes, self.strides, strict=True) if n > 1] or [(1, 1)]
            first = self.dst + sum(at * stride for at, stride in zip(starts, self.strides, strict=True))
            yield Box(first, tuple(n for n, _ in axes), tuple(stride for _, stride in axes))

    def fits(self, elements: int) -> bool:
        """Whether the box lies inside a tensor of `elements` and visits no element twice.

        Every piece of a dense tensor does, transposed or interleaved; what does not could name one element under
        two positions.
        """
        return self.last < elements and nested(self.shape, self.strides)

    def canonical(self, ordinals: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Canonical index of each ordinal (int64, same length)."""
        if self.contiguous:
            return ordinals + self.dst
        from dcr_daemon.canonical import kernels

        shape, strides = _padded(self.shape, self.strides)
        where = np.require(ordinals, dtype=np.int64, requirements=["C", "W"])
        found = np.empty(where.size, dtype=np.int64)
        kernels.place(where, self.dst, shape, strides, found)
        return found

    @property
    def ascending(self) -> bool:
        """Whether ordinals rise with canonical elements, in a box that `fits`: its strides fall."""
        steps = [stride for n, stride in zip(self.shape, self.strides, strict=True) if n > 1]
        return all(outer > inner for outer, inner in itertools.pairwise(steps))

    def apart(self, other: Box) -> bool:
        """Whether the two provably share no element, by their ends or by remainders; exact for boxes cut alike.

        False proves nothing: they may still have no element in common.
        """
        if self.last < other.dst or other.last < self.dst:
            return True
        for modulus in {*self.strides, *other.strides}:
            one, two = self.remainders(modulus), other.remainders(modulus)
            if one and two and (one[1] < two[0] or two[1] < one[0]):
                return True
        return False

    def remainders(self, modulus: int) -> tuple[int, int] | None:
        """The interval [first, last] of remainders that its elements have; None if it wraps around."""
        first = self.dst % modulus
        steps = zip(self.shape, self.strides, strict=True)
        last = first + sum((n - 1) * stride for n, stride in steps if stride % modulus)
        return (first, last) if last < modulus else None

    def view(self, bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The box inside a whole tensor's flat bits: an array of the box's shape over the same memory.

        Raises:
            ValueError: it reaches beyond them.
        """
        if self.last >= bits.size:
            raise ValueError(f"{self} does not lie inside {bits.size} elements")
        steps = tuple(stride * bits.itemsize for stride in self.strides)
        return np.lib.stride_tricks.as_strided(bits[self.dst :], self.shape, steps)

    def ordinals(self, canonical: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Which of `canonical` lie in the box (bool, same length), and the ordinals of those that do (int64).

        The inverse of `canonical`, for boxes that `fits` accepts: their strides are nested.
        """
        rest, ordinal = canonical - self.dst, np.zeros_like(canonical)
        inside = rest >= 0
        weights = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        for stride, n, weight in sorted(zip(self.strides, self.shape, weights, strict=True), reverse=True):
            if n == 1:
                continue
            place, rest = np.divmod(rest, stride)
            inside &= place < n
            ordinal += place * weight
        inside &= rest == 0
        return inside, ordinal[inside]


@lru_cache(maxsize=1 << 10)
def _padded(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Shape and strides with `MAX_RANK` axes, as kernels take them."""
    missing = MAX_RANK - len(shape)
    return np.array((1,) * missing + shape, dtype=np.int64), np.array((0,) * missing + strides, dtype=np.int64)
