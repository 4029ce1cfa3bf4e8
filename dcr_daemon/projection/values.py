"""Value functions: what happens to one element on its way from a local tensor to its canonical one.

Applied before anything is compared: an fp32 master that moves by less than a bf16 step is no change. Three kinds are
pointwise, so a shard needs no other rank's elements:

    Bits    the canonical dtype is the local one; every bit pattern passes
    Cast    rounded to the canonical dtype (to nearest even, NaN as torch casts it), or widened exactly
    Add     a constant is added in the local dtype, then the sum is cast: zero-centred norm weights

A function of a block of elements (FP8 codes and scales of 128 x 128 tiles, microscaling blocks of 16 or 32) fits the
same place as a fourth kind: a frozen record with its tile, that takes the elements of a region to two canonical
tensors, codes and scales, whose regions are the weight's own and that divided by the tile. It is direct exactly where
no tile straddles an edge of a shard. Functions that need another rank's elements are not expressed here: such tensors
are residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from dcr_daemon.errors import Incompatible

_FLOATS = {"F16": (5, 10), "BF16": (8, 7), "F32": (8, 23), "F64": (11, 52)}  #: bits of exponent and of mantissa
_INTEGERS = {f"{kind}{bits}": (kind, bits) for kind in "IU" for bits in (8, 16, 32, 64)}

#: safetensors dtype -> torch dtype, for all that torch knows.
TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "U16": "uint16", "U32": "uint32", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32",
    "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bits:
    """Every bit pattern passes as it is."""

    def __str__(self) -> str:
        return "bits"


@dataclass(frozen=True, slots=True)
class Cast:
    """To the canonical dtype, as torch casts."""

    canonical: str

    def __str__(self) -> str:
        return f"cast({self.canonical})"


@dataclass(frozen=True, slots=True)
class Add:
    """A constant is added in the local dtype, and the sum is cast to the canonical one."""

    constant: float
    canonical: str

    def __str__(self) -> str:
        return f"add({self.constant:g}, {self.canonical})"


Value = Bits | Cast | Add


def castable(given: str, canonical: str) -> bool:
    """Whether values of dtype `given` may stand for a tensor of dtype `canonical`: equal, rounded, or widened."""
    return given == canonical or rounds(given, canonical) or _widens(given, canonical)


def rounds(given: str, canonical: str) -> bool:
    """Whether the cast loses bits of a wider float, as for fp32 masters of a bf16 model."""
    return given != canonical and _covers(given, canonical)


def _widens(given: str, canonical: str) -> bool:
    if given in _INTEGERS and canonical in _INTEGERS:
        (kind, bits), (wider, room) = _INTEGERS[given], _INTEGERS[canonical]
        return kind == wider and bits < room
    return _covers(canonical, given)


def _covers(wide: str, narrow: str) -> bool:
    """Whether every value of one float type is one of the other's."""
    return (
        wide in _FLOATS
        and narrow in _FLOATS
        and all(a >= b for a, b in zip(_FLOATS[wide], _FLOATS[narrow], strict=True))
    )


def between(name: str, given: str, canonical: str) -> Value:
    """The value function of a plain copy from local dtype `given` to a tensor of dtype `canonical`.

    Raises:
        Incompatible: neither equal, nor a wider float, nor an exact widening: the tensor was retyped.
    """
    if given == canonical:
        return Bits()
    if not castable(given, canonical):
        raise Incompatible(
            f"{name} is {given} in the trainer and {canonical} in the base checkpoint",
            hint="start a stream from a checkpoint of the trained dtypes",
        )
    return Cast(canonical)


def apply(value: Value, tensor: Any) -> Any:
    """The values of `tensor` (torch, any device and shape) as the canonical tensor has them, in the canonical dtype.

    `Bits` returns the same tensor; so does a cast to the dtype that it has.
    """
    if isinstance(value, Bits):
        return tensor
    if isinstance(value, Add):
        tensor = tensor + value.constant
    return tensor.to(torch_dtype(value.canonical))


@cache
def dtype_names() -> dict[Any, str]:
    """torch dtype -> safetensors dtype."""
    import torch

    return {getattr(torch, name): dtype for dtype, name in TORCH_NAMES.items() if hasattr(torch, name)}


def dtype_of(name: str, tensor: Any) -> str:
    """The safetensors dtype of a torch tensor; `Incompatible` for one that no checkpoint holds."""
    try:
        return dtype_names()[tensor.dtype]
    except KeyError:
        raise Incompatible(f"{name} has dtype {tensor.dtype}, which no safetensors checkpoint holds") from None


def torch_dtype(dtype: str) -> Any:
    """The torch dtype of a safetensors dtype."""
    import torch

    return getattr(torch, TORCH_NAMES[dtype])
