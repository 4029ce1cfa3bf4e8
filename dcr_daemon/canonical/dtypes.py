"""Element types by their safetensors names. Only bits matter here: a type is a name and a width in bytes."""

from __future__ import annotations

from dcr_daemon.errors import Incompatible

#: safetensors dtype -> bytes per element. Sub-byte types are absent on purpose (refused by name).
ITEM_SIZE: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


def item_size(dtype: str) -> int:
    """Bytes per element of a safetensors dtype; `Incompatible` for sub-byte and unknown types."""
    try:
        return ITEM_SIZE[dtype]
    except KeyError:
        raise Incompatible(
            f"dtype {dtype} is not byte-sized or not known", hint="DCR carries byte-sized dtypes"
        ) from None


def bits_dtype(width: int) -> str:
    """The numpy dtype (little-endian unsigned) that carries the bits of a `width`-byte element."""
    return {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}[width]
