"""Loops over live weights in Triton: one launch writes and sums all groups of a width, one reads all wanted places.

Runs in the worker process; `torch_memory` takes these kernels where Triton can be imported for the device. They follow
tables of raw addresses, as `kernels` does on a host, so one launch covers many parameters. Sums are added up modulo
2^64, so that their order does not matter. A tile, `BLOCK` changed elements of one group, leaves one partial sum; the
host adds them up, and no atomic operation is needed.

Under `TRITON_INTERPRET=1` the same source runs on a CPU, where tests compare it with the compiled loops of `kernels`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
# Triton reads the annotations of its functions, and knows only its own.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.vllm_plugin.weights.arena import DeviceArena
from dcr_daemon.vllm_plugin.weights.memory import U64, ValueSet, row_table
from dcr_daemon.vllm_plugin.weights.placement import PlacementRow
from dcr_daemon.vllm_plugin.weights.torch_kernels import SIGNED_DTYPES, Lanes, TorchKernels

BLOCK = 1024  #: elements of a tile

# Columns of a row, as in `kernels`. A group: its row, its arrays, its length. A tile: its group, its start.
START, SHAPE, SOURCE, TARGET, TABLE, INNER, KEY, ROW_COLUMNS = 1, 2, 6, 10, 14, 15, 17, 18
G_ROW, G_ELEMENT, G_OLD, G_NEW, G_COUNT, GROUP_COLUMNS = range(6)

_START, _SHAPE, _SOURCE, _TARGET = map(tl.constexpr, (START, SHAPE, SOURCE, TARGET))
_TABLE, _INNER, _KEY, _ROW_COLUMNS = map(tl.constexpr, (TABLE, INNER, KEY, ROW_COLUMNS))
_G_ELEMENT, _G_COUNT, _GROUP_COLUMNS = map(tl.constexpr, (G_ELEMENT, G_COUNT, GROUP_COLUMNS))


@triton.jit
def _mix(word):
    """murmur3's 64-bit finaliser."""
    word = (word ^ (word >> 33)) * 0xFF51AFD7ED558CCD
    word = (word ^ (word >> 33)) * 0xC4CEB9FE1A85EC53
    return word ^ (word >> 33)


@triton.jit  # type: ignore[untyped-decorator]
def _pointer(address, width: tl.constexpr):
    """A pointer to signed integers of this width."""
    if width == 1:
        pointer = address.to(tl.pointer_type(tl.int8))
    elif width == 2:
        pointer = address.to(tl.pointer_type(tl.int16))
    elif width == 4:
        pointer = address.to(tl.pointer_type(tl.int32))
    else:
        pointer = address.to(tl.pointer_type(tl.int64))
    return pointer


@triton.jit
def _resolve(row, local, mask):
    """Live element relative to the row's base, from its place before the repack."""
    table = tl.load(row + _TABLE)
    if table != 0:
        place = _pointer(table, 4) + local + tl.load(row + _INNER)
        local = tl.load(place, mask=mask, other=0).to(tl.int64) & 0xFFFFFFFF
    return local


