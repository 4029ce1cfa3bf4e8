"""What vLLM derived from weights is made again by vLLM's own hook, or refused."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dcr_daemon.vllm_plugin import calls
from dcr_daemon.vllm_plugin.calls import JobState, Op
from dcr_daemon.vllm_plugin.loader.derived import Derived
from dcr_daemon.vllm_plugin.loader.replay import Hook, Replay


class Layer(torch.nn.Module):
    """Keeps its weight in fp32 beside it; `how` is what its hook does after loading."""

    def __init__(self, how: Callable[[Layer], None]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).bfloat16(), requires_grad=False)
        self.wide = self.weight.float()
        self.how = how

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        assert dtype is torch.bfloat16 is torch.get_default_dtype()
        self.how(self)


def replay(how: Callable[[Layer], None]) -> tuple[Layer, Replay]:
    layer = Layer(how)
    found = Derived("layer.wide", frozenset({"layer.weight"}), frozenset({"_to_copy"}), layer.wide)
    return layer, Replay([Hook(layer, (found,))], torch.bfloat16)


def in_place(layer: Layer) -> None:
    layer.wide.copy_(layer.weight)


def test_a_hook_that_copies_in_place_is_proved_and_follows_the_weight() -> None:
    layer, again = replay(in_place)
    assert again.unproved() == []
    layer.weight.data[2] = 99
    assert [one.path for one in again.differing({"layer.weight"})] == ["layer.wide"]
    assert layer.wide[2] == 2, "the damage stays until it is repaired"
    assert again.differing({"other.weight"}) == []
    again.run()
    assert layer.wide.tolist() == layer.weight.tolist()


def replaces(layer: Layer) -> None:
    layer.wide = layer.weight.float()


def adds(layer: Layer) -> None:
    layer.wide.add_(layer.weight)


def fails(layer: Layer) -> None:
    raise RuntimeError("only once")


@pytest.mark.parametrize("how", [replaces, adds, fails, lambda layer: None], ids=["replaces", "adds", "fails", "none"])
def test_a_hook_that_does_not_make_the_tensor_is_no_way_and_the_tensor_is_left_as_it_was(
    how: Callable[[Layer], None],
) -> None:
    layer, again = replay(how)
    first = layer.wide
    assert [one.path for one in again.unproved()] == ["layer.wide"]
    assert first.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_derived_tensor_that_was_stale_at_attach_is_mended_by_the_proof() -> None:
    layer, again = replay(in_place)
    layer.weight.data.add_(1)
    assert again.unproved() == []
    assert layer.wide.tolist() == layer.weight.tolist()


def method_of(module: Path, name: str) -> Any:
    """A method out of the source of a module that cannot be imported here; the last one of that name."""
    text = module.read_text()
    node = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == name][-1]
    scope: dict[str, Any] = {"torch": torch}
    exec(textwrap.dedent(ast.get_source_segment(text, node, padded=True) or ""), scope)
    return scope[name]


@pytest.fixture
def flashinfer_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention backend keeps its sinks as FlashInfer's does."""
    import vllm
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    make = CPUAttentionBackendImpl.__init__

    def init(self: Any, *args: Any, **more: Any) -> None:
        make(self, *args, **more)
        self._sinks_source = self.sinks

    source = Path(vllm.__file__).parent / "v1" / "attention" / "backends" / "flashinfer.py"
    hook = method_of(source, "process_weights_after_loading")
    monkeypatch.setattr(CPUAttentionBackendImpl, "__init__", init)
    monkeypatch.setattr(CPUAttentionBackendImpl, "process_weights_after_loading", hook)


@pytest.fixture
def dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latent attention makes its matrices from a copy, as of a quantised projection."""
    from vllm.model_executor.layers.attention import mla_attention

    get = mla_attention.get_and_maybe_dequant_weights
    monkeypatch.setattr(mla_attention, "get_and_maybe_dequant_weights", lambda *a, **k: get(*a, **k).clone())


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("family", "how", "source"),
    [("gpt_oss", "flashinfer_sinks", "self_attn.sinks"), ("deepseek_v3", "dequantised", "kv_b_proj.weight")],
)
def test_a_refit_leaves_derived_tensors_as_a_fresh_load_makes_them(
    family: str, how: str, source: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    request.getfixturevalue("inspect_here")
    request.getfixturevalue(how)
    from support.vllm.model_families import write_family
    from support.vllm.refits import Refitted
    from support.vllm.worker_rig import step

    case = Refitted.served(write_family(tmp_path / "v0", family), tmp_path, skip_tokenizer_init=True, max_model_len=128)
    case.refit(step(case.states[-1], 0.2, seed=1))
    assert case.against_a_fresh_load() == []
    assert scrubbed(case) == []
    again = case.driver.worker._dcr_session._attachment.placement.replay
    made = [one for hook in again.hooks for one in hook.made]
    assert made
    made[0].tensor.view(torch.uint8)[0] ^= 1
    assert [name.partition("layers.0.")[2].removeprefix("self_attn.") for name in scrubbed(case)] == [
        source.removeprefix("self_attn.")
    ]
    assert scrubbed(case) != [], "a second look shows it too"
    assert case.driver.attach(case.layout, tmp_path).refusals == {}
    assert scrubbed(case) == []


def scrubbed(case: Any) -> list[str]:
    case.driver.ok(Op.START, id="s", kind="scrub", tensors=(0, len(case.layout)))
    assert case.driver.finish("s").state is JobState.DONE
    found = case.driver.ok(Op.JOIN, calls.FingerprintRank, id="s")
    return [case.layout[tensor].name for tensor in found.stale]
