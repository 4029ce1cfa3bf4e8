"""Live weights on any torch device: the same results as `HostMemory`.

Runs in the worker process. Positions are computed on the host. The device holds 8 bytes per changed element of width 2:
its place as u32, its value before and its value after; the rest follows from its row. They lie in one arena
(`arena.DeviceArena`), with the tables of the kernels, so the pause allocates nothing there: it starts the kernels and
fetches the sums. Old values are read at prepare, for many segments at once.

The kernels are Triton's where Triton can be imported for this device, and torch operations elsewhere; both give the
same bits. Jobs use their own stream, so that they neither wait for the model's stream nor delay it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.vllm_plugin.weights import faults
from dcr_daemon.vllm_plugin.weights.arena import DeviceArena
from dcr_daemon.vllm_plugin.weights.memory import (
    U64,
    Bits,
    Group,
    HostTables,
    LiveTensors,
    Reading,
    SliceCallback,
    ValueSet,
)
from dcr_daemon.vllm_plugin.weights.placement import Placement, PlacementRow
from dcr_daemon.vllm_plugin.weights.torch_kernels import SIGNED_DTYPES, SLICE, Lanes, TorchKernels

log = logging.getLogger("dcr.worker")

TRANSFER = 16 << 20  #: bytes of host memory through which all copies to and from the device go
TABLES = 96  #: bytes of the kernels' tables per group, at most


class TorchMemory(HostTables):
    """Live weights behind torch tensors. Host work (`locate`, `sum_bits`) is inherited."""

    def __init__(self, placement: Placement, live_tensors: LiveTensors, *, layout: Layout, arena: DeviceArena) -> None:
        super().__init__(placement, live_tensors, layout=layout, base=lambda row: 0)
        self._layout = layout
        self._arena = arena
        self._device = device = arena.device
        self._views = {name: storage_bits(tensor) for name, tensor in live_tensors.live.items()}
        self._device_kernels = device_kernels(self._rows, self._views, layout=layout, device=device)
        self._transfer = torch.empty(TRANSFER, dtype=torch.uint8, pin_memory=device.type == "cuda")
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

    # -- the transaction ------------------------------------------------------------------------------------------

    def gather(self, readings: Sequence[Reading]) -> None:
        """Uses the arena, which holds no transaction while one is prepared."""
        by_width: dict[int, list[Reading]] = {}
        for reading in readings:
            by_width.setdefault(reading.out.itemsize, []).append(reading)
        for width, wanted in by_width.items():
            most = max(self._arena.size // (4 + width + TABLES), 1)
            for some in _slices(wanted, most):
                with self._aside():
                    self._gather(some, SIGNED_DTYPES[width])

    def _gather(self, readings: Sequence[Reading], dtype: torch.dtype) -> None:
        self._arena.reset()
        ends = np.cumsum([reading.element.size for reading in readings]).tolist()
        lanes = Lanes(
            numbers=range(len(readings)),
            rows=[reading.row for reading in readings],
            ends=ends,
            element=self._up([reading.element for reading in readings], ends[-1], torch.int32),
            new=self._arena.take(ends[-1], dtype),
        )
        self._device_kernels.gather(lanes, self._arena)
        self._down(lanes.new, [reading.out for reading in readings])

    def set_groups(self, groups: Sequence[Group]) -> None:
        by_width: dict[int, list[int]] = {}
        for number, group in enumerate(groups):
            by_width.setdefault(group.new.itemsize, []).append(number)
        self._arena.reset()
        self._count = 0
        with self._aside():
            lanes = [self._lanes(groups, numbers, SIGNED_DTYPES[width]) for width, numbers in by_width.items()]
            self._device_kernels.set_lanes(lanes, self._arena)
        self._count = len(groups)

    def _lanes(self, groups: Sequence[Group], numbers: list[int], dtype: torch.dtype) -> Lanes:
        chosen = [groups[number] for number in numbers]
        ends = np.cumsum([group.element.size for group in chosen]).tolist()
        return Lanes(
            numbers=numbers,
            rows=[group.row for group in chosen],
            ends=ends,
            element=self._up([group.element for group in chosen], ends[-1], torch.int32),
            old=self._up([group.old for group in chosen], ends[-1], dtype),
            new=self._up([group.new for group in chosen], ends[-1], dtype),
        )

    def write(self, side: ValueSet, *, stop: int | None = None) -> U64:
        sums = self._device_kernels.write(side, self._count if stop is None else stop)
        if self._stream is not None:
            torch.get_device_module(self._device).synchronize(self._device)
        return sums

    # -- copies between host and device ---------------------------------------------------------------------------

    def _up(self, parts: Sequence[Bits], count: int, dtype: torch.dtype) -> torch.Tensor:
        """All parts behind one another, in the arena."""
        out = self._arena.take(count, dtype)
        transfer = self._transfer.view(dtype)
        host, at, filled = transfer.numpy(), 0, 0
        for part in parts:
            bits = part.view(host.dtype)
            for first in range(0, bits.size, host.size):
                piece = bits[first : first + host.size]
                if filled + piece.size > host.size:
                    out[at : at + filled].copy_(transfer[:filled])
                    at, filled = at + filled, 0
                host[filled : filled + piece.size] = piece
                filled += piece.size
        out[at : at + filled].copy_(transfer[:filled])
        return out

    def _down(self, values: torch.Tensor, outs: Sequence[Bits]) -> None:
        """Consecutive parts of `values` into host arrays."""
        transfer = self._transfer.view(values.dtype)
        host, at, have, taken = transfer.numpy(), 0, 0, 0
        for out in outs:
            bits, filled = out.view(host.dtype), 0
            while filled < bits.size:
                if taken == have:
                    have, taken = min(host.size, values.numel() - at), 0
                    transfer[:have].copy_(values[at : at + have])
                    at += have
                n = min(bits.size - filled, have - taken)
                bits[filled : filled + n] = host[taken : taken + n]
                filled, taken = filled + n, taken + n

    # -- whole rows -----------------------------------------------------------------------------------------------

    def box_sums(self, after_slice: SliceCallback, tensors: range | None = None) -> U64:
        boxes = [0] * self._boxes
        for number, row in enumerate(self._rows):
            if tensors is not None and row.tensor not in tensors:
                continue
            width, elements = self._layout[row.tensor].width, row.region.elements
            most = self._device_kernels.longest_run
            for first in range(0, elements, most):
                count = min(most, elements - first)
                with self._aside():
                    boxes[row.box] += self._device_kernels.sum_run(number, first, count)
                faults.after_slice()
                after_slice(count * width)
        return np.array([total % (1 << 64) for total in boxes], dtype=np.uint64)

    def overwrite(self, tensor: int, values: Bits, after_slice: SliceCallback) -> None:
        signed = values.view(f"<i{values.itemsize}")
        for number in self._by_tensor.get(tensor, []):
            row = self._rows[number]
            for first in range(0, row.region.elements, SLICE):
                count = min(SLICE, row.region.elements - first)
                with self._aside():
                    element, target = self._device_kernels.walk(row, first, count)
                    part = torch.from_numpy(signed[element.cpu().numpy() + row.region.dst]).to(self._device)
                    self._views[row.parameter].index_copy_(0, target, part)
                after_slice(count * values.itemsize)


def device_kernels(
    rows: Sequence[PlacementRow], views: Mapping[str, torch.Tensor], *, layout: Layout, device: torch.device
) -> TorchKernels:
    """Triton's kernels, compiled, where they run; those of torch elsewhere."""
    if device.type != "cpu" or os.environ.get("TRITON_INTERPRET") == "1":
        try:
            from dcr_daemon.vllm_plugin.weights.triton_kernels import TritonKernels

            kernels = TritonKernels(rows, views, layout=layout, device=device)
            kernels.warm()
        except ImportError as error:
            log.warning("dcr: Triton cannot be imported, the pause takes torch operations instead: %s", error)
        else:
            return kernels
    return TorchKernels(rows, views, layout=layout, device=device)


def _slices(readings: Sequence[Reading], most: int) -> Iterator[list[Reading]]:
    """Lists of readings with at most `most` elements each; a reading that is larger is cut."""
    some: list[Reading] = []
    space = most
    for reading in readings:
        first = 0
        while first < reading.element.size:
            part = slice(first, first + space)
            some.append(Reading(reading.row, reading.element[part], reading.target[part], reading.out[part]))
            first, space = first + some[-1].element.size, space - some[-1].element.size
            if space == 0:
                yield some
                some, space = [], most
    if some:
        yield some


def storage_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage as flat signed integers of the tensor's width."""
    dtype = SIGNED_DTYPES[tensor.element_size()]
    flat = torch.empty(0, dtype=dtype, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


def flip_bit(tensor: torch.Tensor, element: int) -> None:
    """For tests: flip the lowest bit of a storage element, as failing memory would."""
    storage_bits(tensor)[element] ^= 1
