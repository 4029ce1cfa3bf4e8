"""Tiny random checkpoints of model families whose weights lie differently in vLLM than in their checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

#: What each family is there for.
FAMILIES = {
    "llama": "biases on every projection, one key-value head, a vocabulary that is padded",
    "gemma2": "tied through the module itself, norms on either side",
    "phi3": "qkv and gate_up fused in the checkpoint already",
    "gpt2": "transposed linears, learned positions, biases",
    "opt": "positions with an offset, layer norms with biases",
    "gpt_neox": "q, k and v interleaved by head, through the Transformers backend",
    "phi": "a head bias that the loader registers itself",
    "bloom": "q, k and v interleaved by head, reordered by a reshape of a transposed view",
    "falcon": "grouped q, k and v, reordered by a concatenation",
    "mixtral": "experts named w1, w2, w3",
    "qwen2_moe": "a shared expert and its gate",
    "granitemoe": "experts stacked in the checkpoint",
    "olmo2": "norms over whole projections",
    "deepseek_v2": "latent attention: matrices that are views of a projection",
    "llama4_text": "rotary channels of a head taken apart, experts stacked and transposed",
}


def write_family(out: Path, family: str, *, dtype: str = "bfloat16", **fields: Any) -> Path:
    """A checkpoint of `family` in `out`, the same at each call; `fields` override its configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = AutoConfig.for_model(family, **(_fields(family) | fields))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)  # norms and biases are constants otherwise
    model.to(getattr(torch, dtype)).save_pretrained(out)
    return out


def write_served_family(out: Path, family: str, **fields: Any) -> Path:
    """The same, as a server needs it: with a tokenizer, and positions for what it may be asked."""
    from dcr_demo.models import write_tiny

    tokenizer = write_tiny(out.with_name(f"{out.name}-tokenizer"))
    write_family(out, family, max_position_embeddings=1024, **fields)
    for path in tokenizer.glob("*token*"):
        shutil.copyfile(path, out / path.name)
    return out


def _fields(family: str) -> dict[str, Any]:
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    plain = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, **ends}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    mamba = {"n_groups": 1, "num_hidden_layers": 2}
    latent = {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
              "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
              "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
              "n_shared_experts": 1, "num_hidden_layers": 2}  # fmt: skip
    gpt = {"vocab_size": 300, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 256, **ends}
    return {
        "llama": plain | heads | {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
        "gemma2": plain | heads | {"head_dim": 16, "query_pre_attn_scalar": 16},
        "phi3": plain | heads,
        "gpt2": gpt,
        "opt": plain | heads | {"ffn_dim": 96, "word_embed_proj_dim": 64},
        "gpt_neox": plain | heads,
        "phi": plain | heads | {"num_key_value_heads": 4},
        "bloom": {"vocab_size": 300, "hidden_size": 64, "n_layer": 1, "n_head": 4, **ends},
        "falcon": plain | heads | {"num_kv_heads": 2, "new_decoder_architecture": True, "bias": False},
        "mixtral": plain | heads | experts,
        "qwen2_moe": plain | heads | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                                      "shared_expert_intermediate_size": 48},
        "granitemoe": plain | heads | experts,
        "olmo2": plain | heads,
        "llama4_text": plain | heads | experts | {"head_dim": 16, "num_experts_per_tok": 1, "num_hidden_layers": 2,
                                                  "interleave_moe_layer_step": 2, "intermediate_size_mlp": 96},
        "glm4_moe": plain | heads | {"head_dim": 16, "n_routed_experts": 4, "moe_intermediate_size": 32, "n_group": 1,
                                     "num_experts_per_tok": 2, "first_k_dense_replace": 1, "num_hidden_layers": 2},
        "deepseek_v2": plain | heads | latent | {"topk_method": "greedy"},
        "deepseek_v3": plain | heads | latent | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        "mamba2": plain | mamba | {"num_heads": 8, "head_dim": 16, "state_size": 16, "expand": 2},
        "nemotron_h": plain | heads | mamba | {"head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16,
                                               "ssm_state_size": 16, "hybrid_override_pattern": "M*"},
        "gpt_oss": plain | heads | experts | {"head_dim": 16, "intermediate_size": 128, "sliding_window": 64,
                                              "num_hidden_layers": 2,
                                              "layer_types": ["sliding_attention", "full_attention"]},
        "qwen3_moe": plain | heads | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        "qwen3_next": plain | heads | {"head_dim": 16, "num_hidden_layers": 2, "num_experts": 4,
                                       "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                                       "shared_expert_intermediate_size": 48,
                                       "linear_key_head_dim": 16, "linear_value_head_dim": 16,
                                       "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                                       "layer_types": ["linear_attention", "full_attention"]},
    }[family]  # fmt: skip
