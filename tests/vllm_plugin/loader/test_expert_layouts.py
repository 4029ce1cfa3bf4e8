"""Mixtures whose experts lie as FlashInfer's kernels want them: what a refit leaves is what a fresh load makes.

vLLM's own conversion runs on CPU tensors; no kernel does. The order of rows is FlashInfer's where it is installed
(`make flashinfer`), and otherwise another one of the same kind.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from support.vllm.model_families import write_family
from support.vllm.refits import Refitted, RefittedRanks
from support.vllm.worker_rig import step

from dcr_daemon.vllm_plugin.loader import permutation

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("inspect_here")]

INSTALLED = Path(sys.prefix) / "flashinfer"


def row_order(cache: Any, rows: torch.Tensor, tile: int, **_: Any) -> torch.Tensor:
    """Some order of the rows inside each tile."""
    order = torch.randperm(rows.shape[0], generator=torch.Generator().manual_seed(rows.shape[0]))
    return order.reshape(-1, tile).sort(dim=0).values.reshape(-1) if rows.shape[0] % tile == 0 else order


KERNELS = ["FLASHINFER_TRTLLM", "FLASHINFER_TRTLLM with FlashInfer", "FLASHINFER_CUTLASS"]


def provide_flashinfer(real: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if real:
        monkeypatch.syspath_prepend(str(INSTALLED))
        if importlib.util.find_spec("flashinfer") is None:
            pytest.skip("FlashInfer is not installed; `make flashinfer` installs it beside the environment")
        return
    core = ModuleType("flashinfer.fused_moe.core")
    core._maybe_get_cached_w3_w1_permute_indices = row_order  # type: ignore[attr-defined]
    core.get_w2_permute_indices_with_cache = row_order  # type: ignore[attr-defined]
    for name, module in (("flashinfer", ModuleType("flashinfer")), ("flashinfer.fused_moe", ModuleType("fused_moe"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, core.__name__, core)


@pytest.fixture(params=KERNELS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """vLLM chooses and converts as on a GPU, and makes no kernel."""
    from vllm.model_executor.layers.fused_moe import config, unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    name, _, real = request.param.partition(" with ")
    provide_flashinfer(bool(real), monkeypatch)
    monkeypatch.setattr(permutation, "_known", {})
    chosen = UnquantizedMoeBackend[name]
    method = unquantized_fused_moe_method.UnquantizedFusedMoEMethod
    experts = SimpleNamespace(process_weights_after_loading=lambda layer: None)
    monkeypatch.setattr(unquantized_fused_moe_method, "select_unquantized_moe_backend", lambda *_, **__: (chosen, None))
    monkeypatch.setattr(
        method, "_init_moe_kernel", lambda self, _: setattr(self, "moe_kernel", SimpleNamespace(fused_experts=experts))
    )
    check = config.FusedMoEConfig.__post_init__

    def as_on_a_gpu(self: Any) -> None:
        with contextlib.suppress(NotImplementedError):  # experts without a gate: its last rule, for CPUs only
            check(self)

    monkeypatch.setattr(config.FusedMoEConfig, "__post_init__", as_on_a_gpu)
    return str(name)


SIZES = {"hidden_size": 256, "head_dim": 64}
LATENT = {"num_hidden_layers": 3, "hybrid_override_pattern": "M*E", "n_routed_experts": 4, "num_experts_per_tok": 2,
          "moe_latent_size": 128, "moe_shared_expert_intermediate_size": 48, "n_shared_experts": 1, "n_group": 1,
          "topk_group": 1, "mamba_num_heads": 16, "mamba_head_dim": 32}  # fmt: skip


WHOLE = [
    pytest.param("qwen3_moe", {"moe_intermediate_size": 128}, id="gated"),
    pytest.param("nemotron_h", LATENT | {"moe_intermediate_size": 128}, id="relu2"),
]
PADDED = [
    pytest.param("qwen3_moe", {"moe_intermediate_size": 96}, id="padded"),
    pytest.param("nemotron_h", LATENT | {"moe_intermediate_size": 96}, id="relu2-padded"),
]


@pytest.mark.parametrize(("family", "fields"), WHOLE + PADDED)
def test_a_refit_leaves_what_a_fresh_load_converts(
    family: str, fields: dict[str, Any], backend: str, tmp_path: Path
) -> None:
    path = write_family(tmp_path / "v0", family, **(SIZES | fields))
    case = Refitted.served(path, tmp_path, skip_tokenizer_init=True, max_model_len=128)
    (experts,) = (layer for name, layer in case.model.named_modules() if hasattr(layer, "w13_weight"))
    assert experts.quant_method.unquantized_backend.name == backend
    case.refit(step(case.states[-1], 0.05, seed=1))
    assert case.against_a_fresh_load() == []


@pytest.mark.parametrize(("family", "fields"), PADDED)
def test_each_of_two_ranks_pads_its_half_and_follows(
    family: str, fields: dict[str, Any], backend: str, tmp_path: Path
) -> None:
    """Half of 96 is 48, which FlashInfer's layouts pad on each rank."""
    path = write_family(tmp_path / "v0", family, **(SIZES | fields))
    case = RefittedRanks(path, tmp_path, skip_tokenizer_init=True, max_model_len=128)
    assert case.wrong_sums() == []
    case.refit(step(case.ranks[0].states[-1], 0.05, seed=1))
    assert case.wrong_sums() == []
    assert case.against_a_fresh_load() == []
