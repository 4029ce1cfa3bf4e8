"""The recorder follows copies and nothing else; what it cannot follow it names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.canonical.region import Region
from dcr_daemon.vllm_plugin.calls import AttachedRank, TensorHandling
from dcr_daemon.vllm_plugin.core import verify_sums
from dcr_daemon.vllm_plugin.loader import place_model
from dcr_daemon.vllm_plugin.loader.recorder import Recording, record
from dcr_daemon.vllm_plugin.weights.placement import Copy

LAYOUT = Layout([TensorSpec("a", "BF16", (4, 6)), TensorSpec("b", "BF16", (4, 6))])


def watch(loader: Callable[[dict[str, torch.Tensor], torch.Tensor], None], *, dtype=torch.bfloat16) -> Recording:
    parameter = torch.empty(8, 6, dtype=dtype, device="meta")

    def load(weights) -> None:
        loader(dict(weights), parameter)

    return record(load, lambda: [("p", parameter)], LAYOUT)


def test_a_fused_transposed_sharded_copy_is_followed_through_views_and_clones() -> None:
    def load(w, p):
        p[:4].copy_(w["a"])
        p.narrow(0, 4, 2).narrow(1, 0, 3).t().copy_(w["b"].to(torch.bfloat16).narrow(0, 2, 2).t()[:3].contiguous())
        p[6:].fill_(0)

    recording = watch(load)
    assert recording.rejected == {}
    assert recording.offered == ["a", "b"]
    assert recording.copies == [
        Copy("p", Region("a", (24,), 0, (1,), 0, (1,))),
        Copy("p", Region("b", (2, 3), 24, (6, 1), 12, (6, 1))),
    ]


@pytest.mark.parametrize(
    ("loader", "word"),
    [
        (lambda w, p: p[:4].copy_(w["a"].float()), "casts"),
        (lambda w, p: p[:4].copy_(w["a"][0]), "broadcasts"),
        (lambda w, p: p.copy_(torch.cat([w["a"], w["b"]])), "computes"),
        (lambda w, p: p[:4].copy_(-w["a"]), "computes"),
        (lambda w, p: p[:4].add_(w["a"]), "writes through"),
    ],
    ids=["cast", "broadcast", "cat", "arithmetic", "in place"],
)
def test_what_is_not_a_copy_rejects_its_tensor(loader, word: str) -> None:
    recording = watch(loader)
    assert word in recording.rejected["a"]
    assert not [copy for copy in recording.copies if copy.tensor == "a"]


def test_a_cast_into_a_wider_parameter_is_rejected() -> None:
    recording = watch(lambda w, p: p[:4].copy_(w["a"]), dtype=torch.float32)
    assert "casts" in recording.rejected["a"]


def test_a_loader_that_raises_rejects_the_model_and_says_where() -> None:
    def load(w, p):
        raise KeyError("no such layer")

    assert "no such layer" in watch(load).rejected[""]


def test_a_staged_copy_names_the_tensor_in_hand() -> None:
    def load(w, p):
        staging = torch.empty(4, 6, dtype=torch.bfloat16, device="meta")
        staging.copy_(w["b"])
        p[:4].copy_(staging)

    assert "staged" in watch(load).rejected["b"]


def test_a_parameter_that_the_loader_registers_itself_is_known_by_its_name() -> None:
    made: dict[str, torch.Tensor] = {}

    def load(weights) -> None:
        made["new"] = torch.zeros(4, 6, dtype=torch.bfloat16)
        made["new"].copy_(dict(weights)["a"])

    recording = record(load, made.items, LAYOUT)
    assert recording.copies == [Copy("new", Region("a", (24,), 0, (1,), 0, (1,)))]
    assert not made["new"].any()


def test_live_tensors_are_never_written_while_recording() -> None:
    live = torch.ones(4, 6, dtype=torch.bfloat16)

    def load(weights) -> None:
        for _, tensor in weights:
            live.copy_(tensor)
            live.fill_(0)
            live.mul_(3)

    record(load, lambda: [("live", live)], LAYOUT)
    assert (live == 1).all()


def test_a_tensor_that_the_loader_sets_to_zero_is_not_on_this_rank() -> None:
    """As gpt-oss loads the bias that only the first rank adds."""

    def load(w, p):
        p[:4].copy_(w["a"])
        for row in range(4):
            p[4 + row].copy_(w["b"].zero_()[row])

    recording = watch(load)
    assert recording.rejected == {}
    assert recording.zeroed == {"p"}
    assert {copy.tensor for copy in recording.copies} == {"a"}


def test_a_tensor_of_which_the_loader_sets_a_part_to_zero_is_rejected() -> None:
    recording = watch(lambda w, p: p[:4].copy_(w["a"][:2].zero_()))
    assert "writes through" in recording.rejected["a"]


class Biased(torch.nn.Module):
    """Loads its bias as gpt-oss does: only the first rank adds it, the others hold zeros."""

    def __init__(self, rank: int, device: str) -> None:
        super().__init__()
        self.rank = rank
        self.weight = torch.nn.Parameter(torch.zeros(4, 6, dtype=torch.bfloat16, device=device), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.zeros(4, 6, dtype=torch.bfloat16, device=device), requires_grad=False)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if name == "b" and self.rank:
                tensor.zero_()
            getattr(self, {"a": "weight", "b": "bias"}[name]).copy_(tensor)


def placed(model: Biased):
    blank = Biased(model.rank, "meta")
    form = place_model.LoadFormat(place_model.named(model), place_model.named(blank), {}, {}, frozenset())
    return place_model.place(record(blank.load_weights, blank.named_parameters, LAYOUT), form, LAYOUT)


def test_ranks_that_hold_zeros_and_the_one_that_holds_the_bias_are_served_together() -> None:
    placements = [placed(Biased(rank, "cpu")) for rank in (0, 1)]
    assert [placement.refusals for placement in placements] == [{}, {}]
    assert placements[1].held == [TensorHandling.PLACED, TensorHandling.SKIPPED]
    answers = [
        AttachedRank(token=1, adopted=None, held=placement.held, boxes=placement.boxes, refusals={})
        for placement in placements
    ]
    assert verify_sums.join_placement(LAYOUT, answers).exact.all()


def test_a_rank_that_should_hold_zeros_and_does_not_is_refused() -> None:
    model = Biased(1, "cpu")
    model.bias[0, 0] = 1
    assert "fills bias with zeros on this rank" in placed(model).refusals[""]
