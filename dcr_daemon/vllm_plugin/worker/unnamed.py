"""Parameters that the stream does not name: the vision tower of a model whose stream has only its language model.

Runs in the worker process. `loader.place_model` decides which parameters these are; `attachment` watches them. They
stay as vLLM loaded them. No version says which bits they have, so the first attach sums them, each later attach
compares, and so does the scrub: a writer from outside, or damaged memory, is noticed as for the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import numpy as np
import torch

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.vllm_plugin.calls import TensorHandling
from dcr_daemon.vllm_plugin.loader.recorder import DTYPES
from dcr_daemon.vllm_plugin.weights.memory import SliceCallback, WeightMemory
from dcr_daemon.vllm_plugin.weights.placement import Copy, Placement, copy_region

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_first_sums: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, int]] = weakref.WeakKeyDictionary()

Open = Callable[[Placement, Layout], WeightMemory]


class UnnamedParameters:
    """Sums of some live tensors, by name. Holds no copy of them.

    Args:
        live: the tensors; none if the stream names all parameters.
        open_memory: makes the memory through which they are summed.
    """

    def __init__(self, model: torch.nn.Module, live: Mapping[str, torch.Tensor], open_memory: Open) -> None:
        self.names = sorted(name for name, tensor in live.items() if tensor.numel())
        layout = Layout([TensorSpec(name, _NAMES[live[name].dtype], tuple(live[name].shape)) for name in self.names])
        self._placement = _place_whole(layout, live)
        self._memory = open_memory(self._placement, layout) if self.names else None
        self._wanted = _first_sums.setdefault(model, {})

    def changed(self, after_slice: SliceCallback = lambda size: None, part: range | None = None) -> list[str]:
        """Those of the tensors number `part` (default: all) that do not have the bits that were seen first; nothing is
        summed if a tensor is no longer where it was."""
        if self._memory is None:
            return []
        if (moved := self._memory.moved_parameter()) is not None:
            return [moved]
        numbers = part if part is not None else range(len(self.names))
        totals = np.zeros(len(self.names), dtype=np.uint64)
        boxes = [box.tensor for box in self._placement.boxes]
        np.add.at(totals, boxes, self._memory.box_sums(after_slice, numbers))
        found = {self.names[number]: int(totals[number]) for number in numbers}
        return [name for name, total in found.items() if self._wanted.setdefault(name, total) != total]

    def share(self, tensors: range, of: int) -> range:
        """The tensors that go with `tensors` of the layout's `of`, so that batches of a scrub have all in turn."""
        return range(tensors.start * len(self.names) // of, tensors.stop * len(self.names) // of)


def _place_whole(layout: Layout, live: Mapping[str, torch.Tensor]) -> Placement:
    """Each tensor as it lies in its own storage."""
    placement = Placement(held=[TensorHandling.PLACED] * len(layout))
    for number, spec in enumerate(layout):
        tensor, order = live[spec.name], torch.empty(spec.shape, device="meta").stride()
        region = copy_region(spec.name, 0, element=0, axes=zip(spec.shape, tensor.stride(), order, strict=True))
        placement.add(Copy(spec.name, region), tensor=number, offset=tensor.storage_offset(), repack=None)
    return placement
