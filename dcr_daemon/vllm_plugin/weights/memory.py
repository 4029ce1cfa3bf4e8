"""Access to live weights for jobs and transactions: gather, write, sum, overwrite. The port, and host memory.

Runs in the worker process; `worker.attachment`, `prepare` and `transaction` call it. `WeightMemory` is the port;
`HostMemory` implements it with compiled loops over raw addresses, `torch_memory.TorchMemory` with torch operations on
any device. Both give the same bits. Bounds are checked once, when a memory is made, against the storages as they are
then; `moved_parameter` says later whether a storage has moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from dcr_daemon.canonical.dtypes import bits_dtype
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.vllm_plugin.weights import faults
from dcr_daemon.vllm_plugin.weights.placement import Placement, PlacementRow

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Bits = npt.NDArray[Any]
SliceCallback = Callable[[int], None]

SWEEP = 1 << 22  #: elements per slice: takes milliseconds, so that a cancelled job stops soon


class ValueSet(IntEnum):
    """Which values of a transaction to write."""

    OLD = 0
    NEW = 1


@dataclass(slots=True)
class Group:
    """Changed elements of one row: parallel arrays, ascending in `element`.

    `element`: canonical, from the row's start. `target`: live, from the row's base. `old`, `new`: absolute bits.
    """

    row: int
    hop: int
    element: U32
    target: U32
    old: Bits
    new: Bits


@dataclass(slots=True)
class Reading:
    """Places of one row whose live bits are wanted in `out`; `element` and `target` as in `Group`."""

    row: int
    element: U32
    target: U32
    out: Bits


class WeightMemory(Protocol):
    def locate(self, row: int, elements: I64) -> tuple[I64, U32, U32]:
        """Which of `elements` (canonical) lie in a row.

        Returns their indices in `elements`, their canonical places relative to the row's start, and their live places
        relative to its base.
        """
        ...

    def gather(self, readings: Sequence[Reading]) -> None:
        """Copy live bits into each reading's `out`."""
        ...

    def sum_bits(self, row: int, values: Bits, element: U32) -> int:
        """Sum over given bits at canonical places of a row, for values that live memory does not hold (yet)."""
        ...

    def set_groups(self, groups: Sequence[Group]) -> None:
        """Set the groups that `write` works on, and allocate all that it needs.

        Raises `ArenaFull` if the device's arena has no space for them.
        """
        ...

    def write(self, side: ValueSet, *, stop: int | None = None) -> U64:
        """Write the old or new values of the groups that were set; only those of the first `stop` groups if given.

        Returns the sum of the elements of each written group as live memory holds them afterwards. The host allocates
        one number per group, the device nothing.
        """
        ...

    def box_sums(self, after_slice: SliceCallback, tensors: range | None = None) -> U64:
        """Sum of every box over all its elements, 0 for boxes of other tensors than `tensors` if these are given.
        `after_slice` is called after each slice with its size in bytes, and may raise."""
        ...

    def overwrite(self, tensor: int, values: Bits, after_slice: SliceCallback) -> None:
        """Write all elements of a canonical tensor that this rank holds, from the whole tensor's flat bits."""
        ...

    def moved_parameter(self) -> str | None:
        """A parameter whose storage is no longer where it was, or None."""
        ...


class LiveTensors:
    """The live tensors that rows point into; notices when one is replaced or its storage moves."""

    def __init__(self, live: Mapping[str, torch.Tensor], holders: Mapping[str, tuple[dict[str, Any], str]]) -> None:
        self.live = dict(live)
        self._holders = {name: holders[name] for name in self.live}
        self._seen = {name: self._look(name) for name in self.live}

    def _look(self, name: str) -> tuple[int, int, int]:
        tensor = self.live[name]
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes(), tensor.storage_offset()

    def moved_parameter(self) -> str | None:
        for name, seen in self._seen.items():
            holder, key = self._holders[name]
            if holder.get(key) is not self.live[name] or self._look(name) != seen:
                return name
        return None

    def check(self, rows: Sequence[PlacementRow], layout: Layout) -> None:
        """Raises `ValueError` if a row could reach outside its storage, or has another width."""
        for row in rows:
            tensor, width = self.live[row.parameter], layout[row.tensor].width
            if tensor.element_size() != width or row.end * width > tensor.untyped_storage().nbytes():
                raise ValueError(f"{layout[row.tensor].name} does not fit into {row.parameter}")


