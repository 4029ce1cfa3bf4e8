"""One rule for dtypes: the canonical dtype is the base checkpoint's, tensor by tensor.

Equal dtypes pass as bits. A wider float is rounded to the canonical one (to nearest even, NaN as torch casts it)
before it is diffed; an exact widening is allowed. Anything else is *retyped* and refused. torch is imported only
when something is really cast.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from dcr_daemon.canonical.dtypes import item_size, lane_dtype
from dcr_daemon.canonical.fingerprint import Bits

#: safetensors dtype -> torch dtype, for all that torch knows.
TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "U16": "uint16", "U32": "uint32", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32",
    "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
}  # fmt: skip

_ROUNDED = {("F64", "F32"), ("F64", "BF16"), ("F64", "F16"), ("F32", "BF16"), ("F32", "F16")}
_WIDENED = {
    ("BF16", "F32"), ("F16", "F32"), ("BF16", "F64"), ("F16", "F64"), ("F32", "F64"),
    ("I8", "I16"), ("I8", "I32"), ("I8", "I64"), ("I16", "I32"), ("I16", "I64"), ("I32", "I64"),
    ("U8", "U16"), ("U8", "U32"), ("U8", "U64"), ("U16", "U32"), ("U16", "U64"), ("U32", "U64"),
}  # fmt: skip


def castable(given: str, canonical: str) -> bool:
    """Whether values of dtype `given` may stand for a tensor of dtype `canonical`."""
    return given == canonical or (given, canonical) in _ROUNDED or (given, canonical) in _WIDENED


def rounds(given: str, canonical: str) -> bool:
    """Whether the cast loses bits, as for fp32 masters of a bf16 model."""
    return (given, canonical) in _ROUNDED


@cache
def dtype_names() -> dict[Any, str]:
    """torch dtype -> safetensors dtype."""
    import torch

    return {getattr(torch, name): dtype for dtype, name in TORCH_NAMES.items() if hasattr(torch, name)}


def torch_dtype(dtype: str) -> Any:
    """The torch dtype of a safetensors dtype."""
    import torch

    return getattr(torch, TORCH_NAMES[dtype])


def cast_lanes(lanes: Bits, given: str, canonical: str) -> Bits:
    """Lanes of `given` values as lanes of `canonical` ones, of the same number; the same array if nothing is to do."""
    if given == canonical:
        return lanes
    import torch

    values = torch.from_numpy(lanes.view("u1")).view(torch_dtype(given)).to(torch_dtype(canonical))
    return values.view(torch.uint8).numpy().view(lane_dtype(item_size(canonical)))
