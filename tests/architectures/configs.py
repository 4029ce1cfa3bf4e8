"""A small configuration of every text architecture in vLLM's registry.

`SIZES` are for all: a field is set where the configuration class has it. `FIELDS` are what one architecture needs
besides. `BORROWED` are architectures that transformers does not know under their name: their configuration is that of
another model type, with further fields.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "state_size": 16,
    "mamba_d_state": 16,
    "mamba_d_head": 16,
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
ROUTER = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 1.0}
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "use_bias": False, "use_qkv_bias": False, "embedding_dropout": 0.0, "use_qk_norm": True,
    "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "routed_scaling_factor": 1.0,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
ROUTED = EXPERTS | ROUTER | {"n_routed_experts": 4, "n_shared_experts": 1, "moe_layer_freq": 1}

#: By architecture.
FIELDS: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {
        "score_func": "sigmoid", "num_dense_layers": 1, "route_norm": True, "n_group": 1, "topk_group": 1,
    },
    "DeepseekV2ForCausalLM": {"num_key_value_heads": 4},
    "DeepseekV3ForCausalLM": LATENT | ROUTER | {"first_k_dense_replace": 1},
    "DeepseekV4ForCausalLM": {"mlp_layer_types": ["hash_moe", "moe"]},
    "FalconForCausalLM": {"new_decoder_architecture": True, "bias": False},
    "FalconH1ForCausalLM": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "Gemma3nForCausalLM": SLIDING | {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 300},
    "Gemma4ForCausalLM": SLIDING | {"vocab_size_per_layer_input": 300, "enable_moe_block": True},
    "Glm4MoeForCausalLM": {"head_dim": 16},
    "Glm4MoeLiteForCausalLM": LATENT | ROUTER | {"first_k_dense_replace": 1},
    "GPTJForCausalLM": {"rotary_dim": 8},
    "HYV3ForCausalLM": {"first_k_dense_replace": 1, "expert_hidden_dim": 32, "route_norm": True, "qk_norm": True},
    "InklingForCausalLM": {"padded_vocab_size": 320, "unpadded_vocab_size": 300},
    "KimiLinearForCausalLM": {},
    "Lfm2ForCausalLM": {"block_dim": 64, "conv_dim": 64, "layer_types": ["conv", "full_attention"]},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "LongcatFlashForCausalLM": {
        "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity", "num_layers": 1,
        "zero_expert_num": 0,
    },
    "MiniMaxM2ForCausalLM": {"rotary_dim": 8, "scoring_func": "sigmoid", "use_routing_bias": True},
    "MiMoV2FlashForCausalLM": SLIDING | {
        "hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0, 1], "swa_head_dim": 16, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4, "swa_v_head_dim": 16, "v_head_dim": 16, "sliding_window_size": 64,
        "layernorm_epsilon": 1e-5, "attention_bias": False, "swa_rope_theta": 1e4, "rope_theta": 1e4,
    },
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "NemotronHForCausalLM": {
        "hybrid_override_pattern": "M*-", "num_hidden_layers": 3, "mamba_num_heads": 8, "mamba_head_dim": 16,
        "ssm_state_size": 16, "n_groups": 1,
    },
    "OlmoHybridForCausalLM": LINEAR,
    "OPTForCausalLM": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "Qwen3_5ForCausalLM": LINEAR,
    "Qwen3_5MoeForCausalLM": LINEAR,
    "Qwen3NextForCausalLM": LINEAR,
    "Zamba2ForCausalLM": {
        "layer_types": ["mamba", "hybrid"], "layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1],
        "mamba_headdim": 16, "n_mamba_heads": 8, "num_key_value_heads": 4, "attention_head_dim": 32,
    },
    "AXK1ForCausalLM": {"first_k_dense_replace": 0},
}  # fmt: skip

#: Architecture -> model type of the configuration, further fields. The tensors' names come from vLLM's model.
BORROWED: dict[str, tuple[str, dict[str, Any]]] = {
    "BailingMoeForCausalLM": ("llama", EXPERTS),
    "BailingMoeV2ForCausalLM": ("llama", EXPERTS),
    "BailingMoeV2_5ForCausalLM": ("llama", EXPERTS | LATENT | {"layer_group_size": 2}),
    "DeciLMForCausalLM": ("llama", {"block_configs": [
        {"attention": {"no_op": False, "n_heads_in_group": 2}, "ffn": {"no_op": False, "ffn_mult": 1.5}},
    ] * 2}),
    "DeepseekForCausalLM": ("llama", ROUTED | {"topk_method": "greedy"}),
    "ExaoneForCausalLM": ("llama", {"activation_function": "silu", "layer_norm_epsilon": 1e-5}),
    "ExaoneMoEForCausalLM": ("exaone_moe", {}),
    "InternLM2ForCausalLM": ("llama", {"bias": False}),
    "InternLM3ForCausalLM": ("llama", {}),
    "IQuestCoderForCausalLM": ("llama", {}),
    "IQuestLoopCoderForCausalLM": ("qwen2", {"loop_num": 2, "loop_window_size": 64}),
    "K2HorizonForCausalLM": ("qwen3_moe", {
        "attention_gate_func": "sigmoid", "layernorm_num_groups": 1, "moe_gate_bias": False, "mova_num_experts": 2,
        "mova_num_experts_per_tok": 1, "num_shared_experts": 1, "query_key_norm": True, "rope_head_dim": 8,
        "router_scaling_factor": 1.0, "router_score_func": "sigmoid", "mlp_only_layers": [], "decoder_sparse_step": 1,
        "head_dim": 16,
    }),
    "LLaMAForCausalLM": ("llama", {}),
    "MiMoForCausalLM": ("qwen2", {}),
    "MiMoV2ForCausalLM": ("mimo_v2_flash", {}),
    "MiniCPMForCausalLM": ("llama", {"num_experts": 0, "scale_emb": 12, "dim_model_base": 32, "scale_depth": 1.4}),
    "MuseGlimmerForCausalLM": ("muse_glimmer_text", {}),
    "NanbeigeForCausalLM": ("llama", {}),
    "NemotronHPuzzleForCausalLM": ("nemotron_h", {
        "hybrid_override_pattern": "M*-", "num_hidden_layers": 3, "mamba_num_heads": 8, "mamba_head_dim": 16,
        "ssm_state_size": 16, "n_groups": 1,
    }),
    "OrionForCausalLM": ("llama", {}),
    "PanguEmbeddedForCausalLM": ("llama", {"bias": False}),
    "PanguProMoEV2ForCausalLM": ("llama", ROUTED),
    "PanguUltraMoEForCausalLM": ("llama", ROUTED | LATENT),
    "Param2MoEForCausalLM": ("llama", EXPERTS | {"rope_theta": 1e4, "rope_scaling": None}),
    "PhiMoEForCausalLM": ("phimoe", {}),
    "Plamo3ForCausalLM": ("llama", SLIDING | {"interleaved_sliding_window": [64, None], "rope_local_theta": 1e4}),
    "Rnj1ForCausalLM": ("gemma3_text", SLIDING),
    "SarvamMLAForCausalLM": ("llama", EXPERTS | LATENT),
    "SarvamMoEForCausalLM": ("llama", EXPERTS),
    "SolarForCausalLM": ("llama", {f"bskcn_{n}": [] for n in (1, 2, 3, 4)} | {"bskcn_tv": [0.9, 0.8]}),
    "Step1ForCausalLM": ("llama", {}),
    "Step3p5ForCausalLM": ("step3p5", {}),
    "Step3TextForCausalLM": ("step3_text", {
        "share_q_dim": 32, "share_expert_dim": 32, "moe_top_k": 2, "moe_layers_enum": "1",
    }),
    "TeleChat2ForCausalLM": ("llama", {"bias": False, "n_head": 4, "n_layer": 2, "ffn_hidden_size": 96}),
    "TeleChat3ForCausalLM": ("llama", {}),
    "TeleFLMForCausalLM": ("llama", {"use_mup": False, "mup_scale_factor": 1.0, "output_mult": 1.0}),
}  # fmt: skip

#: Listed among the text models, but with images.
WITH_IMAGES = {"HCXVisionV2ForCausalLM", "InklingForConditionalGeneration"}

#: Architecture -> patterns of vLLM's names, and what they are in a checkpoint.
RENAMED: dict[str, dict[str, str]] = {
    "DeepseekForCausalLM": {r"experts\.e_score": "gate.e_score"},
    "IQuestLoopCoderForCausalLM": {r"(gate_projections\.\d+)\.gate_proj": r"\1"},
    "PhiMoEForCausalLM": {r"(experts\.\d+)\.gate_proj": r"\1.w1", r"(experts\.\d+)\.up_proj": r"\1.w3",
                          r"(experts\.\d+)\.down_proj": r"\1.w2"},
}  # fmt: skip

#: Options with which vLLM serves an architecture.
OPTIONS: dict[str, dict[str, Any]] = {"KimiLinearForCausalLM": {"enable_prefix_caching": True}}


def architectures() -> list[str]:
    """Every architecture that vLLM's registry has for generating text, by name."""
    from vllm.model_executor.models import registry

    text = registry._TEXT_GENERATION_MODELS | {
        name: where for name, where in registry._TRANSFORMERS_SUPPORTED_MODELS.items() if "MultiModal" not in where[1]
    }
    return sorted(text.keys() - WITH_IMAGES, key=str.lower)


def small_config(architecture: str) -> Any:
    """A configuration of `architecture`, or None if no class for it is known."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    fields = FIELDS.get(architecture, {})
    if architecture in BORROWED:
        kind, fields = BORROWED[architecture]
    else:
        kinds = [kind for kind, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if names == architecture]
        if not kinds:
            return None
        kind = kinds[-1]  # of a model with images the text's comes last
    config = _config_class(kind)
    known = set(signature(config).parameters) | set(config.attribute_map)
    sizes = {name: size for name, size in SIZES.items() if name in known}
    return config(**sizes | fields, architectures=[architecture])


def _config_class(kind: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    return CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else _CONFIG_REGISTRY[kind]