def holders_of(model: torch.nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """For each parameter and buffer name the dictionary and key under which its module keeps it."""
    found: dict[str, tuple[dict[str, Any], str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for kept in (module._parameters, module._buffers):
            found |= {f"{path}.{key}" if path else key: (kept, key) for key in kept}
    return found


def row_table(rows: Sequence[PlacementRow], layout: Layout, *, base: Callable[[PlacementRow], int]) -> I64:
    """Rows as the kernels read them; `base` gives the address of a parameter's storage."""
    from dcr_daemon.vllm_plugin.weights import kernels as k

    table = np.zeros((len(rows), k.ROW_COLUMNS), dtype=np.int64)
    for line, row in zip(table, rows, strict=True):
        width = layout[row.tensor].width
        region, missing = row.region, 4 - len(row.region.shape)
        line[k.ADDRESS], line[k.START], line[k.WIDTH] = base(row) + row.base * width, region.dst, width
        line[k.SHAPE : k.SHAPE + 4] = (1,) * missing + region.shape
        line[k.SOURCE : k.SOURCE + 4] = (1 << 62,) * missing + region.dst_strides
        line[k.TARGET : k.TARGET + 4] = (0,) * missing + region.src_strides
        line[k.TABLE] = row.repack.table.ctypes.data if row.repack is not None else 0
        line[k.INNER] = row.inner
        line[k.KEY] = layout.keys[row.tensor : row.tensor + 1].view(np.int64)[0]
    return table


class HostTables:
    """What every memory does on the host: locate elements in rows, and sum over given bits."""

    def __init__(
        self, placement: Placement, live_tensors: LiveTensors, *, layout: Layout, base: Callable[[PlacementRow], int]
    ) -> None:
        """`base` gives the address of a row's storage, 0 if the host cannot read it. Compiles every kernel."""
        from dcr_daemon.vllm_plugin.weights import kernels

        live_tensors.check(placement.rows, layout)
        self._kernels = kernels
        self._live_tensors = live_tensors
        self._rows = placement.rows  # keeps the permutations' tables alive, as `live_tensors` does the storages
        self._by_tensor = placement.by_tensor
        self._boxes = len(placement.boxes)
        self._table = row_table(placement.rows, layout, base=base)
        kernels.warm()

    def locate(self, row: int, elements: I64) -> tuple[I64, U32, U32]:
        lo, hi = _window(elements, self._rows[row])
        part = elements[lo:hi]
        if not part.flags.carray or part.dtype != np.int64:  # another kind of array is another kernel to compile
            part = np.require(part, dtype=np.int64, requirements=["C", "W"])
        picked = np.empty(part.size, dtype=np.int64)
        element, target = np.empty(part.size, dtype=np.uint32), np.empty(part.size, dtype=np.uint32)
        k = self._kernels.locate(part, self._table[row], picked, element, target)
        return picked[:k] + lo, element[:k], target[:k]

    def sum_bits(self, row: int, values: Bits, element: U32) -> int:
        line, k = self._table[row], self._kernels
        key = line[k.KEY : k.KEY + 1].view(np.uint64)[0]
        start = int(line[k.START])
        return int(k.sum_bits(_address(values), values.itemsize, start, _address(element), element.size, key))

    def moved_parameter(self) -> str | None:
        return self._live_tensors.moved_parameter()


class HostMemory(HostTables):
    """Live weights that the CPU addresses directly."""

    def __init__(self, placement: Placement, live_tensors: LiveTensors, *, layout: Layout) -> None:
        def base(row: PlacementRow) -> int:
            return int(live_tensors.live[row.parameter].untyped_storage().data_ptr())

        super().__init__(placement, live_tensors, layout=layout, base=base)
        self._groups = np.zeros((0, self._kernels.GROUP_COLUMNS), dtype=np.int64)
        self._staged: tuple[Group, ...] = ()
        self._sums = np.zeros(0, dtype=np.uint64)
        self._scratch = np.zeros(self._kernels.BLOCK, dtype=np.uint64)

    def gather(self, readings: Sequence[Reading]) -> None:
        k = self._kernels
        for reading in readings:
            base, width = int(self._table[reading.row, k.ADDRESS]), reading.out.itemsize
            k.gather(base, width, _address(reading.target), reading.target.size, _address(reading.out))

    def set_groups(self, groups: Sequence[Group]) -> None:
        k = self._kernels
        table = np.zeros((len(groups), k.GROUP_COLUMNS), dtype=np.int64)
        for line, group in zip(table, groups, strict=True):
            row = self._table[group.row]
            line[k.G_BASE], line[k.G_WIDTH] = row[k.ADDRESS], row[k.WIDTH]
            line[k.G_START], line[k.G_KEY], line[k.G_COUNT] = row[k.START], row[k.KEY], group.element.size
            line[k.G_TARGET], line[k.G_ELEMENT] = _address(group.target), _address(group.element)
            line[k.G_OLD], line[k.G_NEW] = _address(group.old), _address(group.new)
        self._groups, self._sums = table, np.zeros(len(groups), dtype=np.uint64)
        self._staged = tuple(groups)  # keeps the arrays behind the addresses alive

    def write(self, side: ValueSet, *, stop: int | None = None) -> U64:
        column = self._kernels.G_NEW if side is ValueSet.NEW else self._kernels.G_OLD
        count = len(self._groups) if stop is None else stop
        self._kernels.write_groups(self._groups, column, count, self._sums, self._scratch.ctypes.data)
        return self._sums[:count].copy()

    def box_sums(self, after_slice: SliceCallback, tensors: range | None = None) -> U64:
        rows = [number for number, row in enumerate(self._rows) if tensors is None or row.tensor in tensors]
        sums = np.zeros(len(rows), dtype=np.uint64)
        self._sweep(self._table[rows], sums, files=np.zeros(0, dtype=np.int64), after_slice=after_slice)
        boxes = np.zeros(self._boxes, dtype=np.uint64)
        np.add.at(boxes, [self._rows[number].box for number in rows], sums)
        return boxes

    def overwrite(self, tensor: int, values: Bits, after_slice: SliceCallback) -> None:
        rows = self._table[self._by_tensor.get(tensor, [])]
        self._sweep(
            rows,
            np.zeros(0, dtype=np.uint64),
            files=np.full(len(rows), values.ctypes.data, dtype=np.int64),
            after_slice=after_slice,
        )

    def _sweep(self, rows: I64, sums: U64, *, files: I64, after_slice: SliceCallback) -> None:
        k, cursor = self._kernels, np.zeros(2, dtype=np.int64)
        ends = np.cumsum(rows[:, k.SHAPE : k.SHAPE + 4].prod(axis=1) * rows[:, k.WIDTH])
        seen = 0
        while cursor[0] < len(rows):
            k.walk(rows, cursor, SWEEP, sums, files)
            faults.after_slice()
            whole, part = cursor.tolist()
            now = int(ends[whole - 1]) if whole else 0
            now += part * int(rows[whole, k.WIDTH]) if part else 0
            after_slice(now - seen)
            seen = now


def _address(array: npt.NDArray[Any]) -> int:
    """Address of an array's bytes. `ctypes.data` gives the same but makes objects, four times for every segment."""
    return int(array.__array_interface__["data"][0])


def _window(elements: I64, row: PlacementRow) -> tuple[int, int]:
    """Bounds of the part of ascending `elements` that may lie in a row."""
    if elements.size == 0:
        return 0, 0
    start, last = row.canonical_box.dst, row.canonical_box.last
    if elements[0] >= start and elements[-1] <= last:
        return 0, elements.size
    lo, hi = np.searchsorted(elements, [start, last + 1])
    return int(lo), int(hi)


def uint_view(tensor: torch.Tensor) -> Bits:
    """A host tensor's bits as a flat unsigned array (a view if the tensor is contiguous)."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.view(bits_dtype(tensor.element_size()))
