"""Strided elements out of a source that reads consecutive ones only: a file, or a tensor in one.

The checkpoint reader (boxes of a base) and the reader of sharded checkpoints (pieces of a torch archive) call `gather`.
It takes a region (source elements to places of an array) and decides what is read at a time: rows that lie close
together are read with what is between them, because that costs less than a read of each; rows further apart are read
one by one. Beside the array it holds at most `SCRATCH` elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.region import Axis, Region, row_major

GAP = 16 << 10  #: bytes between two rows that are read over: copying them takes about as long as one more read
ROWS = 64 << 10  #: bytes of single rows that are read before they are copied: a transposed copy then fills cache lines
SCRATCH = 1 << 21  #: elements read at one go

#: fills an array (1-D, contiguous) with the source's elements from number `first` on
Fill = Callable[[int, Bits], None]


def gather(fill: Fill, region: Region, out: Bits) -> None:
    """Copy the source elements of `region` to their places in `out`.

    Args:
        fill: reads consecutive elements; what it raises, passes.
        region: source elements to elements of `out`.
        out: 1-D, contiguous; only the region's places are written.
    """
    axes = sorted((axis for axis in region.axes if axis[0] > 1), key=lambda axis: -axis[1])
    _gather(fill, region.src, axes, out[region.dst :])


def gather_box(fill: Fill, box: Box, *, out: Bits) -> None:
    """Copy a box of the source's elements to `out`, in the box's row-major order."""
    gather(fill, Region("", box.shape, box.dst, box.strides, 0, row_major(box.shape)), out)


def _gather(fill: Fill, first: int, axes: Sequence[Axis], out: Bits) -> None:
    """Copy from source element `first` on to `out`; `axes` by falling source stride."""
    if _is_run(axes):
        fill(first, out[: _reach(axes)])
        return
    (n, src, dst), inner = axes[0], axes[1:]
    reach = _reach(inner)
    if _close(inner, out.itemsize) and reach <= SCRATCH:
        if (src - reach) * out.itemsize <= GAP:
            _read_together(fill, first, axes=axes, out=out)
            return
        if not _is_run(inner):
            _read_rows(fill, first, axes=axes, out=out)
            return
        for i in range(n):
            fill(first + i * src, out[i * dst : i * dst + reach])
        return
    for i in range(n):
        _gather(fill, first + i * src, inner, out[i * dst :])


def _read_together(fill: Fill, first: int, *, axes: Sequence[Axis], out: Bits) -> None:
    """Rows along the first axis with what lies between them, as many at a time as fit the scratch memory."""
    (n, src, dst), reach = axes[0], _reach(axes[1:])
    limit = min(n, max(1, (SCRATCH - reach) // src + 1))
    for at in range(0, n, limit):
        count = min(limit, n - at)
        scratch = np.empty((count - 1) * src + reach, out.dtype)
        fill(first + at * src, scratch)
        _copy(scratch, src, out=out[at * dst :], axes=[(count, src, dst), *axes[1:]])


def _read_rows(fill: Fill, first: int, *, axes: Sequence[Axis], out: Bits) -> None:
    """Rows along the first axis one by one, and then several copied together."""
    (n, src, dst), reach = axes[0], _reach(axes[1:])
    limit = max(1, min(n, ROWS // (reach * out.itemsize)))
    scratch = np.empty((limit, reach), out.dtype)
    for at in range(0, n, limit):
        count = min(limit, n - at)
        for i in range(count):
            fill(first + (at + i) * src, scratch[i])
        _copy(scratch, reach, out=out[at * dst :], axes=[(count, src, dst), *axes[1:]])


def _copy(scratch: Bits, row: int, *, out: Bits, axes: Sequence[Axis]) -> None:
    """Copy strided elements; rows along the first axis begin `row` elements apart in `scratch`."""
    shape = tuple(n for n, _, _ in axes)
    source = (row, *(src for _, src, _ in axes[1:]))
    target = tuple(dst for _, _, dst in axes)
    _strided(out, shape, target)[...] = _strided(scratch, shape, source)


def _strided(bits: Bits, shape: tuple[int, ...], strides: tuple[int, ...]) -> Bits:
    return np.lib.stride_tricks.as_strided(bits, shape, tuple(stride * bits.itemsize for stride in strides))


def _reach(axes: Sequence[Axis]) -> int:
    """Source elements from the first to the last one, both counted."""
    return 1 + sum((n - 1) * src for n, src, _ in axes)


def _is_run(axes: Sequence[Axis]) -> bool:
    """Whether the elements are consecutive in the source and in the array, in the same order."""
    span = 1
    for n, src, dst in reversed(axes):
        if src != span or dst != span:
            return False
        span *= n
    return True


def _close(axes: Sequence[Axis], width: int) -> bool:
    """Whether all elements are so near each other that they are read together."""
    reach = 1
    for n, src, _ in reversed(axes):
        if (src - reach) * width > GAP:
            return False
        reach += (n - 1) * src
    return True
