"""Compiles Triton's kernels for GPUs that are not here: what the interpreter accepts, the compiler may refuse.

A program for an environment with triton on its path. Prints one JSON line: for each GPU, width and kernel the size of
the machine code in bytes.
"""

from __future__ import annotations

import json
from itertools import product

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dcr_daemon.vllm_plugin.weights import triton_kernels as kernels

GPUS = {"Hopper": GPUTarget("cuda", 90, 32), "Blackwell": GPUTarget("cuda", 100, 32)}
ON_GROUPS = {"rows": "*i64", "groups": "*i64", "tiles": "*i64", "partial": "*i64", "column": "i32"}
ON_RUN = {"row": "*i64", "partial": "*i64", "first": "i32", "count": "i32"}


def size(gpu: str, function: object, signature: dict[str, str], **constants: object) -> int:
    constants = {"block": kernels.BLOCK, **constants}
    source = ASTSource(
        fn=function, signature={**signature, **dict.fromkeys(constants, "constexpr")}, constexprs=constants
    )
    return len(triton.compile(source, target=GPUS[gpu]).asm["cubin"])


def main() -> None:
    found = {}
    for gpu, width in product(GPUS, (1, 2, 4, 8)):
        for writes in (True, False):
            name = f"{gpu}, width {width}, {'write' if writes else 'gather'}"
            found[name] = size(gpu, kernels._on_groups, ON_GROUPS, width=width, writes=writes)
        found[f"{gpu}, width {width}, sum"] = size(gpu, kernels._on_run, ON_RUN, width=width)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
