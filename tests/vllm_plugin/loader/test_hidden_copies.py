"""A copy of weights that appears after loading is found by its content, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from dcr_daemon.vllm_plugin.loader import hidden_copies, line_search


class Model(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = torch.nn.Parameter(torch.randn(24, 32).to(dtype), requires_grad=False)
        self.up = torch.nn.Parameter(torch.randn(24, 32).to(dtype), requires_grad=False)
        self.sinks = torch.nn.Parameter(torch.randn(8).to(dtype), requires_grad=False)
        self.rotary = torch.outer(torch.arange(64.0), torch.rand(16)).cos()
        self.kept: Any = None


def found(model: Model, known: set[int] | None = None) -> dict[str, str]:
    copies = hidden_copies.find(model, dict(model.named_parameters()), known=known or set())
    return {one.path: one.source for one in copies}


COPIES = {
    "copy": lambda m: m.up.clone(),
    "cast": lambda m: m.up.float(),
    "transposed": lambda m: m.up.t().contiguous(),
    "joined": lambda m: torch.cat([m.gate, m.up]),
    "joined on the other axis": lambda m: torch.cat([m.gate, m.up], dim=1),
    "part": lambda m: m.up[3:19, 8:24].clone(),
    "rows in another order": lambda m: m.up[torch.randperm(24)],
    "in a larger buffer": lambda m: torch.stack([m.up, m.gate, m.up + 1, m.up]),
    "vector": lambda m: m.sinks.float(),
}


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_a_copy_that_appears_after_loading_is_found(copy: Callable[[Model], torch.Tensor]) -> None:
    model = Model()
    hidden_copies.remember(model)
    assert found(model) == {}
    model.kept = copy(model)
    assert found(model).keys() == {"kept"}
    assert found(model)["kept"] in ("gate", "up", "sinks")


def test_a_buffer_that_is_filled_after_loading_is_found() -> None:
    model = Model()
    model.kept = torch.zeros(24, 32)
    hidden_copies.remember(model)
    model.kept.copy_(model.gate)
    assert found(model) == {"kept": "gate"}


def test_a_narrower_copy_of_wide_weights_is_found() -> None:
    model = Model(torch.float32)
    hidden_copies.remember(model)
    model.kept = model.up.bfloat16()
    assert found(model) == {"kept": "up"}


def test_a_weight_of_several_slices_is_searched_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_search, "SLICE", 50)
    model = Model()
    hidden_copies.remember(model)
    model.kept = model.up[20:].clone()
    assert found(model) == {"kept": "up"}


OTHERS = {
    "values of its own": lambda m: torch.randn(24, 32).bfloat16(),
    "a view": lambda m: m.up.t(),
    "constants": lambda m: torch.ones(64, 64),
    "computed": lambda m: m.up * 3,
    "one row many times": lambda m: m.up[:1].repeat(16, 1),
    "numbers": lambda m: torch.arange(64),
    "nothing": lambda m: torch.zeros(0, 8),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_what_is_no_copy_is_not_found(other: Callable[[Model], torch.Tensor]) -> None:
    model = Model()
    hidden_copies.remember(model)
    model.kept = other(model)
    assert found(model) == {}


def test_what_is_accounted_for_or_unchanged_since_loading_is_not_looked_for() -> None:
    model = Model()
    model.kept = model.up.float()
    assert found(model) == {"kept": "up"}, "nothing is known of the loading"
    assert found(model, {model.kept.untyped_storage()._cdata}) == {}
    hidden_copies.remember(model)
    assert found(model) == {}


def test_one_pass_over_the_weights_serves_all_dtypes_and_what_it_judged_is_not_searched_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes = []
    memories = line_search._memories

    def counted(weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        passes.append(list(weights))
        return memories(weights)

    monkeypatch.setattr(line_search, "_memories", counted)
    model = Model()
    hidden_copies.remember(model)
    assert (found(model), len(passes)) == ({}, 0), "nothing new"
    model.kept = [torch.randn(24, 32), torch.randn(24, 32).bfloat16(), torch.randn(24, 32).half()]
    assert (found(model), len(passes)) == ({}, 1), "three dtypes"
    assert (found(model), len(passes)) == ({}, 1), "all are known"
    model.kept[0].add_(1)
    assert (found(model), len(passes)) == ({}, 2), "one has changed"
    model.kept.append(model.up.t().float().contiguous())
    assert (found(model), len(passes)) == ({"kept.3": "up"}, 3)
    assert (found(model), len(passes)) == ({"kept.3": "up"}, 4), "a copy is never taken as judged"
