"""The detecting loop with AVX-512: 64 bytes are compared at once, and what differs is compressed to the front.

For x86 processors with VBMI2 (since Ice Lake and Zen 4). It finds the same as `kernels.detect`, bit for bit, which is
its reference and runs where the processor or the compiler lacks the instructions. `select_detect` chooses.

Compiled code is cached on disk under the processor's name and features (numba's index has both in its key), so that a
cache which another machine has left in a shared home is never run here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import int64, types, uint64
from numba.core import cgutils
from numba.core.errors import NumbaError
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from dcr_daemon.canonical.dtypes import bits_dtype
from dcr_daemon.canonical.jit import kernel
from dcr_daemon.codec import kernels
from dcr_daemon.codec.kernels import sum_changes

FEATURES = frozenset({"+avx512f", "+avx512bw", "+avx512vl", "+avx512vbmi2"})
VECTOR = 64  #: bytes of a vector
BLOCK = 32 << 10  #: bytes detected, then summed while their changes are still in the first cache level

_I32, _I64 = ir.IntType(32), ir.IntType(64)


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _compress(context: Any, base: Any, new: Any, i: Any, where: Any, old: Any, now: Any, k: Any) -> Any:
    """Compare a vector from element `i` on; append positions, old and new bits of what differs from `k` on; copy `new`
    over `base`. Returns how many differ. The stores are whole vectors: there is room, because `k` is at most `i`."""
    width = base.dtype.bitwidth // 8
    lanes = VECTOR // width
    element = ir.IntType(8 * width)
    vector, flags = ir.VectorType(element, lanes), ir.VectorType(ir.IntType(1), lanes)
    numbers, mask_type = ir.VectorType(_I32, lanes), ir.IntType(lanes)

    def generate(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        def pointer(array: int, at: int, kind: Any) -> Any:
            struct = cgutils.create_struct_proxy(signature.args[array])(ctx, builder, value=args[array])
            return builder.bitcast(builder.gep(struct.data, [args[at]]), kind.as_pointer())

        def store(value: Any, array: int, *, align: int) -> None:
            builder.store(value, pointer(array, 6, value.type), align=align)

        zero = ir.Constant(vector, [ir.Constant(element, 0)] * lanes)
        ours, theirs = (builder.load(pointer(array, 2, vector), align=1) for array in (0, 1))
        differs = builder.icmp_unsigned("!=", ours, theirs)
        mask = builder.bitcast(differs, mask_type)
        with builder.if_then(builder.icmp_unsigned("!=", mask, ir.Constant(mask_type, 0))):
            name = f"llvm.x86.avx512.mask.compress.v{lanes}i{8 * width}"
            compress = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(vector, [vector, vector, flags]), name
            )
            lane = ir.Constant(vector, [ir.Constant(element, n) for n in range(lanes)])
            picked = builder.call(compress, [lane, zero, differs])
            if width < 4:
                picked = builder.zext(picked, numbers)
            elif width > 4:
                picked = builder.trunc(picked, numbers)
            first = builder.insert_element(
                ir.Constant(numbers, ir.Undefined), builder.trunc(args[2], _I32), ir.Constant(_I32, 0)
            )
            everywhere = ir.Constant(numbers, [ir.Constant(_I32, 0)] * lanes)
            first = builder.shuffle_vector(first, ir.Constant(numbers, ir.Undefined), everywhere)
            store(builder.add(picked, first), 3, align=4)
            store(builder.call(compress, [ours, zero, differs]), 4, align=width)
            store(builder.call(compress, [theirs, zero, differs]), 5, align=width)
            builder.store(theirs, pointer(0, 2, vector), align=1)
        count = builder.call(builder.module.declare_intrinsic("llvm.ctpop", [mask_type]), [mask])
        return count if lanes == 64 else builder.zext(count, _I64)

    return types.int64(base, new, types.int64, where, old, now, types.int64), generate


@kernel
def detect(
    base: Any, new: Any, where: Any, old: Any, now: Any, dst: Any, shape: Any, strides: Any, flat: Any, key: Any
) -> Any:
    """As `kernels.detect`."""
    k = int64(0)
    before = uint64(0)
    after = uint64(0)
    lanes = int64(VECTOR // base.itemsize)
    block = int64(BLOCK // base.itemsize)
    for start in range(0, base.size, block):
        stop = min(start + block, base.size)
        first = k
        whole = start + (stop - start) // lanes * lanes
        for i in range(start, whole, lanes):
            k += _compress(base, new, i, where, old, now, k)
        for i in range(whole, stop):
            o = base[i]
            v = new[i]
            where[k] = i
            old[k] = o
            now[k] = v
            k += int64(o != v)
            base[i] = v
        b, a = sum_changes(old[first:k], now[first:k], where[first:k], dst, shape, strides, flat, key)
        before += b
        after += a
    return k, before, after


@cache
def select_detect(width: int) -> Callable[..., Any]:
    """`detect` for elements of `width` bytes: the fastest one that this processor and this compiler have."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()  # that code is compiled for
    if not FEATURES.issubset(features.split(",")):
        return kernels.detect
    bits, axes = np.zeros(2, dtype=bits_dtype(width)), np.ones(4, dtype=np.int64)
    try:
        detect(bits[:1], bits[:1], np.zeros(2, "<u4"), bits, bits, 0, axes, axes, True, np.uint64(0))
    except (NumbaError, RuntimeError):  # another release of LLVM may not know the instruction by this name
        return kernels.detect
    return detect
