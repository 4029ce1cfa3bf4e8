"""Value functions: one rule of casts for all inputs, and bits that survive."""

from __future__ import annotations

import itertools

import pytest
import torch

from dcr_daemon.canonical.dtypes import ITEM_SIZE
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.values import Add, Bits, Cast, apply, between, castable, dtype_of, rounds, torch_dtype

ROUNDED = {("F64", "F32"), ("F64", "BF16"), ("F64", "F16"), ("F32", "BF16"), ("F32", "F16")}
WIDENED = {
    ("BF16", "F32"), ("F16", "F32"), ("BF16", "F64"), ("F16", "F64"), ("F32", "F64"),
    ("I8", "I16"), ("I8", "I32"), ("I8", "I64"), ("I16", "I32"), ("I16", "I64"), ("I32", "I64"),
    ("U8", "U16"), ("U8", "U32"), ("U8", "U64"), ("U16", "U32"), ("U16", "U64"), ("U32", "U64"),
}  # fmt: skip
PATTERNS = [0x0000, 0x8000, 0x3F80, 0xC040, 0x7FC1, 0xFF81, 0x0001, 0x8001, 0x7F80]  # -0, NaN payloads, denormals, inf


def bf16(patterns: list[int]) -> torch.Tensor:
    return torch.tensor(patterns, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def test_what_is_rounded_and_what_is_widened_is_exactly_this() -> None:
    for pair in itertools.product(ITEM_SIZE, ITEM_SIZE):
        assert castable(*pair) == (pair[0] == pair[1] or pair in ROUNDED or pair in WIDENED), pair
        assert rounds(*pair) == (pair in ROUNDED), pair


def test_bits_are_the_very_tensor() -> None:
    tensor = bf16(PATTERNS)
    assert apply(between("w", "BF16", "BF16"), tensor) is tensor


def test_a_master_of_every_kind_of_value_is_cast_as_torch_casts_it() -> None:
    master = torch.tensor([0.0, -0.0, 1.0, 1.00390625, -3.0, 1e-40, float("nan"), float("inf")])
    cast_to = apply(between("w", "F32", "BF16"), master)
    assert cast_to.dtype is torch.bfloat16
    assert torch.equal(cast_to.view(torch.int16), master.bfloat16().view(torch.int16))


def test_a_constant_is_added_in_the_local_dtype() -> None:
    weight = bf16([0x3B00, 0xBF80, 0x0000])  # 2^-9, -1, 0
    assert apply(Add(1.0, "BF16"), weight).tolist() == (weight + 1).tolist()
    assert apply(Add(1.0, "F32"), weight).dtype is torch.float32
    assert apply(Add(1.0, "F32"), weight).tolist() == (weight + 1).float().tolist()


def test_what_was_retyped_is_refused_by_name() -> None:
    with pytest.raises(Incompatible, match=r"model\.w is BF16 in the trainer and F16"):
        between("model.w", "BF16", "F16")
    assert between("w", "F32", "BF16") == Cast("BF16")
    assert between("w", "I64", "I64") == Bits()
    assert [str(v) for v in (Bits(), Cast("BF16"), Add(1.0, "BF16"))] == ["bits", "cast(BF16)", "add(1, BF16)"]


def test_dtypes_have_one_name() -> None:
    for name in ("BF16", "F32", "U8", "F8_E4M3"):
        assert dtype_of("w", torch.empty(0, dtype=torch_dtype(name))) == name
    with pytest.raises(Incompatible, match="complex128"):
        dtype_of("w", torch.empty(0, dtype=torch.complex128))
