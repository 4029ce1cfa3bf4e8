"""transformers' own conversion, followed: exactly once, one region per pair, and equal to what it does to numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tensors.maps import map_of

from dcr_daemon.canonical.coverage import exactly_once
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.canonical.region import indices
from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.frameworks.transformers_v5 import conversion
from dcr_daemon.projection.region_map import gaps

PLAIN: dict[str, Any] = {
    "vocab_size": 70, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "num_experts_per_tok": 2,
           "moe_intermediate_size": 24}  # fmt: skip
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
       "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 48},
    "mixtral": EXPERTS,
    "gpt_oss": EXPERTS,
    "deepseek_v3": EXPERTS | MLA | {"num_key_value_heads": 4},
    "glm4_moe": EXPERTS | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "olmoe": EXPERTS,
    "qwen3_next": EXPERTS | {"shared_expert_intermediate_size": 48, "linear_num_key_heads": 2,
                             "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "nemotron_h": EXPERTS | {"n_groups": 1, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16,
                             "hybrid_override_pattern": "M*E", "num_hidden_layers": 3, "n_group": 1, "topk_group": 1,
                             "moe_shared_expert_intermediate_size": 24},
    "gemma3_text": {},
}  # fmt: skip


def tiny(family: str, device: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **(PLAIN | FAMILIES[family]))
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def saved_layout(model: Any, path: Path) -> Layout:
    model.save_pretrained(path)
    with Checkpoint(path) as checkpoint:
        return checkpoint.layout


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_is_covered_exactly_once_by_one_region_per_pair(family: str, tmp_path: Path) -> None:
    """Judged by the checkpoint that the library writes: names and shapes, and where it puts numbered elements."""
    model = tiny(family, "cpu")
    numbers, at = {}, 0
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() in numbers:
            continue
        numbers[tensor.data_ptr()] = name, at
        tensor.copy_(torch.arange(at, at + tensor.numel()).reshape(tensor.shape))
        at += tensor.numel()
    assert at < 1 << 24, "numbers must be exact in the parameters' dtype"
    layout = saved_layout(model, tmp_path)
    traced = conversion(model)
    assert traced.opaque == {}
    made = map_of(model.state_dict().items(), layout, conversion=traced)
    assert gaps([made], layout) == []
    table = model.state_dict()
    with Checkpoint(tmp_path) as checkpoint:
        bits = {spec.name: checkpoint.bits(spec.name).copy() for spec in layout}
    for shard in made.shards:
        assert len({r.name for r in shard.regions}) == len(shard.regions)
        for region in shard.regions:
            src, dst = indices(region)
            local = table[shard.parameter].reshape(-1).view(torch.int32).numpy()
            assert (local[src].view("u4") == bits[region.name][dst]).all(), (shard.parameter, region.name)


def test_a_model_without_memory_answers_alike() -> None:
    real, meta = conversion(tiny("qwen3_moe", "cpu")), conversion(tiny("qwen3_moe", "meta"))
    assert real == meta


def test_a_model_of_thirty_billion_is_mapped_at_full_size() -> None:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        num_hidden_layers=4, num_experts=128, hidden_size=2048, moe_intermediate_size=768, vocab_size=151936,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, intermediate_size=6144,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    traced = conversion(model)
    regions = [region for of_local in traced.regions.values() for region in of_local]
    assert exactly_once(regions, {name: shape for name, (_, shape) in traced.tensors.items()}) == []
    assert sum(region.elements for region in regions) == sum(tensor.numel() for tensor in model.state_dict().values())
    assert len(regions) == len(traced.tensors)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(Incompatible, match="is no transformers model"):
        conversion(json)
