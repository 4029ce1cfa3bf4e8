"""Loops over live weights from torch operations: what `triton_kernels` does in one launch, where Triton is missing.

Runs in the worker process; `torch_memory` calls it. All temporaries are `SLICE` elements long and made once, with the
kernels, and every operation writes into one of them: a pause must not ask for memory (must E6). Torch has no unsigned
64-bit arithmetic on devices. int64 wraps in the same way; only right shifts need their sign bits masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.vllm_plugin.weights.arena import DeviceArena
from dcr_daemon.vllm_plugin.weights.memory import U64, ValueSet
from dcr_daemon.vllm_plugin.weights.placement import PlacementRow

SIGNED_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SLICE = 1 << 18  #: elements per step: five temporaries of int64 take 10 MiB
LOW = (1 << 32) - 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


FIRST, SECOND = _signed(0xFF51AFD7ED558CCD), _signed(0xC4CEB9FE1A85EC53)


@dataclass(frozen=True, slots=True)
class Lanes:
    """Groups of one width on the device: group i is `[ends[i - 1], ends[i])` of every tensor.

    `numbers` are the groups' numbers in the transaction, `rows` their rows. `element` holds u32 places, canonical and
    relative to the row's start: places in live memory follow from them and the row. A reading has no `old`.
    """

    numbers: Sequence[int]
    rows: Sequence[int]
    ends: Sequence[int]
    element: torch.Tensor
    new: torch.Tensor
    old: torch.Tensor | None = None

    def side(self, side: ValueSet) -> torch.Tensor:
        values = self.new if side is ValueSet.NEW else self.old
        assert values is not None, "a reading is not written"
        return values


class TorchKernels:
    """The kernels for one placement. `views`: the storage of each parameter, flat, as signed integers."""

    longest_run = SLICE  #: elements that one `sum_run` takes

    def __init__(
        self, rows: Sequence[PlacementRow], views: Mapping[str, torch.Tensor], *, layout: Layout, device: torch.device
    ) -> None:
        self._rows, self._views, self._layout, self._device = rows, views, layout, device
        self._repacks: dict[int, torch.Tensor] = {}
        for row in rows:
            if row.repack is not None and id(row.repack) not in self._repacks:
                self._repacks[id(row.repack)] = torch.from_numpy(row.repack.table.view("<i4")).to(device)
        self._scratch = torch.empty((5, SLICE), dtype=torch.int64, device=device)
        self._narrow = torch.empty(SLICE, dtype=torch.int32, device=device)
        self._values = torch.empty(SLICE, dtype=torch.int64, device=device)
        self._lanes: Sequence[Lanes] = ()
        self._sums = torch.empty(0, dtype=torch.int64, device=device)
        self._host_sums = torch.empty(0, dtype=torch.int64)
        self._total = torch.empty((), dtype=torch.int64, device=device)

    # -- the transaction ------------------------------------------------------------------------------------------

    def set_lanes(self, lanes: Sequence[Lanes], arena: DeviceArena) -> None:
        """Allocate what `write` needs; raises `ArenaFull`."""
        groups = sum(len(part.numbers) for part in lanes)
        self._sums = arena.take(groups, torch.int64)
        self._host_sums = torch.empty(groups, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        self._lanes = lanes

    def write(self, side: ValueSet, stop: int) -> U64:
        """Write the groups with numbers below `stop`; the sum of each as the device holds it then."""
        for lanes in self._lanes:
            values, width = lanes.side(side), lanes.new.element_size()
            for number, row, first, end in _groups(lanes):
                if number >= stop:
                    continue
                self._sums[number].zero_()
                for at in range(first, end, SLICE):
                    n = min(SLICE, end - at)
                    element, target = self._places(self._rows[row], lanes.element[at : at + n])
                    view = self._views[self._rows[row].parameter]
                    view.index_copy_(0, target, values[at : at + n])
                    read = self._values.view(lanes.new.dtype)[:n]
                    torch.index_select(view, 0, target, out=read)
                    self._sums[number].add_(self._sum(row, element, read, width=width))
        self._host_sums.copy_(self._sums)
        return self._host_sums.numpy().view("<u8")[:stop].copy()

    def gather(self, lanes: Lanes, arena: DeviceArena) -> None:
        """Copy live bits into `lanes.new`."""
        for _, row, first, end in _groups(lanes):
            for at in range(first, end, SLICE):
                part = slice(at, min(at + SLICE, end))
                _, target = self._places(self._rows[row], lanes.element[part])
                torch.index_select(self._views[self._rows[row].parameter], 0, target, out=lanes.new[part])

    # -- whole rows -----------------------------------------------------------------------------------------------

    def sum_run(self, row: int, first: int, count: int) -> int:
        """Sum of ordinals [first, first + count) of a row; `count` is at most `longest_run`."""
        element, target = self.walk(self._rows[row], first, count)
        dtype = SIGNED_DTYPES[self._layout[self._rows[row].tensor].width]
        read = self._values.view(dtype)[:count]
        torch.index_select(self._views[self._rows[row].parameter], 0, target, out=read)
        return int(self._sum(row, element, read, width=dtype.itemsize).item())

    def walk(self, row: PlacementRow, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Canonical element, relative to the row's start, and live storage element of each ordinal."""
        element, target, rest, place, _ = self._scratch[:, :count]
        torch.arange(first, first + count, out=rest)
        element.zero_()
        target.zero_()
        for n, live, canonical in reversed(row.region.axes):
            torch.remainder(rest, n, out=place)
            rest.div_(n, rounding_mode="floor")
            element.add_(place, alpha=canonical)
            target.add_(place, alpha=live)
        return element, self._resolve(row, target)

    # -- one slice ------------------------------------------------------------------------------------------------

    def _places(self, row: PlacementRow, relative: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Canonical element, relative to the row's start, and live storage element of u32 places."""
        element, target, rest, place, _ = self._scratch[:, : relative.numel()]
        element.copy_(relative)
        element.bitwise_and_(LOW)
        rest.copy_(element)
        target.zero_()
        for _, live, canonical in row.region.axes:
            torch.div(rest, canonical, rounding_mode="floor", out=place)
            rest.sub_(place, alpha=canonical)
            target.add_(place, alpha=live)
        return element, self._resolve(row, target)

    def _resolve(self, row: PlacementRow, target: torch.Tensor) -> torch.Tensor:
        if row.repack is not None:
            moved = self._narrow[: target.numel()]
            target.add_(row.inner)
            torch.index_select(self._repacks[id(row.repack)], 0, target, out=moved)
            target.copy_(moved)
            target.bitwise_and_(LOW)
        return target.add_(row.base)

    def _sum(self, row: int, element: torch.Tensor, values: torch.Tensor, *, width: int) -> torch.Tensor:
        """Sum of the fingerprint's summands; `element`, relative to the row's start, is overwritten."""
        _, word, bits, total, spare = self._scratch[:, : element.numel()]
        tensor = self._rows[row].tensor
        key, per = _signed(int(self._layout.keys[tensor])), max(1, width // 2)
        element.add_(self._rows[row].region.dst)
        element.mul_(per)
        total.zero_()
        for unit in range(per):
            bits.copy_(values)
            bits.bitwise_right_shift_(16 * unit)
            bits.bitwise_and_(0xFF if width == 1 else 0xFFFF)
            torch.add(element, unit, out=word)
            word.bitwise_left_shift_(16)
            word.bitwise_or_(bits)
            word.bitwise_xor_(key)
            total.add_(_mix(word, spare))
        return torch.sum(total, 0, out=self._total)


def _mix(word: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """murmur3's finaliser, in place, on int64 that stands for uint64."""
    for factor in (FIRST, SECOND, 1):
        torch.bitwise_right_shift(word, 33, out=spare)
        spare.bitwise_and_((1 << 31) - 1)
        word.bitwise_xor_(spare)
        if factor != 1:
            word.mul_(factor)
    return word


def _groups(lanes: Lanes) -> list[tuple[int, int, int, int]]:
    """(number, row, first, end) of each group."""
    return list(zip(lanes.numbers, lanes.rows, (0, *lanes.ends[:-1]), lanes.ends, strict=True))
