"""What torch allocates while something runs."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Allocations(TorchDispatchMode):
    """Bytes of new tensors while it is on: the largest one, and the most that lived at once. Meta tensors have none."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.most = self._now = 0
        self._holders: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its own memory is seen one level below
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):  # fake, or traced: no memory
            return func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for t in tree_iter(result):
            if type(t) in (torch.Tensor, torch.nn.Parameter) and t.device.type != "meta":
                self._hold(t, t.untyped_storage().data_ptr(), t.untyped_storage().nbytes(), given)
        return result

    def _hold(self, tensor: torch.Tensor, address: int, size: int, given: set[int]) -> None:
        if address in given and not self._holders[address]:
            return
        if not self._holders[address]:
            self._now += size
            self.largest, self.most = max(self.largest, size), max(self.most, self._now)
        self._holders[address] += 1
        weakref.finalize(tensor, self._release, address, size)

    def _release(self, address: int, size: int) -> None:
        self._holders[address] -= 1
        self._now -= 0 if self._holders[address] else size
