"""Live weights on any torch device: the same results as `HostMemory`, from torch operations.

Runs in the worker process. Positions are computed on the host; old values are copied from the device once, at prepare.
`set_groups` copies targets, both values and the constant part of every summand to the device, so that the pause has
one indexed write per parameter and one pass of integer arithmetic, and transfers only the sums.

Torch has no unsigned 64-bit arithmetic on devices. int64 wraps in the same way; only right shifts need their sign bits
masked. Jobs use their own stream, so that they neither wait for the model's stream nor delay it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.vllm_plugin.weights import faults
from dcr_daemon.vllm_plugin.weights.memory import (
    U32,
    U64,
    Bits,
    Group,
    HostTables,
    LiveTensors,
    SliceCallback,
    ValueSet,
)
from dcr_daemon.vllm_plugin.weights.placement import Placement, PlacementRow

SIGNED_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SLICE = 1 << 22  #: elements per step, bounding temporary memory to about 200 MiB


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


FIRST, SECOND = _signed(0xFF51AFD7ED558CCD), _signed(0xC4CEB9FE1A85EC53)


def _shift(words: torch.Tensor) -> torch.Tensor:
    """Logical right shift by 33."""
    return (words >> 33) & ((1 << 31) - 1)


def mix(words: torch.Tensor) -> torch.Tensor:
    """murmur3's finaliser on int64 tensors that stand for uint64."""
    words = (words ^ _shift(words)) * FIRST
    words = (words ^ _shift(words)) * SECOND
    return words ^ _shift(words)


def summands(values: torch.Tensor, element: torch.Tensor, *, key: int | torch.Tensor, width: int) -> torch.Tensor:
    """The summands of canonical elements with these bits, in the fingerprint (int64)."""
    bits = values.to(torch.int64)
    if width == 1:
        return mix((element << 16 | (bits & 0xFF)) ^ key)
    per = width // 2
    total = torch.zeros_like(element)
    for unit in range(per):
        word = (bits >> (16 * unit)) & 0xFFFF
        total += mix(((element * per + unit) << 16 | word) ^ key)
    return total


@dataclass(slots=True)
class Batch:
    """Loaded groups of one parameter. `ends`: exclusive ends of the groups `numbers` in the batch."""

    view: torch.Tensor
    index: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor
    element: torch.Tensor
    key: torch.Tensor
    width: int
    numbers: list[int]
    ends: torch.Tensor


