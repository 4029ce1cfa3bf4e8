"""A loader that reorders a tensor is followed to the element, or the tensor is refused; never guessed."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from support.tensors.regions import pairs

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.canonical.region import box
from dcr_daemon.vllm_plugin.loader import reorder
from dcr_daemon.vllm_plugin.loader.recorder import Recording, record

HEADS, INNER, WIDTH = 4, 6, 8
SHAPE = (HEADS * 3 * INNER, WIDTH)
Reorder = Callable[[torch.Tensor], torch.Tensor]


def interleaved(w: torch.Tensor) -> torch.Tensor:
    """BLOOM and GPT-NeoX: per head q, k, v."""
    return w.view(HEADS, 3, INNER, WIDTH).transpose(0, 1).reshape(SHAPE)


def grouped(w: torch.Tensor) -> torch.Tensor:
    """Falcon: per group its queries, one key, one value."""
    parts = w.view(HEADS, 3, INNER, WIDTH)
    return torch.cat([parts.narrow(1, 0, 1).reshape(-1, WIDTH), parts.narrow(1, 1, 1).reshape(-1, WIDTH),
                      parts.narrow(1, 2, 1).reshape(-1, WIDTH)])  # fmt: skip


def rotary(w: torch.Tensor) -> torch.Tensor:
    """Llama's own format: even and odd channels of a head come apart."""
    return w.view(HEADS * 3, INNER // 2, 2, WIDTH).transpose(1, 2).reshape(SHAPE)


def stacked(w: torch.Tensor) -> torch.Tensor:
    return torch.stack([w[::2], w[1::2]]).flatten(0, 1)


def twice(w: torch.Tensor) -> torch.Tensor:
    return interleaved(rotary(w))


def packed(w: torch.Tensor) -> torch.Tensor:
    return w.t().contiguous().view(SHAPE)


def scattered(w: torch.Tensor) -> torch.Tensor:
    return torch.cat([w[7:11], w[0:2], w[30:72], w[11:30], w[2:7]])


def recording_of(reorder: Reorder, shard: slice = slice(None)) -> tuple[Recording, torch.Tensor]:
    layout = Layout([TensorSpec("w", "BF16", SHAPE)])
    parameter = torch.empty(reorder(torch.empty(SHAPE))[shard].shape, dtype=torch.bfloat16, device="meta")

    def load(weights) -> None:
        parameter.copy_(reorder(dict(weights)["w"])[shard])

    return record(load, lambda: [("p", parameter)], layout), parameter


@pytest.mark.parametrize("shard", [slice(None), slice(0, 36), slice(36, 72), slice(6, 11)])
@pytest.mark.parametrize("reorder", [interleaved, grouped, rotary, stacked, twice, packed, scattered])
def test_every_element_of_a_reordered_tensor_is_found(reorder: Reorder, shard: slice) -> None:
    recording, parameter = recording_of(reorder, shard)
    assert recording.rejected == {}
    found = np.full(parameter.numel(), -1)
    for place, element in pairs(copy.region for copy in recording.copies):
        assert found[place] == -1
        found[place] = element
    assert (found == reorder(torch.arange(np.prod(SHAPE)).view(SHAPE))[shard].flatten().numpy()).all()


def test_blocks_take_few_regions() -> None:
    assert len(recording_of(interleaved)[0].copies) == 1
    assert len(recording_of(grouped)[0].copies) == 1
    assert len(recording_of(rotary)[0].copies) == 1


def test_a_scattered_order_is_refused_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.tensor([[0, 5, 3], [4, 2, 1]], dtype=torch.int32)
    assert reorder.regions("w", numbers, (3, 1)) is None
    monkeypatch.setattr(reorder, "BOXES", 2)
    assert "single elements" in recording_of(scattered)[0].rejected["w"]
    monkeypatch.setattr(reorder, "LIMIT", 2)
    assert "reorders more than 2" in recording_of(grouped)[0].rejected["w"]


@settings(deadline=None)
@given(st.permutations(range(24)), st.integers(1, 3))
def test_any_order_of_one_axis_comes_back_whole(order: list[int], stride: int) -> None:
    numbers = torch.tensor(order, dtype=torch.int32)
    found = reorder.regions("w", numbers, (stride,)) or []
    assert pairs(found) == [(place * stride, number) for place, number in enumerate(order)]


def test_heads_placed_twice_are_placed_whole_each_time() -> None:
    """What a rank holds twice must be called as another rank calls what it holds once."""
    heads = torch.arange(24, dtype=torch.int32).view(4, 6)
    together = reorder.regions("w", heads.repeat_interleave(2, 0), (6, 1)) or []
    one_by_one = reorder.regions("w", torch.cat([heads, heads]), (6, 1)) or []
    assert len(together) == len(one_by_one) == 2
    assert {(region.dst, box(region).shape) for region in (*together, *one_by_one)} == {(0, (24,))}
