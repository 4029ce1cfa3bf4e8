"""Small synthetic tensors in place of a model's: an export treats them as it treats the real ones.

A probe must not cost what it guards. The tensors keep the dtype and the structure of a shape (even axes stay even,
equal axes stay equal, different ones different). They are filled with what the probe tests: numbers that say where an
element comes from, values that a wrong cast would change, or random bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dcr_daemon.canonical.dtypes import item_size
from dcr_daemon.projection.values import dtype_of

Shape = tuple[int, ...]
Axes = Callable[[int, int], bool]  #: (axis, axes of the tensor) -> whether it may shrink

_CHOICES: tuple[tuple[int, Axes], ...] = (
    (8, lambda axis, ndim: axis == ndim - 1 and ndim > 1),  # most exports move whole rows
    (2, lambda axis, ndim: axis == ndim - 1 and ndim > 1),
    (8, lambda axis, ndim: axis == 0),
    (8, lambda axis, ndim: axis > 0),
    (8, lambda axis, ndim: True),
    (4, lambda axis, ndim: True),
)
DIGIT = 256  #: whole numbers below it are exact in every float of two bytes or more


def shrunk(shapes: Mapping[str, Shape], elements: int) -> Iterator[dict[str, Shape]]:
    """Shapes of stand-ins with at most `elements` together: the real ones if these fit, then the likeliest first."""
    tried = []
    for least, may in ((0, None), *_CHOICES):
        sizes = _sizes(shapes, least, may) if may else {}
        made = {
            name: tuple(sizes.get(n, n) if may and may(a, len(shape)) else n for a, n in enumerate(shape))
            for name, shape in shapes.items()
        }
        if made not in tried and sum(map(math.prod, made.values())) <= elements:
            tried.append(made)
            yield made


def _sizes(shapes: Mapping[str, Shape], least: int, may: Axes) -> dict[int, int]:
    """A small size for each real one that may shrink; different ones stay different, as exports may tell them apart."""
    real = {n for shape in shapes.values() for axis, n in enumerate(shape) if may(axis, len(shape))}
    small: dict[int, int] = {}
    for n in sorted(real):
        size = _small(n, least)
        while size in small.values() and size < n:
            size *= 2
        small[n] = min(size, n)
    return small


def _small(n: int, least: int) -> int:
    """Halve it while it is even and large; if it is still large then, cut it and keep it even or odd."""
    small = n
    while small > least and small % 2 == 0:
        small //= 2
    return small if small <= 2 * least else least + 2 - n % 2


def numbered(shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, int]]:
    """Tensors (int64) whose elements are all different numbers, and the first number of each."""
    firsts = dict(zip(shapes, itertools.accumulate(map(math.prod, shapes.values()), initial=0), strict=False))
    return {
        name: torch.arange(first, first + math.prod(shapes[name])).reshape(shapes[name])
        for name, first in firsts.items()
    }, firsts


def digits(numbers: Mapping[str, Any], dtypes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The same numbers in the tensors' own dtypes, one table per digit to the base `DIGIT`, lowest first; none if a
    dtype cannot hold a digit."""
    if any(not dtype.is_floating_point or dtype.itemsize < 2 for dtype in dtypes.values()):
        return []
    top = max((int(tensor.max()) for tensor in numbers.values() if tensor.numel()), default=0)
    places = 1 + sum(DIGIT**i <= top for i in range(1, 8))
    return [
        {name: (tensor // DIGIT**i % DIGIT).to(dtypes[name]) for name, tensor in numbers.items()} for i in range(places)
    ]


def special(shape: Shape, dtype: Any) -> Any:
    """A tensor of values that casts and kernels get wrong: zeros of both signs, 1, -3, denormals, the largest, infinite
    ones, NaNs with a payload; for integers 0, 1, -3 and the ends."""
    patterns = _float_patterns(dtype) if dtype.is_floating_point else _integer_patterns(dtype)
    repeats = -(-math.prod(shape) // patterns.numel()) if shape else 1
    return patterns.repeat(repeats)[: math.prod(shape)].reshape(shape)


def _float_patterns(dtype: Any) -> Any:
    width = dtype.itemsize * 8
    if width == 8:
        return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    of_width = {16: torch.int16, 32: torch.int32, 64: torch.int64}[width]
    ones = torch.tensor([0.0, 1.0, -3.0, -0.0, float("inf"), float("-inf")], dtype=dtype).view(of_width)
    info = torch.finfo(dtype)
    ends = torch.tensor([info.max, info.min, info.smallest_normal], dtype=dtype).view(of_width)
    infinite = int(ones[4])
    odd = [1, 3, infinite + 1, infinite + (1 << (width // 4 - 1)) + 5, -1]  # denormals, NaNs
    return torch.cat([ones, ends, torch.tensor(odd, dtype=torch.int64).to(of_width)]).view(dtype)


def _integer_patterns(dtype: Any) -> Any:
    if dtype is torch.bool or dtype.is_complex:
        return torch.tensor([0, 1, 1], dtype=dtype)
    info = torch.iinfo(dtype)
    return torch.tensor([0, 1, 2, info.max, info.min], dtype=dtype)


def random_bits(shape: Shape, dtype: Any, *, seed: int) -> Any:
    """Random bit patterns, the same for one seed; booleans are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    size = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def byte_rows(tensor: Any) -> Any:
    """Its bits, element by element in row-major order: a table of bytes, one row per element."""
    width = item_size(dtype_of("a tensor", tensor))
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).reshape(-1, width)


def same(left: Any, right: Any, *, exact: bool) -> Any:
    """Element by element, whether two tensors of one dtype have the same bits.

    Unless `exact`, all NaNs count as equal: which NaN torch's cast gives depends on the strides of its argument.
    """
    equal = (byte_rows(left) == byte_rows(right)).all(dim=1)
    if exact or not left.dtype.is_floating_point:
        return equal
    return equal | (left.reshape(-1).float().isnan() & right.reshape(-1).float().isnan())


def edited(tensor: Any, places: Sequence[int] | Any, *, seed: int) -> Any:
    """A copy with other bits at `places` (flat, row-major): every byte of an element changes, so that casts do."""
    changed = tensor.clone().reshape(-1)
    if tensor.dtype is torch.bool:
        changed[places] = ~changed[places]
    else:
        flat = changed.view(torch.uint8).reshape(-1, tensor.dtype.itemsize)
        generator = torch.Generator().manual_seed(seed)
        flat[places] ^= torch.randint(1, 256, flat[places].shape, dtype=torch.uint8, generator=generator)
    return changed.reshape(tensor.shape)
