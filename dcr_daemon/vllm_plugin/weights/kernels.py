"""Compiled loops over live weights in host memory, through raw addresses.

Runs in the worker process; `memory` and `worker.prepare` call it. One call covers a whole table of pieces, so that a
job spends its time outside the interpreter and generation keeps the GIL. All argument types are fixed (int64, uint64
and arrays of them): `warm` compiles every kernel once, at attach, and nothing compiles later (a compile holds the GIL
for seconds). The caller is responsible for every address: the tables are built from storages whose size was checked and
which stay referenced.

Tables are int64 matrices. Columns of a *row* (a strided piece of a canonical tensor in live memory, see
`placement.PlacementRow`) and of a *group* (changed elements inside one row, see `transaction.Group`) are named below.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import int64, types, uint32, uint64
from numba.extending import intrinsic

from dcr_daemon.canonical.jit import kernel
from dcr_daemon.canonical.kernels import mix, summand
from dcr_daemon.engine.kernels import match

# Row: where it lies, canonical start, shape[4], canonical strides[4], live strides[4], a permutation of its block.
ADDRESS, START, SHAPE, SOURCE, TARGET, TABLE, INNER, WIDTH, KEY = 0, 1, 2, 6, 10, 14, 15, 16, 17
ROW_COLUMNS = 18
# Group: live base, addresses of the parallel arrays, length, width, canonical start, key.
G_BASE, G_TARGET, G_ELEMENT, G_OLD, G_NEW, G_COUNT, G_WIDTH, G_START, G_KEY = range(9)
GROUP_COLUMNS = 9

BLOCK = 4096  #: elements collected before they are summed: they stay in the first cache level


def _loader(bits: int) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]  # numba has no types
    def load(context: Any, address: Any) -> Any:
        def generate(_: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(bits).as_pointer())
            value = builder.load(pointer)
            value.align = 1
            return value if bits == 64 else builder.zext(value, ir.IntType(64))

        return types.uint64(types.int64), generate

    return load


def _storer(bits: int) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def store(context: Any, address: Any, value: Any) -> Any:
        def generate(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(bits).as_pointer())
            value_bits = args[1] if bits == 64 else builder.trunc(args[1], ir.IntType(bits))
            builder.store(value_bits, pointer).align = 1
            return ctx.get_dummy_value()

        return types.void(types.int64, types.uint64), generate

    return store


load8, load16, load32, load64 = _loader(8), _loader(16), _loader(32), _loader(64)
store8, store16, store32, store64 = _storer(8), _storer(16), _storer(32), _storer(64)


@kernel
def load(address: Any, width: Any) -> Any:
    """Bits of one element, zero-extended."""
    if width == 2:
        return load16(address)
    if width == 4:
        return load32(address)
    if width == 1:
        return load8(address)
    return load64(address)


@kernel
def store(address: Any, width: Any, bits: Any) -> None:
    if width == 2:
        store16(address, bits)
    elif width == 4:
        store32(address, bits)
    elif width == 1:
        store8(address, bits)
    else:
        store64(address, bits)


@kernel
def resolve_target(row: Any, local: Any) -> Any:
    """Live element of a row, relative to its base, from its place before the repack."""
    if row[TABLE] == 0:
        return local
    return int64(load32(row[TABLE] + 4 * (local + row[INNER])))


@kernel
def locate(elements: Any, row: Any, picked: Any, relative: Any, targets: Any) -> Any:
    """Which of `elements` (canonical, int64) lie in the row, and where in live memory.

    Fills `picked` (their numbers), `relative` (canonical, from the row's start) and `targets` (live, from the
    row's base); returns how many.
    """
    k = 0
    reach = int64(0)
    for axis in range(4):
        reach += (row[SHAPE + axis] - 1) * row[SOURCE + axis]
    for i in range(elements.size):
        rest = elements[i] - row[START]
        if rest < 0 or rest > reach:
            continue
        local = int64(0)
        inside = True
        for axis in range(4):
            if row[SHAPE + axis] == 1:
                continue
            stride = row[SOURCE + axis]
            place = int64(uint32(rest) // uint32(stride))  # what a row reaches fits, and this divides twice as fast
            if place >= row[SHAPE + axis]:
                inside = False
                break
            rest -= place * stride
            local += place * row[TARGET + axis]
        if inside and rest == 0:
            picked[k] = i
            relative[k] = elements[i] - row[START]
            targets[k] = resolve_target(row, local)
            k += 1
    return k


@kernel
def gather(base: Any, width: Any, targets: Any, count: Any, out: Any) -> None:
    """Live bits at `count` u32 places (an address) into the values at address `out`."""
    for i in range(count):
        store(out + i * width, width, load(base + int64(load32(targets + 4 * i)) * width, width))


@kernel
def _scatter(base: Any, width: Any, targets: Any, count: Any, values: Any) -> None:
    """The values at address `values` into live memory, at `count` u32 places (an address)."""
    for i in range(count):
        store(base + int64(load32(targets + 4 * i)) * width, width, load(values + i * width, width))


@kernel
def sum_bits(values: Any, width: Any, start: Any, relative: Any, count: Any, key: Any) -> Any:
    """Sum over given bits (an address) whose canonical elements are `start` plus u32 places (an address)."""
    total = uint64(0)
    if width == 2:  # a loop of its own, without a branch inside, because it is vectorised then
        for i in range(count):
            element = uint64(start + int64(load32(relative + 4 * i)))
            total += mix(key ^ ((element << uint64(16)) | load16(values + 2 * i)))
        return total
    per = max(int64(1), width // 2)
    for i in range(count):
        total += summand(load(values + i * width, width), start + int64(load32(relative + 4 * i)), key, per)
    return total


@kernel
def write_groups(groups: Any, column: Any, stop: Any, sums: Any, scratch: Any) -> None:
    """Write the old (`column` = G_OLD) or new (G_NEW) values of the first `stop` groups into live memory, and sum each
    group's elements as live memory holds them then. `scratch` is the address of 8 * BLOCK bytes.

    Values are absolute, so a repetition changes nothing (must E5). Block by block, in three loops: the places of a
    block are still cached when they are read again, the compiler does not sum the value that it is about to store, and
    the sum over the collected values runs on vectors.
    """
    for g in range(stop):
        base, width, count = groups[g, G_BASE], groups[g, G_WIDTH], groups[g, G_COUNT]
        targets, elements, start = groups[g, G_TARGET], groups[g, G_ELEMENT], groups[g, G_START]
        values, key = groups[g, column], uint64(groups[g, G_KEY])
        total = uint64(0)
        for first in range(0, count, BLOCK):
            n = min(BLOCK, count - first)
            place = targets + 4 * first
            _scatter(base, width, place, n, values + first * width)
            gather(base, width, place, n, scratch)
            total += sum_bits(scratch, width, start, elements + 4 * first, n, key)
        sums[g] = total


@kernel
def _line(row: Any, ordinal: Any) -> Any:
    """Canonical element and local place of an ordinal of the row (row-major)."""
    rest = ordinal
    element = row[START]
    local = int64(0)
    for back in range(4):
        axis = 3 - back
        n = row[SHAPE + axis]
        place = rest % n
        rest //= n
        element += place * row[SOURCE + axis]
        local += place * row[TARGET + axis]
    return element, local


@kernel
def _sum_line(row: Any, element: Any, local: Any, count: Any) -> Any:
    """Sum over `count` elements along the innermost axis, as live memory holds them."""
    total = uint64(0)
    key, width, step = uint64(row[KEY]), row[WIDTH], row[SOURCE + 3]
    if width == 2 and row[TABLE] == 0 and row[TARGET + 3] == 1:  # vectorised, like `sum_bits`
        address, first, stride = row[ADDRESS] + 2 * local, uint64(element), uint64(step)
        for i in range(count):
            total += mix(key ^ (((first + uint64(i) * stride) << uint64(16)) | load16(address + 2 * i)))
        return total
    per = max(int64(1), width // 2)
    for i in range(count):
        address = row[ADDRESS] + resolve_target(row, local + i * row[TARGET + 3]) * width
        total += summand(load(address, width), element + i * step, key, per)
    return total


@kernel
def _write_line(row: Any, element: Any, local: Any, count: Any, file: Any) -> None:
    """Overwrite `count` elements along the innermost axis from a whole canonical tensor at address `file`."""
    width = row[WIDTH]
    for i in range(count):
        address = row[ADDRESS] + resolve_target(row, local + i * row[TARGET + 3]) * width
        store(address, width, load(file + (element + i * row[SOURCE + 3]) * width, width))


@kernel
def walk(rows: Any, cursor: Any, budget: Any, sums: Any, files: Any) -> None:
    """Visit up to `budget` elements of the rows from `cursor` (row, ordinal) on, and move the cursor.

    With `files` empty each row's live bits are added into `sums[row]`. Otherwise `files[row]` is the address of the
    row's whole canonical tensor in a mapped file, and the row is overwritten from there.
    """
    writing = files.size > 0
    while cursor[0] < rows.shape[0] and budget > 0:
        r = cursor[0]
        row = rows[r]
        inner = row[SHAPE + 3]
        size = row[SHAPE] * row[SHAPE + 1] * row[SHAPE + 2] * inner
        while cursor[1] < size and budget > 0:
            element, local = _line(row, cursor[1])
            run = min(inner - cursor[1] % inner, budget)
            if writing:
                _write_line(row, element, local, run, files[r])
            else:
                sums[r] += _sum_line(row, element, local, run)
            cursor[1] += run
            budget -= run
        if cursor[1] >= size:
            cursor[0] += 1
            cursor[1] = 0


def warm() -> None:
    """Compile everything above and `match`, by one call each with the types that jobs and calls use."""
    memory = np.zeros(BLOCK, dtype="<u8")
    here = memory.ctypes.data
    element, small = np.zeros(1, dtype=np.int64), np.zeros(1, dtype="<u4")
    row = np.zeros(ROW_COLUMNS, dtype=np.int64)
    row[[ADDRESS, WIDTH]] = here, 2
    row[SHAPE : SHAPE + 4] = row[SOURCE : SOURCE + 4] = 1
    locate(element, row, np.empty(1, np.int64), small.copy(), small.copy())
    gather(here, 2, small.ctypes.data, 1, here + 8)
    sum_bits(here, 2, 0, small.ctypes.data, 1, np.uint64(0))
    match(small, small.copy(), element.copy())
    group = np.zeros((1, GROUP_COLUMNS), dtype=np.int64)
    group[0] = here, small.ctypes.data, small.ctypes.data, here + 8, here + 16, 1, 2, 0, 0
    write_groups(group, G_NEW, 1, np.zeros(1, np.uint64), here + 64)
    walk(row[None, :], np.zeros(2, np.int64), 8, np.zeros(1, np.uint64), np.zeros(0, np.int64))
