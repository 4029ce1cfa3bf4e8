"""Shards and maps: values by canonical dtype, a digest of what is projected, gaps over all ranks."""

from __future__ import annotations

import pytest

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.canonical.region import slab, whole
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.region_map import Map, gaps, shards_of
from dcr_daemon.projection.values import Bits, Cast

LAYOUT = Layout([TensorSpec("a", "BF16", (4, 4)), TensorSpec("b", "F32", (4,)), TensorSpec("c", "BF16", (2,))])


def test_a_parameter_of_two_canonical_dtypes_is_two_shards() -> None:
    regions = [*whole("a", (4, 4)), *(r.shifted(src=16) for r in whole("b", (4,)))]
    cast, bits = shards_of("packed", (20,), "F32", regions, LAYOUT)
    assert (cast.value, bits.value) == (Cast("BF16"), Bits())
    assert (cast.elements, bits.elements) == (16, 4)
    assert Map((cast, bits)).baseline_bytes(LAYOUT) == 16 * 2 + 4 * 4


def test_a_parameter_that_is_the_source_of_nothing_is_still_there() -> None:
    (shard,) = shards_of("tied", (2,), "F32", whole("not in the checkpoint", (2,)), LAYOUT)
    assert shard.regions == ()
    with pytest.raises(Incompatible, match="tied is I64"):
        shards_of("tied", (2,), "I64", whole("c", (2,)), LAYOUT)


def test_gaps_are_judged_over_all_ranks_and_residual_counts_as_covered() -> None:
    def rank(lo: int, hi: int, **residual: str) -> Map:
        shards = shards_of("a", (hi - lo, 4), "BF16", slab("a", (4, 4), starts=(lo, 0), sizes=(hi - lo, 4)), LAYOUT)
        return Map(tuple(shards), residual)

    residual = {"b": "computed", "c": "computed"}
    assert gaps([rank(0, 2, **residual), rank(2, 4)], LAYOUT) == []
    assert [str(gap) for gap in gaps([rank(0, 2), rank(1, 3)], LAYOUT)] == [
        "a: elements [4, 8): double",
        "a: elements [12, 16): missing",
        "b: elements [0, 4): missing",
        "c: elements [0, 2): missing",
    ]


def test_a_digest_sees_values_and_regions() -> None:
    def digest(dtype: str, lo: int = 0) -> str:
        return Map(tuple(shards_of("a", (2, 4), dtype, slab("a", (4, 4), starts=(lo, 0), sizes=(2, 4)), LAYOUT))).digest

    assert digest("BF16") == digest("BF16")
    assert len({digest("BF16"), digest("F32"), digest("BF16", 2)}) == 3
