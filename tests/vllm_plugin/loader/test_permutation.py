"""A repacked layout is found by probing, and only a permutation is believed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dcr_daemon.canonical import region
from dcr_daemon.canonical.region import Region
from dcr_daemon.vllm_plugin.loader import permutation
from dcr_daemon.vllm_plugin.loader.permutation import find_permutations, require_kept
from dcr_daemon.vllm_plugin.weights.placement import DROPPED, Repack, Unplaceable

SHAPES = {"w13_weight": (40, 32), "w2_weight": (512, 64)}  # the second needs more than one digit


def test_any_permutation_with_padding_is_recovered() -> None:
    rng = np.random.default_rng(0)
    orders = {name: torch.from_numpy(rng.permutation(int(np.prod(s)) + 100)) for name, s in SHAPES.items()}

    def repack(layer: torch.nn.Module) -> None:
        for name, order in orders.items():
            flat = torch.nn.functional.pad(getattr(layer, name).data.reshape(-1), (0, 100))
            setattr(layer, name, torch.nn.Parameter(flat[order].reshape(1, -1), requires_grad=False))

    found = find_permutations(SHAPES, repack)
    for name, shape in SHAPES.items():
        block = int(np.prod(shape))
        loaded = torch.arange(block) + 1
        live = torch.nn.functional.pad(loaded, (0, 100))[orders[name]]
        assert (found[name].block, found[name].live_block) == (block, block + 100)
        assert torch.equal(live[torch.from_numpy(found[name].table.astype(np.int64))], loaded)


@pytest.mark.parametrize("how", ["duplicate", "arithmetic"])
def test_what_is_no_permutation_is_refused(how: str) -> None:
    def repack(layer: torch.nn.Module) -> None:
        data = layer.w13_weight.data.reshape(-1)
        if how == "duplicate":
            data[1] = data[0]
        else:
            data.mul_(2)

    with pytest.raises(Unplaceable, match="w13_weight"):
        find_permutations({"w13_weight": (40, 32)}, repack)


def test_an_element_that_vanishes_is_refused_only_where_the_loader_fills_it() -> None:
    def repack(layer: torch.nn.Module) -> None:
        layer.w13_weight.data[:, :, 24:] = 0
        layer.w13_weight.data = layer.w13_weight.data.transpose(1, 2).contiguous()

    (found,) = find_permutations({"w13_weight": (40, 32)}, repack).values()
    assert (found.table == DROPPED).sum() == 40 * 8
    columns = Region("t", (3, 40, 24), 0, (1280, 32, 1), 0, (960, 24, 1))
    require_kept("w13_weight", columns, found)
    for wrong in (Region("t", (40, 25), 1280, (32, 1), 0, (25, 1)), Region("t", (1,), 1280 + 24, (1,), 0, (1,))):
        with pytest.raises(Unplaceable, match="w13_weight loses elements"):
            require_kept("w13_weight", wrong, found)


def test_copies_of_one_shape_are_judged_once_whatever_layer_they_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = []

    def indices(part: Region) -> object:
        judged.append(part)
        return region.indices(part)

    monkeypatch.setattr(permutation, "indices", indices)
    table = np.arange(64, dtype=np.uint32)
    experts = Region("t", (3, 60), 0, (64, 1), 0, (60, 1))
    require_kept("w", experts, Repack(64, 64, table))
    assert judged == [], "a table that keeps all elements needs no look"
    table = table.copy()
    table[60:] = DROPPED
    padded = Repack(64, 64, table)
    for layer in ("one.w", "two.w"):
        require_kept(layer, experts, padded)
    assert len(judged) == 1
    with pytest.raises(Unplaceable):
        require_kept("w", Region("t", (3, 61), 0, (64, 1), 0, (61, 1)), padded)
    assert len(judged) == 2
