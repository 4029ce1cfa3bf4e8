"""Follows loaders that reorder a checkpoint tensor before they copy it: which element is at each place of the result.

Runs in the worker process, called by `recorder`. The offset and strides of a view say where its elements are. But a
concatenation of views, or a reshape of a transposed view, makes new memory. The same operation on the elements'
numbers, in place of the elements, shows where each one is; a copy out of the result is then fitted with regions. The
only assumption about the operation is that it moves elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from dcr_daemon.canonical.fit import fit
from dcr_daemon.canonical.region import Indices, Region
from dcr_daemon.errors import Incompatible
from dcr_daemon.vllm_plugin.weights.placement import copy_region

aten = torch.ops.aten

#: Views that fail after a copy that the recorder did not execute; in memory of their own they would succeed.
RESHAPES = (aten.view.default, aten._unsafe_view.default)
JOINS = (aten.cat.default, aten.stack.default)
LIMIT = 1 << 28  #: elements of one tensor; their numbers take 4 bytes each while a copy is fitted
BOXES = 4096  #: boxes of one copy; a copy with more is no reordering of blocks


class ReorderTracker:
    """How tensors were made out of checkpoint tensors, by storage. Keeps the operation; the numbers would be large."""

    def __init__(self) -> None:
        self._recipes: dict[int, Callable[[], torch.Tensor]] = {}
        self._last: tuple[int, torch.Tensor] | None = None

    def follow(self, func: Callable[..., Any], args: Any, *, kwargs: Any) -> torch.Tensor:
        """Do a reordering on meta tensors and remember it. The caller keeps the result alive: its storage is the key.

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


def regions(tensor: str, numbers: torch.Tensor, strides: tuple[int, ...]) -> list[Region] | None:
    """A copy of a checkpoint tensor's elements `numbers` to places `strides` apart, as regions from place 0 on.

    None if it consists of more than `BOXES`. Each axis is fitted by itself. That is right only if the other axes are
    the same at each of its places (checked first), as they are where blocks were reordered; it avoids a fit over all
    elements.

    Raises:
        Unplaceable: elements or places overlap.
    """
    origin = numbers[(0,) * numbers.dim()]
    profiles = [numbers[tuple(slice(None) if a == axis else 0 for a in range(numbers.dim()))] - origin
                for axis in range(numbers.dim())]  # fmt: skip
    total = origin
    for axis, profile in enumerate(profiles):
        total = total + profile.reshape([-1 if a == axis else 1 for a in range(numbers.dim())])
    if not torch.equal(total, numbers):
        return None
    try:
        axes = [
            _along(profile.numpy().astype(np.int64), stride) for profile, stride in zip(profiles, strides, strict=True)
        ]
    except Incompatible:
        return None
    if math.prod(map(len, axes)) > BOXES:
        return None
    lowest = int(origin) + sum(int(profile.min()) for profile in profiles)
    return [
        copy_region(
            tensor,
            sum(part.src for part in parts),
            element=lowest + sum(part.dst for part in parts),
            axes=[axis for part in parts for axis in part.axes],
        )
        for parts in itertools.product(*axes)
    ]


def _along(profile: Indices, stride: int) -> list[Region]:
    """Fit one axis: its places, and the elements there counted from the lowest.

    A loader may place an element several times (heads that are replicated over more ranks than there are heads). All
    first copies are fitted together, then all second ones, so that each has the regions of a rank with one copy.
    """
    order = np.argsort(profile, kind="stable")
    ordered = profile[order]
    fresh = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 1))
    copy = np.empty_like(order)
    copy[order] = np.arange(order.size) - np.repeat(fresh, np.diff(fresh, append=order.size))
    if int(copy.max()) >= BOXES:
        raise Incompatible("an element is placed too often")
    places = np.arange(profile.size, dtype=np.int64) * stride
    elements = profile - ordered[0]
    layers = [copy == number for number in range(int(copy.max()) + 1)]
    return [region for layer in layers for region in fit("", places[layer], elements[layer], limit=BOXES)]
