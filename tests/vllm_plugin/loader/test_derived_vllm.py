"""Models of vLLM that keep copies of their weights, or one layer under several names, are exact after a refit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from architectures.checkpoints import write_checkpoint_of
from architectures.configs import small_config
from support.vllm.model_families import write_family
from support.vllm.refits import Refitted
from support.vllm.worker_rig import step

from dcr_daemon.vllm_plugin import calls, cpu_rig
from dcr_daemon.vllm_plugin.calls import JobState, Op

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("inspect_here")]


def test_experts_of_layers_that_two_decoders_hold_are_refitted(tmp_path: Path) -> None:
    """Gemma 4 keeps its layers in the model, and in two decoders that are compiled by themselves (YOCO)."""
    path = write_checkpoint_of(small_config("Gemma4ForCausalLM"), tmp_path / "v0")
    case = Refitted.served(path, tmp_path, skip_tokenizer_init=True, max_model_len=128)
    names = dict(case.model.named_parameters(remove_duplicate=False))
    experts = [name for name in names if name.endswith("w13_weight")]
    assert len({id(names[name]) for name in experts}) < len(experts)
    case.refit(step(case.states[-1], 0.05, seed=1))
    assert case.against_a_fresh_load() == []


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers keep a transposed copy of their weights, in fp32, as a kernel may want it."""
    from vllm.model_executor.layers import utils

    cpu_rig.install()
    leave = utils.dispatch_cpu_unquantized_gemm

    def pack(layer: Any, remove_weight: bool) -> None:
        leave(layer, remove_weight)
        layer.packed = [layer.weight.data.t().float().contiguous()]

    monkeypatch.setattr(pack, "leaves_unpacked", True, raising=False)
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", pack)


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_copy_of_weights_is_written_rolled_back_and_scrubbed_with_them(family: str, tmp_path: Path) -> None:
    path = write_family(tmp_path / "v0", family)
    case = Refitted.served(path, tmp_path, skip_tokenizer_init=True, max_model_len=128)
    copies = case.driver.worker._dcr_session._attachment.placement.replay.copies
    assert copies
    before = [piece.target.clone() for copy in copies for piece in copy.pieces]
    case.refit(step(case.states[-1], 0.2, seed=1))
    assert case.against_a_fresh_load() == []
    assert not all(map(torch.equal, before, (piece.target for copy in copies for piece in copy.pieces)))
    assert case.wrong_sums() == [], "each element is counted once"
    assert scrubbed(case) == []
    target = copies[0].pieces[0].target
    target[(0,) * target.dim()] += 1
    assert scrubbed(case), "the tensors that the copy came from"
    assert scrubbed(case), "a second look shows it too"
    assert case.driver.attach(case.layout, tmp_path).refusals == {}
    assert scrubbed(case) == []
    case.refit(step(case.states[-1], 0.2, seed=2))
    assert case.against_a_fresh_load() == []


def test_a_copy_that_a_first_call_makes_follows_its_weight(tmp_path: Path) -> None:
    path = write_family(tmp_path / "v0", "llama")
    case = Refitted(path, tmp_path, skip_tokenizer_init=True, max_model_len=128)
    projection = next(layer for name, layer in case.model.named_modules() if name.endswith("gate_up_proj"))
    projection.cached = projection.weight.data[8:40].t().contiguous()
    case.attach()
    assert case.attached.refusals == {}
    for seed in (1, 2):
        case.refit(step(case.states[-1], 0.2, seed=seed))
        assert torch.equal(projection.cached, projection.weight.data[8:40].t())
        assert scrubbed(case) == []
        assert case.driver.attach(case.layout, tmp_path).refusals == {}
    for damaged in (projection.cached, projection.weight.data[8:40]):
        damaged[0, 0] += 1
        assert [name.split(".")[-2] for name in scrubbed(case)] == ["gate_proj", "up_proj"]
        assert case.driver.attach(case.layout, tmp_path).refusals == {}, "what is damaged can be repaired"
        assert torch.equal(projection.cached, projection.weight.data[8:40].t())
    projection.weight.data.copy_(torch.randn(projection.weight.shape))
    assert case.driver.attach(case.layout, tmp_path).refusals == {}
    assert torch.equal(projection.cached, projection.weight.data[8:40].t()), "another writer left the old bits there"
    projection.cached = None
    assert case.driver.attach(case.layout, tmp_path).refusals == {}
    assert case.driver.worker._dcr_session._attachment.placement.replay.copies == []


def test_a_copy_that_a_layers_method_keeps_follows_its_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an attention backend keeps its sinks in fp32; and a copy in which each element lies twice."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    process = UnquantizedLinearMethod.process_weights_after_loading

    def keeping(method: Any, layer: Any) -> None:
        process(method, layer)
        if "o_proj" in getattr(layer, "prefix", ""):
            method.wide = layer.weight.float()

    monkeypatch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", keeping)
    case = Refitted(write_family(tmp_path / "v0", "llama"), tmp_path, skip_tokenizer_init=True, max_model_len=128)
    down = next(layer for name, layer in case.model.named_modules() if name.endswith("down_proj"))
    down.twice = torch.cat([down.weight.t(), down.weight.t()])
    case.attach()
    assert case.attached.refusals == {}
    case.refit(step(case.states[-1], 0.2, seed=1))
    assert torch.equal(down.twice, torch.cat([down.weight.t(), down.weight.t()]))
    outputs = [layer for name, layer in case.model.named_modules() if name.endswith("o_proj")]
    assert outputs
    assert all(torch.equal(layer.quant_method.wide, layer.weight.float()) for layer in outputs)


def test_a_weight_that_equals_another_one_is_no_copy_of_it(tmp_path: Path) -> None:
    """A trainer ties its head to the embedding, and the configuration that is served does not."""
    path = write_family(tmp_path / "v0", "llama")
    case = Refitted.served(path, tmp_path, skip_tokenizer_init=True, max_model_len=128)
    embedding, head = (case.layout.index(name) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    tied = step(case.states[-1], 0.2, seed=1)
    tied[embedding] = tied[head].copy()
    case.refit(tied)
    assert case.driver.attach(case.layout, tmp_path).refusals == {}
    assert case.driver.worker._dcr_session._attachment.placement.replay.copies == []
    case.refit(step(tied, 0.2, seed=2))
    assert case.against_a_fresh_load() == []


def scrubbed(case: Refitted) -> list[str]:
    case.driver.ok(Op.START, id="s", kind="scrub", tensors=(0, len(case.layout)))
    assert case.driver.finish("s").state is JobState.DONE
    found = case.driver.ok(Op.JOIN, calls.FingerprintRank, id="s")
    return [case.layout[tensor].name for tensor in found.stale]