class TorchMemory(HostTables):
    """Live weights behind torch tensors. Host work (`locate`, `sum_bits`) is inherited."""

    def __init__(
        self, placement: Placement, live_tensors: LiveTensors, *, layout: Layout, device: torch.device
    ) -> None:
        super().__init__(placement, live_tensors, layout=layout, base=lambda row: 0)
        self._layout = layout
        self._device = device
        self._views = {name: storage_bits(tensor) for name, tensor in live_tensors.live.items()}
        self._repacks: dict[int, torch.Tensor] = {}
        self._batches: list[Batch] = []
        self._count = 0
        streams = getattr(torch.get_device_module(device), "Stream", None) if device.type != "cpu" else None
        self._stream = streams(device) if streams is not None else None

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Run the body on this device and on the background thread's own stream; wait for it at the end."""
        if self._stream is None:
            yield
            return
        module = torch.get_device_module(self._device)
        module.set_device(self._device)
        with module.stream(self._stream):
            yield
            self._stream.synchronize()

    def gather(self, row: int, targets: U32, out: Bits) -> None:
        with self._aside():
            place = self._rows[row]
            index = torch.from_numpy(targets.astype(np.int64)).to(self._device) + place.base
            values = self._views[place.parameter][index].cpu().numpy()
            out[:] = values.view(out.dtype)

    def set_groups(self, groups: Sequence[Group]) -> None:
        by_parameter: dict[str, list[int]] = {}
        for number, group in enumerate(groups):
            by_parameter.setdefault(self._rows[group.row].parameter, []).append(number)
        self._batches = []  # the device must not hold two transactions
        with self._aside():
            self._batches = [self._batch(name, groups, numbers) for name, numbers in by_parameter.items()]
        self._count = len(groups)

    def _batch(self, parameter: str, groups: Sequence[Group], numbers: list[int]) -> Batch:
        chosen = [groups[n] for n in numbers]
        rows = [self._rows[group.row] for group in chosen]
        width = self._layout[rows[0].tensor].width
        sizes = [group.element.size for group in chosen]

        def up(parts: list[Any]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate(parts)).to(self._device)

        signed = np.dtype(f"<i{width}")
        keys = self._layout.keys.view(np.int64)
        return Batch(
            view=self._views[parameter],
            index=up([g.target.astype(np.int64) + row.base for g, row in zip(chosen, rows, strict=True)]),
            old=up([g.old.view(signed) for g in chosen]),
            new=up([g.new.view(signed) for g in chosen]),
            element=up([g.element.astype(np.int64) + row.region.dst for g, row in zip(chosen, rows, strict=True)]),
            key=up([np.full(size, keys[row.tensor]) for size, row in zip(sizes, rows, strict=True)]),
            width=width,
            numbers=numbers,
            ends=torch.tensor(np.cumsum(sizes), device=self._device),
        )

    def scatter(self, side: ValueSet, *, stop: int | None = None) -> None:
        """`stop` cuts at a batch: all groups of the parameters whose first group is below it."""
        for batch in self._batches:
            if stop is None or batch.numbers[0] < stop:
                batch.view[batch.index] = batch.new if side is ValueSet.NEW else batch.old
        self._finish()

    def _finish(self) -> None:
        if self._stream is not None:
            torch.get_device_module(self._device).synchronize(self._device)

    def group_sums(self) -> U64:
        sums = np.zeros(self._count, dtype=np.uint64)
        pending = [(batch, _totals(batch)) for batch in self._batches]  # launch all first, then fetch each result once
        for batch, totals in pending:
            sums[batch.numbers] = totals.cpu().numpy().view(np.uint64)
        return sums

    def box_sums(self, after_slice: SliceCallback, tensors: range | None = None) -> U64:
        boxes = [0] * self._boxes
        for number, row in enumerate(self._rows):
            if tensors is not None and row.tensor not in tensors:
                continue
            key, width = int(self._layout.keys.view(np.int64)[row.tensor]), self._layout[row.tensor].width
            for first in range(0, row.region.elements, SLICE):
                with self._aside():
                    element, target = self._walk(
                        number, row, first=first, count=min(SLICE, row.region.elements - first)
                    )
                    values = self._views[row.parameter][target]
                    boxes[row.box] += int(summands(values, element, key=key, width=width).sum().item())
                faults.after_slice()
                after_slice(element.numel() * width)
        return np.array([total % (1 << 64) for total in boxes], dtype=np.uint64)

    def overwrite(self, tensor: int, values: Bits, after_slice: SliceCallback) -> None:
        signed = values.view(f"<i{values.itemsize}")
        for number in self._by_tensor.get(tensor, []):
            row = self._rows[number]
            for first in range(0, row.region.elements, SLICE):
                with self._aside():
                    element, target = self._walk(
                        number, row, first=first, count=min(SLICE, row.region.elements - first)
                    )
                    values = torch.from_numpy(signed[element.cpu().numpy()]).to(self._device)
                    self._views[row.parameter][target] = values
                after_slice(element.numel() * values.itemsize)

    def _walk(self, number: int, row: PlacementRow, *, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Canonical element and live storage element of ordinals [first, first + count) of a row."""
        rest = torch.arange(first, first + count, dtype=torch.int64, device=self._device)
        element, local = torch.full_like(rest, row.region.dst), torch.zeros_like(rest)
        for n, target, source in reversed(row.region.axes):
            place = rest % n
            rest = rest // n
            element += place * source
            local += place * target
        if row.repack is None:
            return element, local + row.base
        table = self._repacks.get(id(row.repack))
        if table is None:
            table = self._repacks[id(row.repack)] = torch.from_numpy(row.repack.table.astype(np.int64)).to(self._device)
        return element, table[local + row.inner] + row.base


def storage_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage as flat signed integers of the tensor's width."""
    dtype = SIGNED_DTYPES[tensor.element_size()]
    flat = torch.empty(0, dtype=dtype, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


def flip_bit(tensor: torch.Tensor, element: int) -> None:
    """For tests: flip the lowest bit of a storage element, as failing memory would."""
    storage_bits(tensor)[element] ^= 1


def _totals(batch: Batch) -> torch.Tensor:
    """Sum per group, as differences of running sums; both wrap modulo 2^64."""
    running = torch.zeros(1, dtype=torch.int64, device=batch.index.device)
    parts = [running]
    for first in range(0, batch.index.numel(), SLICE):
        part = slice(first, first + SLICE)
        values = batch.view[batch.index[part]]
        summed = summands(values, batch.element[part], key=batch.key[part], width=batch.width).cumsum(0) + parts[-1][-1]
        parts.append(summed)
    running = torch.cat(parts)
    ends = running[batch.ends]
    starts = running[torch.cat([torch.zeros_like(batch.ends[:1]), batch.ends[:-1]])]
    return ends - starts
