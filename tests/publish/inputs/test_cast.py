from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from dcr_daemon.canonical.dtypes import ITEM_SIZE, bits_dtype
from dcr_daemon.projection.values import TORCH_NAMES, castable, rounds, torch_dtype
from dcr_daemon.publish.inputs.cast import cast_bits

torch = pytest.importorskip("torch")


def test_every_allowed_pair_is_what_torch_makes_of_it() -> None:
    rng = np.random.default_rng(0)
    for given, canonical in product(TORCH_NAMES, TORCH_NAMES):
        if not castable(given, canonical):
            continue
        bits = rng.integers(0, 256, 4096 * ITEM_SIZE[given], dtype=np.uint8)
        lanes = bits.view(bits_dtype(ITEM_SIZE[given]))
        found = cast_bits(lanes, given, canonical=canonical)
        want = torch.from_numpy(bits).view(torch_dtype(given)).to(torch_dtype(canonical)).view(torch.uint8).numpy()
        assert found.dtype == bits_dtype(ITEM_SIZE[canonical])
        assert np.array_equal(found.view("u1"), want)


def test_a_widening_loses_nothing_and_a_rounding_goes_to_nearest_even() -> None:
    every = np.arange(1 << 16, dtype="<u2")
    finite = every[(every & 0x7F80) != 0x7F80]
    assert np.array_equal(cast_bits(cast_bits(finite, "BF16", canonical="F32"), "F32", canonical="BF16"), finite)
    ties = np.array([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x80000000], dtype="<u4")
    assert cast_bits(ties, "F32", canonical="BF16").tolist() == [0x3F80, 0x3F82, 0x3F80, 0x3F81, 0x8000]


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("F16", "BF16"),
        ("BF16", "F16"),
        ("F32", "F8_E4M3"),
        ("I32", "F32"),
        ("F32", "I32"),
        ("I64", "I32"),
        ("U8", "I8"),
    ],
)
def test_anything_else_is_retyped(given: str, canonical: str) -> None:
    assert not castable(given, canonical)
    assert not rounds(given, canonical)
