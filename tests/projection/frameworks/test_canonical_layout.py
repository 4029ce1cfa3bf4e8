"""The checkpoint that a configuration promises, against what the library itself writes; and the published sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.errors import Incompatible, NotFound, UsageError
from dcr_daemon.projection.frameworks.megatron.model import layout
from dcr_daemon.projection.frameworks.models.families import FAMILIES, read_architecture, shipped

PLAIN = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
MOE = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 2, "moe_intermediate_size": 32, "num_experts_per_tok": 2,
          "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}  # fmt: skip
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
HYBRID = {
    "hybrid_override_pattern": "M*E-", "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16,
    "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 32, "num_nextn_predict_layers": 0,
    "moe_shared_expert_intermediate_size": 48, "moe_latent_size": 40, "num_experts_per_tok": 2,
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "llama": PLAIN,
    "llama with biases": PLAIN | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, tied": PLAIN | {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": PLAIN | {"head_dim": None},
    "qwen3": PLAIN,
    "qwen3_moe": PLAIN | MOE,
    "qwen3_moe, some dense": PLAIN | MOE | {"model_type": "qwen3_moe", "mlp_only_layers": [1]},
    "qwen3_next": PLAIN | MOE | DELTA | {"shared_expert_intermediate_size": 48},
    "deepseek_v3": PLAIN | ROUTED | LATENT,
    "deepseek_v3, plain query": PLAIN | ROUTED | LATENT | {"model_type": "deepseek_v3", "q_lora_rank": None},
    "glm4_moe": PLAIN | ROUTED | {"attention_bias": True},
    "glm4_moe with norms": PLAIN | ROUTED | {"model_type": "glm4_moe", "use_qk_norm": True},
    "gpt_oss": PLAIN | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron_h": PLAIN | HYBRID,
}

#: Billions of parameters, and what a name stands for without its prediction layers.
PUBLISHED = {
    "llama-3.1-8b": 8.030, "qwen3-8b": 8.191, "qwen3-30b-a3b": 30.532, "qwen3-235b-a22b": 235.094,
    "deepseek-v3": 671.026, "glm-4.5-air": 106.852, "gpt-oss-120b": 116.829, "nemotron-3-nano-30b-a3b": 31.578,
    "nemotron-3-super-120b-a12b": 120.669, "nemotron-3-ultra-550b-a55b": 549.309,
}  # fmt: skip


def tiny(name: str) -> dict[str, Any]:
    return {"model_type": name} | copy.deepcopy(TINY[name])


def saved(fields: dict[str, Any]) -> Layout:
    """What `save_pretrained` would write for a model of this configuration in bf16, found on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    given = {key: value for key, value in fields.items() if value is not None or key == "q_lora_rank"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**given), dtype=torch.bfloat16)
    names = model.state_dict()
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    dtypes = {torch.bfloat16: "BF16", torch.float32: "F32"}
    tensors = revert_weight_conversion(model, {name: t for name, t in names.items() if name not in tied})
    return Layout(TensorSpec(name, dtypes[t.dtype], tuple(t.shape)) for name, t in tensors.items())


@pytest.mark.parametrize("name", TINY)
def test_the_layout_is_the_one_that_the_library_saves(name: str) -> None:
    fields = tiny(name)
    expected, found = saved(fields), layout(read_architecture(fields))
    assert {s.name: s.shape for s in found} == {s.name: s.shape for s in expected}
    kept = {s.name for s in found if s.dtype == "F32"}
    assert all(name.endswith("e_score_correction_bias") for name in kept)


def test_every_family_has_a_tiny_member() -> None:
    assert {tiny(name)["model_type"] for name in TINY} == set(FAMILIES)


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_configurations_have_the_published_size(name: str) -> None:
    found = sum(spec.elements for spec in layout(read_architecture(name, prediction=False)))
    assert round(found / 1e9, 3) == PUBLISHED[name]


@pytest.mark.parametrize("name", shipped())
def test_prediction_layers_are_of_the_model_where_its_configuration_says_so(name: str) -> None:
    with_it, without = layout(read_architecture(name)), layout(read_architecture(name, prediction=False))
    extra = {spec.name for spec in with_it} - {spec.name for spec in without}
    assert bool(extra) == (read_architecture(name).prediction is not None)
    assert {spec.name for spec in without} <= {spec.name for spec in with_it}


def test_names_and_files_and_contents_are_read_alike(tmp_path: Any) -> None:
    import json

    (tmp_path / "config.json").write_text(json.dumps(tiny("qwen3_moe")))
    of_content = read_architecture(tiny("qwen3_moe"))
    assert read_architecture(tmp_path) == read_architecture(tmp_path / "config.json") == of_content
    assert read_architecture("Qwen3-30B-A3B") == read_architecture("qwen3-30b-a3b")


def test_what_cannot_be_planned_is_refused_by_name(tmp_path: Any) -> None:
    with pytest.raises(NotFound, match="neither a"):
        read_architecture("no-such-model")
    with pytest.raises(Incompatible, match="model_type gpt2"):
        read_architecture({"model_type": "gpt2"})
    fields = tiny("qwen3_moe")
    for broken in (None, "many", 0, -1, True):
        with pytest.raises(UsageError, match="num_experts"):
            read_architecture(fields | {"num_experts": broken})
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(UsageError, match="not a JSON object"):
        read_architecture(tmp_path)
    with pytest.raises(UsageError, match="layer pattern"):
        read_architecture(tiny("nemotron_h") | {"hybrid_override_pattern": "M?"})


def test_a_quantised_checkpoint_is_planned_as_its_unquantised_export() -> None:
    fields = tiny("deepseek_v3")
    noted = read_architecture(fields | {"quantization_config": {"quant_method": "fp8"}})
    assert noted.notes
    assert layout(noted) == layout(read_architecture(fields))
