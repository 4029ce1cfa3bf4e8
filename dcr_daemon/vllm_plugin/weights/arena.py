"""Memory for one transaction, reserved once and used by one transaction after another: on the host and on a device.

Runs in the worker process. `worker.session` makes the host's at attach; `worker.reserve` makes the device's before
vLLM gives the rest of the device to its KV cache. `prepare` takes pieces front to back, and nothing is given back one
by one: the next transaction starts at the front again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


class ArenaFull(Exception):
    """The arena has no space for this; the text says how large it is, and where."""


class _Taker:
    """Hands out byte ranges of `size` bytes."""

    alignment = 8
    where = "host memory"

    def __init__(self, size: int) -> None:
        self.size = size
        self._used = 0

    def reset(self) -> None:
        self._used = 0

    def _next(self, count: int) -> tuple[int, int]:
        """The next `count` bytes as (first, end); raises `ArenaFull`."""
        start = -(-self._used // self.alignment) * self.alignment
        end = start + count
        if end > self.size:
            raise ArenaFull(f"{self.size} bytes of {self.where}")
        self._used = end
        return start, end


class Arena(_Taker):
    """`cap` bytes of host memory."""

    def __init__(self, cap: int) -> None:
        super().__init__(max(cap, self.alignment))
        self._bytes = np.empty(self.size, dtype=np.uint8)
        self._bytes.fill(0)  # overcommitted pages would be found missing inside a pause

    def take(self, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """`count` elements; raises `ArenaFull`."""
        start, end = self._next(count * np.dtype(dtype).itemsize)
        return self._bytes[start:end].view(dtype)


class DeviceArena(_Taker):
    """Device memory for what a transaction of `cap` bytes on the host needs there.

    A changed element of width 2 takes 12 bytes on the host (two places and two values) and 8 on the device (one place
    and two values); wider ones come closer to the host's size, and then fewer versions fit.

    Raises `torch.OutOfMemoryError`.
    """

    alignment = 16  # Triton compiles another kernel for pointers that are aligned otherwise
    where = "device memory"

    def __init__(self, cap: int, device: torch.device) -> None:
        size = max(cap * 2 // 3 + cap // 64, 1 << 12)  # and the tables of groups and of tiles
        super().__init__(size)
        self.cap = cap
        self.device = device
        self._bytes = torch.empty(size, dtype=torch.uint8, device=device)

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`count` elements; raises `ArenaFull`."""
        start, end = self._next(count * dtype.itemsize)
        return self._bytes[start:end].view(dtype)
