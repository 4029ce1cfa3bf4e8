"""The layout: order, digest, the shapes and dtypes it takes and refuses."""

from __future__ import annotations

import hashlib
import json

import pytest

from dcr_daemon.canonical.dtypes import ITEM_SIZE, bits_dtype
from dcr_daemon.canonical.layout import Layout, TensorSpec, describe_difference
from dcr_daemon.errors import Corrupt, Incompatible

SPECS = [
    TensorSpec("b", "BF16", (2, 3)),
    TensorSpec("a.10", "F32", ()),
    TensorSpec("a.9", "I64", (0, 4)),
    TensorSpec("é", "U8", (5,)),
    TensorSpec("z", "F16", (1,)),
]


def test_order_is_by_utf8_bytes_whatever_came_first() -> None:
    layout = Layout(SPECS)
    assert [spec.name for spec in layout] == ["a.10", "a.9", "b", "z", "é"]
    assert Layout(reversed(SPECS)) == layout
    assert Layout(reversed(SPECS)).digest == layout.digest


def test_digest_is_sha256_of_compact_json() -> None:
    layout = Layout(SPECS)
    text = '[["a.10","F32",[]],["a.9","I64",[0,4]],["b","BF16",[2,3]],["z","F16",[1]],["é","U8",[5]]]'
    assert layout.encoded == text.encode()
    assert layout.digest == hashlib.sha256(text.encode()).hexdigest()


def test_key_is_seeded_by_digest_and_name() -> None:
    layout = Layout(SPECS)
    seed = bytes.fromhex(layout.digest) + b"\0" + b"b"
    expected = int.from_bytes(hashlib.sha256(seed).digest()[:8], "little")
    assert int(layout.keys[layout.index("b")]) == expected
    assert len({int(key) for key in layout.keys}) == len(layout)


def test_scalar_empty_and_huge_tensors_have_their_sizes() -> None:
    huge = TensorSpec("huge", "BF16", (1 << 20, 1 << 14))
    assert TensorSpec("s", "F32", ()).elements == 1
    assert TensorSpec("e", "F32", (0, 4)).nbytes == 0
    assert huge.elements == 1 << 34
    assert Layout([*SPECS, huge]).nbytes == (1 << 35) + 12 + 4 + 0 + 5 + 2


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "I4", "bf16", ""])
def test_dtypes_that_are_not_bytes_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(Incompatible, match=f"dtype {dtype} is not"):
        Layout([TensorSpec("t", dtype, (2,))])


def test_names_twice_and_negative_shapes_are_refused() -> None:
    with pytest.raises(Incompatible, match="named twice: b"):
        Layout([*SPECS, TensorSpec("b", "F32", (1,))])
    with pytest.raises(Incompatible, match="negative"):
        Layout([TensorSpec("t", "F32", (-1,))])


@pytest.mark.parametrize("dtype", sorted(ITEM_SIZE))
def test_every_dtype_has_an_unsigned_lane(dtype: str) -> None:
    assert int(bits_dtype(ITEM_SIZE[dtype])[-1]) == ITEM_SIZE[dtype]


def test_decode_takes_only_the_canonical_form() -> None:
    layout = Layout(SPECS)
    assert Layout.decode(layout.encoded) == layout
    table = json.loads(layout.encoded)
    for body in (
        json.dumps(table).encode(),
        json.dumps(table[::-1], separators=(",", ":"), ensure_ascii=False).encode(),
        layout.encoded[:-1],
        b"\xff",
        b"{}",
        b"[[1]]",
        b'[["a","F32",["x"]]]',
        b'[["a","F32",[Infinity]]]',
        b'[["\\ud800","F32",[1]]]',
        b"[" * 100_000,
    ):
        with pytest.raises(Corrupt):
            Layout.decode(body)


def test_differences_are_named_by_kind() -> None:
    wanted = Layout(SPECS)
    found = Layout([*SPECS[:3], TensorSpec("z", "F16", (2,)), TensorSpec("new", "U8", (1,))])
    assert describe_difference(found, wanted) == "missing: é; added: new; retyped or reshaped: z"
    assert describe_difference(wanted, wanted) == ""