@triton.jit
def _local(row, relative):
    """Place, before a repack, of canonical elements relative to the row's start (int64, below 2^32)."""
    rest = relative
    local = relative * 0
    for axis in tl.static_range(4):
        stride = tl.load(row + _SOURCE + axis)
        if stride < (1 << 32):  # an axis that is there
            place = (rest.to(tl.uint32) // stride.to(tl.uint32)).to(tl.int64)
            rest -= place * stride
            local += place * tl.load(row + _TARGET + axis)
    return local


@triton.jit  # type: ignore[untyped-decorator]
def _sum(row, values, relative, mask, width: tl.constexpr):
    """Sum of the fingerprint's summands, as int64."""
    element = relative + tl.load(row + _START)
    key = tl.load(row + _KEY).to(tl.uint64)
    bits = values.to(tl.int64)
    total = (relative * 0).to(tl.uint64)
    if width == 1:
        word = ((element << 16) | (bits & 0xFF)).to(tl.uint64)
        total += _mix(word ^ key)
    else:
        units: tl.constexpr = width // 2
        for unit in tl.static_range(units):
            word = (((element * units + unit) << 16) | ((bits >> (16 * unit)) & 0xFFFF)).to(tl.uint64)
            total += _mix(word ^ key)
    return tl.sum(tl.where(mask, total.to(tl.int64), 0), axis=0)


@triton.jit(do_not_specialize=["column"])  # type: ignore[untyped-decorator]
def _on_groups(
    rows, groups, tiles, partial, column, width: tl.constexpr, writes: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """One tile: write its values and sum what memory then holds, or else (`writes` false) read memory into them."""
    tile = tl.program_id(0).to(tl.int64)
    group = groups + tl.load(tiles + 2 * tile) * _GROUP_COLUMNS
    row = rows + tl.load(group) * _ROW_COLUMNS
    at = tl.load(tiles + 2 * tile + 1) + tl.arange(0, block)
    mask = at < tl.load(group + _G_COUNT)
    element = _pointer(tl.load(group + _G_ELEMENT), 4) + at
    relative = tl.load(element, mask=mask, other=0).to(tl.int64) & 0xFFFFFFFF
    live = _pointer(tl.load(row), width) + _resolve(row, _local(row, relative), mask)
    values = _pointer(tl.load(group + column), width) + at
    if writes:
        tl.store(live, tl.load(values, mask=mask, other=0), mask=mask)
        tl.debug_barrier()
        # Volatile: what memory holds, not what was just stored.
        found = tl.load(live, mask=mask, other=0, volatile=True)
        tl.store(partial + tile, _sum(row, found, relative, mask, width))
    else:
        tl.store(values, tl.load(live, mask=mask, other=0), mask=mask)


@triton.jit(do_not_specialize=["first", "count"])  # type: ignore[untyped-decorator]
def _on_run(row, partial, first, count, width: tl.constexpr, block: tl.constexpr):
    """Sum of `count` ordinals of one row, from tile `first` on: a number that is small enough for 32 bits."""
    tile = tl.program_id(0).to(tl.int64)
    at = tile * block + tl.arange(0, block)
    mask = at < count
    rest = at + first.to(tl.int64) * block
    relative = rest * 0
    local = rest * 0
    for back in tl.static_range(4):
        n = tl.load(row + _SHAPE + 3 - back)
        if n > 1:
            place = rest % n
            rest = rest // n
            relative += place * tl.load(row + _SOURCE + 3 - back)
            local += place * tl.load(row + _TARGET + 3 - back)
    local = tl.where(mask, local, 0)
    found = tl.load(_pointer(tl.load(row), width) + _resolve(row, local, mask), mask=mask, other=0)
    tl.store(partial + tile, _sum(row, found, relative, mask, width))


@dataclass(frozen=True, slots=True)
class _Launch:
    """One launch: the groups of one width. `firsts[i]`: the first tile of group `numbers[i]`."""

    width: int
    numbers: Sequence[int]
    groups: torch.Tensor
    tiles: torch.Tensor
    firsts: np.ndarray[Any, np.dtype[np.int64]]
    partial: torch.Tensor
    on_host: torch.Tensor


class TritonKernels(TorchKernels):
    """The kernels for one placement, through the addresses of its storages, which must not move."""

    longest_run = 1 << 24

    def __init__(
        self, rows: Sequence[PlacementRow], views: Mapping[str, torch.Tensor], *, layout: Layout, device: torch.device
    ) -> None:
        super().__init__(rows, views, layout=layout, device=device)
        table = row_table(rows, layout, base=lambda row: int(views[row.parameter].data_ptr()))
        for line, row in zip(table, rows, strict=True):
            if row.repack is not None:
                line[TABLE] = self._repacks[id(row.repack)].data_ptr()
        self._table = torch.from_numpy(table).to(device)
        self._partial = torch.empty(self.longest_run // BLOCK, dtype=torch.int64, device=device)
        self._launches: list[_Launch] = []
        self._groups = 0

    def set_lanes(self, lanes: Sequence[Lanes], arena: DeviceArena) -> None:
        self._launches = []
        self._launches = [self._plan(part, arena) for part in lanes]
        self._groups = sum(len(part.numbers) for part in lanes)

    def _plan(self, lanes: Lanes, arena: DeviceArena) -> _Launch:
        ends = np.array(lanes.ends, dtype=np.int64)
        counts = np.diff(ends, prepend=0)
        groups = np.zeros((len(ends), GROUP_COLUMNS), dtype=np.int64)
        width = lanes.new.element_size()
        groups[:, G_ROW], groups[:, G_COUNT] = lanes.rows, counts
        groups[:, G_ELEMENT] = lanes.element.data_ptr() + (ends - counts) * 4
        groups[:, G_NEW] = lanes.new.data_ptr() + (ends - counts) * width
        if lanes.old is not None:
            groups[:, G_OLD] = lanes.old.data_ptr() + (ends - counts) * width
        tiles_of = -(-counts // BLOCK)
        firsts = np.cumsum(tiles_of) - tiles_of
        tiles = np.empty((int(tiles_of.sum()), 2), dtype=np.int64)
        tiles[:, 0] = np.repeat(np.arange(len(counts)), tiles_of)
        tiles[:, 1] = (np.arange(len(tiles)) - np.repeat(firsts, tiles_of)) * BLOCK

        def up(table: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
            return arena.take(table.size, torch.int64).copy_(torch.from_numpy(table).reshape(-1))

        partial = arena.take(len(tiles), torch.int64)
        on_host = torch.empty(len(tiles), dtype=torch.int64, pin_memory=self._device.type == "cuda")
        return _Launch(width, lanes.numbers, up(groups), up(tiles), firsts, partial, on_host)

    def _start(self, launch: _Launch, tiles: int, *, column: int, writes: bool) -> None:
        if tiles:
            _on_groups[(tiles,)](
                self._table, launch.groups, launch.tiles, launch.partial, column, launch.width, writes, BLOCK
            )

    def write(self, side: ValueSet, stop: int) -> U64:
        sums = np.zeros(stop, dtype=np.uint64)
        cuts = [int(np.searchsorted(launch.numbers, stop)) for launch in self._launches]
        for launch, cut in zip(self._launches, cuts, strict=True):
            tiles = int(launch.firsts[cut]) if cut < len(launch.firsts) else len(launch.on_host)
            self._start(launch, tiles, column=G_NEW if side is ValueSet.NEW else G_OLD, writes=True)
        for launch, cut in zip(self._launches, cuts, strict=True):  # fetched when all are started
            launch.on_host.copy_(launch.partial)
            if cut:
                found = np.add.reduceat(launch.on_host.numpy().view(np.uint64), launch.firsts)
                sums[launch.numbers[:cut]] = found[:cut]
        return sums

    def gather(self, lanes: Lanes, arena: DeviceArena) -> None:
        launch = self._plan(lanes, arena)
        self._start(launch, len(launch.on_host), column=G_NEW, writes=False)

    def sum_run(self, row: int, first: int, count: int) -> int:
        """As `TorchKernels.sum_run`; `first` is a multiple of `BLOCK`."""
        width = self._layout[self._rows[row].tensor].width
        tiles = -(-count // BLOCK)
        _on_run[(tiles,)](self._table[row], self._partial, first // BLOCK, count, width, BLOCK)
        return int(self._partial[:tiles].sum().item())

    def warm(self) -> None:
        """Compile every kernel for every width, so that no pause compiles one. Writes nothing."""
        arena = DeviceArena(1 << 14, self._device)
        of_width = {self._layout[row.tensor].width: number for number, row in enumerate(self._rows)}
        for width, number in of_width.items():
            arena.reset()
            element = arena.take(1, torch.int32).zero_()
            launch = self._plan(Lanes([0], [number], [1], element, arena.take(1, SIGNED_DTYPES[width])), arena)
            launch.groups[G_COUNT] = 0
            for writes in (True, False):
                self._start(launch, 1, column=G_NEW, writes=writes)
            self.sum_run(number, 0, 1)
