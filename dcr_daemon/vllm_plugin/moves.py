"""Loaders that reorder a checkpoint tensor before they copy it: which element each place of the result came from.

A view needs no help: its offset and strides say it all. A concatenation of views, or a reshape of a transposed one,
makes new memory. The same operation, done on the elements' numbers instead of the elements, tells what lies where; a
copy out of it is then cut into the strided boxes that it consists of. Nothing is assumed about the operation but that
it moves elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten

#: Views that fail after a copy which the recorder left out, because in memory of its own they would not.
RESHAPES = (aten.view.default, aten._unsafe_view.default)
JOINS = (aten.cat.default, aten.stack.default)
LIMIT = 1 << 28  #: elements of one tensor; their numbers take 4 bytes each, for a moment
BOXES = 4096  #: of one copy; more is no reordering of blocks


@dataclass(frozen=True, slots=True)
class Box:
    """`shape` elements from number `src` to place `dst`, with one stride per axis on either side."""

    src: int
    dst: int
    shape: tuple[int, ...]
    src_strides: tuple[int, ...]
    dst_strides: tuple[int, ...]


class Moves:
    """What was made out of checkpoint tensors, by storage: how it was made, not the numbers, which are large."""

    def __init__(self) -> None:
        self._recipes: dict[int, Callable[[], torch.Tensor]] = {}
        self._last: tuple[int, torch.Tensor] | None = None

    def follow(self, func: Callable[..., Any], args: Any, kwargs: Any) -> torch.Tensor:
        """Do a move on meta tensors and remember it. The caller keeps the result alive: its storage is the key.

        Raises `ValueError` if the tensor is too large to follow.
        """
        sources = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(_elements(source) > LIMIT for source in sources):
            raise ValueError(f"the loader reorders more than {LIMIT} elements")

        def number(leaf: Any) -> Any:
            return self.numbers(leaf).contiguous() if isinstance(leaf, torch.Tensor) else leaf

        def renumber() -> torch.Tensor:
            return func(*tree_map(number, args), **tree_map(number, kwargs)).contiguous().reshape(-1)

        plain = [torch.empty(source.shape, dtype=source.dtype, device="meta") for source in sources]
        instead = dict(zip(map(id, sources), plain, strict=True))
        shape = func(*tree_map(lambda leaf: instead.get(id(leaf), leaf), args), **kwargs).shape
        result = torch.empty(shape, dtype=sources[0].dtype, device="meta")
        self._recipes[result.untyped_storage()._cdata] = renumber
        return result

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._recipes

    def numbers(self, tensor: torch.Tensor) -> torch.Tensor:
        """The checkpoint tensor's element at each place (int32, the shape of `tensor`)."""
        storage = tensor.untyped_storage()._cdata
        if storage not in self._recipes:
            whole = torch.arange(_elements(tensor), dtype=torch.int32)
        elif self._last is not None and self._last[0] == storage:
            whole = self._last[1]
        else:
            whole = self._recipes[storage]()
            self._last = storage, whole
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _elements(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes() // tensor.element_size())


def boxes(numbers: torch.Tensor, strides: tuple[int, ...]) -> list[Box] | None:
    """A copy of elements `numbers` to places `strides` apart, as strided boxes from place 0 on.

    None if it is not made of at most `BOXES`. An axis may be cut into runs only if all others go on alike at each of
    its places, which is so where blocks were reordered.
    """
    origin = numbers[(0,) * numbers.dim()]
    profiles = [numbers[tuple(slice(None) if a == axis else 0 for a in range(numbers.dim()))] - origin
                for axis in range(numbers.dim())]  # fmt: skip
    total = origin
    for axis, profile in enumerate(profiles):
        total = total + profile.reshape([-1 if a == axis else 1 for a in range(numbers.dim())])
    if not torch.equal(total, numbers):
        return None
    axes = [_groups(profile.tolist(), stride) for profile, stride in zip(profiles, strides, strict=True)]
    if math.prod(map(len, axes)) > BOXES:
        return None
    return [
        Box(
            int(origin) + sum(part.src for part in parts),
            sum(part.dst for part in parts),
            tuple(n for part in parts for n in part.shape),
            tuple(n for part in parts for n in part.src_strides),
            tuple(n for part in parts for n in part.dst_strides),
        )
        for parts in itertools.product(*axes)
    ]


def _groups(profile: list[int], stride: int) -> list[Box]:
    """One axis as runs of equal steps, equal runs that are equally far apart taken together."""
    runs: list[tuple[int, int, int]] = []  # place, length, step
    at = 0
    while at < len(profile):
        step = profile[at + 1] - profile[at] if at + 1 < len(profile) else 0
        end = at + 1
        while step > 0 and end < len(profile) and profile[end] - profile[end - 1] == step:
            end += 1
        runs.append((at, end - at, step if end - at > 1 else 1))
        at = end
    found = []
    first = 0
    while first < len(runs):
        at, length, step = runs[first]
        count, gap = 1, 0
        for place, *alike in runs[first + 1 :]:
            gap = gap or profile[place] - profile[at]
            if alike != [length, step] or gap <= 0 or profile[place] - profile[at] != count * gap:
                break
            count += 1
        steps = (gap, step) if count > 1 else (step, step)
        found.append(Box(profile[at], at * stride, (count, length), steps, (length * stride, stride)))
        first += count
    return found
