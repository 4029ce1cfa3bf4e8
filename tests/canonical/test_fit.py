"""Fitting: exact for any pairs, one region for what one region can say, a refusal for what is no layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tensors.regions import dense_regions, pairs

from dcr_daemon.canonical.fit import fit
from dcr_daemon.canonical.region import Region, indices, normalise
from dcr_daemon.errors import Incompatible


@given(dense_regions(), st.randoms(use_true_random=False))
def test_one_region_comes_back_as_itself_whatever_the_order_of_its_pairs(region: Region, dice: object) -> None:
    src, dst = indices(region)
    order = np.arange(src.size)
    dice.shuffle(order)  # type: ignore[attr-defined]
    fitted = fit("t", src[order], dst[order])
    assert pairs(fitted) == pairs([region])
    assert len(fitted) == 1
    assert fitted[0].elements == normalise(region).elements


@given(st.dictionaries(st.integers(0, 60), st.integers(0, 60), max_size=40))
def test_any_pairs_at_all_are_kept_exactly(table: dict[int, int]) -> None:
    dst, src = (np.array(list(side), np.int64) for side in (table.keys(), table.values()))
    assert pairs(fit("t", src, dst)) == sorted((s, d) for d, s in table.items())


@pytest.mark.parametrize("heads", [1, 2, 3, 8])
@pytest.mark.parametrize("half", [2, 3, 16])
@pytest.mark.parametrize("hidden", [1, 5, 64])
def test_a_rotary_permutation_is_one_region(heads: int, half: int, hidden: int) -> None:
    local = np.arange(heads * 2 * half * hidden)
    canonical = local.reshape(heads, half, 2, hidden).transpose(0, 2, 1, 3).ravel()
    assert len(fit("q", canonical, local)) == 1


def test_interleaved_and_transposed_halves_are_one_region() -> None:
    hidden, inner = 6, 4
    local = np.arange(2 * inner * hidden).reshape(2, inner, hidden)
    (region,) = fit("gate_up", local.transpose(2, 1, 0).ravel(), np.arange(local.size))
    assert region.elements == local.size


def test_uneven_groups_stay_few() -> None:
    rows = np.concatenate([np.arange(0, 7), np.arange(20, 25), np.arange(40, 43)])
    src = (rows[:, None] * 10 + np.arange(4)).ravel()
    assert len(fit("t", src, np.arange(src.size))) == 3


def test_what_is_no_layout_is_refused_by_name() -> None:
    shuffled = np.random.default_rng(1).permutation(20_000)
    with pytest.raises(Incompatible, match=r"model\.x is not a strided layout"):
        fit("model.x", shuffled, np.arange(20_000))


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="occurs twice"):
        fit("t", np.array([0, 1]), np.array([3, 3]))
    with pytest.raises(ValueError, match="places for"):
        fit("t", np.arange(3), np.arange(4))
