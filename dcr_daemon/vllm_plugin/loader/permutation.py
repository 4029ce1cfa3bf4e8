"""Finds the permutation of expert weights that an engine repacks after loading.

Runs in the worker process, called by `place_model`; returns a `Repack` per parameter. Some kernels need expert weights
in their own order, in a tensor of (nearly) the same shape. The repacking only moves bits, for each expert in the same
way. So vLLM's own conversion is run on one expert whose bits are the elements' own numbers, and the numbers are read
back. Nothing about the order is assumed. Zeros are padding. An element may vanish, if the loader fills none there (vLLM
allocates an expert's size rounded up, and its conversion zeroes the rest): only a copy that touches such an element is
refused. A repack that repeats elements or computes with them is refused. The fingerprint of the live weights proves the
permutation later.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dcr_daemon.canonical.region import Region, indices
from dcr_daemon.vllm_plugin.weights import faults
from dcr_daemon.vllm_plugin.weights.placement import DROPPED, Repack, Unplaceable, split_rows

#: Backends whose conversion of expert weights moves bits only, by vLLM's names (`UnquantizedMoeBackend`).
CONVERTED = ("FLASHINFER_TRTLLM", "FLASHINFER_CUTLASS")
DIGIT_BITS = 14  #: bits of an element's number per probe: patterns below 2^14 are ordinary small bfloat16 values


Repacking = Callable[[torch.nn.Module], None]  #: changes a layer's expert weights in place


def find_permutations(shapes: dict[str, tuple[int, ...]], repack: Repacking) -> dict[str, Repack]:
    """Derive the permutation of one block per parameter.

    Args:
        shapes: load-format shape of one block (one expert), by parameter name, 2-byte elements.
        repack: the engine's repacking, applied in place to a stand-in layer that has just these parameters with a
            leading axis of one block.

    Raises:
        Unplaceable: the outcome holds something else than elements of the block, each at most once, and zeros.
    """
    biggest = max(int(np.prod(shape)) for shape in shapes.values())
    digits: dict[str, npt.NDArray[np.int64]] = {}
    for digit in range(-(-(biggest + 1).bit_length() // DIGIT_BITS)):
        layer = torch.nn.Module()
        for name, shape in shapes.items():
            number = torch.arange(1, int(np.prod(shape)) + 1, dtype=torch.int64)  # 0 is left for padding
            bits = ((number >> (digit * DIGIT_BITS)) & ((1 << DIGIT_BITS) - 1)).to(torch.int16).view(torch.bfloat16)
            layer.register_parameter(name, torch.nn.Parameter(bits.reshape(1, *shape), requires_grad=False))
        repack(layer)
        for name in shapes:
            live = getattr(layer, name).data.contiguous().view(torch.int16).reshape(-1).to(torch.int64).numpy()
            digits[name] = digits.get(name, 0) + (live << (digit * DIGIT_BITS))
    return {name: _invert(name, int(np.prod(shape)), digits[name]) for name, shape in shapes.items()}


def _invert(name: str, block: int, numbers: npt.NDArray[np.int64]) -> Repack:
    """Invert "the element at this place" (1-based, 0 is padding) to "the place of element i", `DROPPED` if none."""
    places = np.flatnonzero(numbers)
    found = numbers[places] - 1
    if not places.size or found.min() < 0 or found.max() >= block:
        raise Unplaceable(f"the engine's repacking of {name} is not a permutation of its elements")
    table = np.full(block, DROPPED, dtype=np.uint32)
    table[found] = places
    if np.count_nonzero(table != DROPPED) != found.size:
        raise Unplaceable(f"the engine's repacking of {name} repeats elements")
    if faults.should_fail("placement"):
        table[[0, -1]] = table[[-1, 0]]
    return Repack(block, int(numbers.size), table)


def require_kept(name: str, region: Region, repack: Repack) -> None:
    """Raises `Unplaceable` if a copy (its `src` counts the parameter's elements) touches one that is not kept."""
    if not repack.drops:
        return
    for part in split_rows(region, repack):
        inner = part.src % repack.block
        shape = inner, part.shape, part.src_strides
        if shape in repack.kept:
            continue  # the same elements of another expert, or of another layer's
        if (repack.table[inner + indices(part)[0] - part.src] == DROPPED).any():
            raise Unplaceable(f"the engine's repacking of {name} loses elements that the loader fills")
        repack.kept.add(shape)


def expert_repacks(method: Any, layer: torch.nn.Module) -> dict[str, Repack]:
    """Permutations of a vLLM expert layer's `w13_weight` and `w2_weight`; empty where they stay as loaded.

    `layer` is in load format. Raises `Unplaceable` for a backend whose repacking cannot be run on a stand-in.
    """
    backend = getattr(method.unquantized_backend, "name", str(method.unquantized_backend))
    if backend in ("TRITON", "BATCHED_TRITON"):
        return {}
    if backend != "CPU" and backend not in CONVERTED:
        raise Unplaceable(f"expert weights repacked for the {backend} backend; start vLLM with --moe-backend triton")
    shapes = {name: tuple(getattr(layer, name).shape[1:]) for name in ("w13_weight", "w2_weight")}
    if any(getattr(layer, name).dtype not in (torch.bfloat16, torch.float16) for name in shapes):
        raise Unplaceable("expert weights that are not 2 bytes wide")
    repack, kind = _cpu_packing(method, layer) if backend == "CPU" else _conversion(method, layer)
    key = (kind, tuple(shapes.items()))
    if key not in _known or faults.ENABLED:
        _known[key] = find_permutations(shapes, repack)
    return _known[key]


_known: dict[Any, dict[str, Repack]] = {}  # all expert layers of a model are repacked in the same way


def _cpu_packing(method: Any, layer: torch.nn.Module) -> tuple[Repacking, object]:
    experts = method.moe_kernel.fused_experts

    def repack(stand_in: torch.nn.Module) -> None:
        # A copy, because the method also stores which kernel it chose. Biases do not influence the weights' order.
        for name in ("moe_config", "activation"):
            setattr(stand_in, name, getattr(layer, name, None))
        copy.copy(experts).process_weights_after_loading(stand_in)

    return repack, type(experts).__name__


def _conversion(method: Any, layer: torch.nn.Module) -> tuple[Repacking, object]:
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import convert_to_unquantized_kernel_format

    backend, config = method.unquantized_backend, layer.moe_config

    def repack(stand_in: torch.nn.Module) -> None:
        # A copy, because the conversion stores the padded size in its configuration.
        converted = convert_to_unquantized_kernel_format(
            backend, copy.copy(config), stand_in.w13_weight.data, stand_in.w2_weight.data
        )
        for name, data in zip(("w13_weight", "w2_weight"), converted, strict=True):
            setattr(stand_in, name, torch.nn.Parameter(data, requires_grad=False))

    return repack, (backend, config.is_act_and_mul, config.intermediate_size_per_partition_unpadded)
