"""This rank's part of a real `GPTModel`, from a `config.json` and degrees of parallelism."""

from __future__ import annotations

from typing import Any

import torch


def groups(degrees: dict[str, int]) -> None:
    """Megatron's own process groups, in its own order."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        degrees.get("tp", 1),
        degrees.get("pp", 1),
        degrees.get("vpp"),
        expert_model_parallel_size=degrees.get("ep", 1),
        expert_tensor_parallel_size=degrees.get("etp", 1),
    )


def world_of(degrees: dict[str, int]) -> int:
    return degrees.get("tp", 1) * degrees.get("dp", 1) * degrees.get("pp", 1)


def chunks_of(
    fields: dict[str, Any], degrees: dict[str, int], vocabulary_multiple: int = 128, **options: Any
) -> list[Any]:
    """This rank's model, as its virtual stages; `options` go to the library's configuration."""
    vocabulary = padded(fields["vocab_size"], vocabulary_multiple * degrees.get("tp", 1))
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]  # rotary tables ask
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]  # tied copies are moved to be summed
    stages = range(degrees["vpp"]) if "vpp" in degrees else [None]
    return [_model(fields, degrees, vocabulary, stage, options) for stage in stages]


def padded(vocabulary: int, multiple: int) -> int:
    return -(-vocabulary // multiple) * multiple


def _model(
    fields: dict[str, Any], degrees: dict[str, int], vocabulary: int, stage: int | None, options: dict[str, Any]
) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    latent = "kv_lora_rank" in fields
    config = (MLATransformerConfig if latent else TransformerConfig)(**(_options(fields, degrees) | options))
    torch_norm.WrappedTorchNorm.__new__ = staticmethod(  # type: ignore[method-assign]
        lambda cls, *given, **named: RMSNorm(*given, **named)
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
    for layer in spec.layer_specs if latent else ():
        layer.submodules.self_attention.submodules.core_attention = CoreAttention
    return GPTModel(
        config,
        spec,
        vocab_size=vocabulary,
        max_sequence_length=64,
        position_embedding_type="none" if latent else "rope",
        share_embeddings_and_output_weights=fields.get("tie_word_embeddings", False),
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        vp_stage=stage,
    )


def _options(fields: dict[str, Any], degrees: dict[str, int]) -> dict[str, Any]:
    """`config.json` and degrees in the words of the library's configuration."""
    latent = "kv_lora_rank" in fields
    options: dict[str, Any] = {
        "num_layers": fields["num_hidden_layers"],
        "hidden_size": fields["hidden_size"],
        "num_attention_heads": fields["num_attention_heads"],
        "ffn_hidden_size": fields["intermediate_size"],
        "kv_channels": fields["head_dim"],
        "num_query_groups": None if latent else fields["num_key_value_heads"],
        "add_bias_linear": False,
        "add_qkv_bias": fields.get("attention_bias", fields["model_type"] == "qwen2"),
        "qk_layernorm": fields["model_type"] in ("qwen3", "qwen3_moe") or fields.get("use_qk_norm", latent),
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "tensor_model_parallel_size": degrees.get("tp", 1),
        "expert_model_parallel_size": degrees.get("ep", 1),
        "expert_tensor_parallel_size": degrees.get("etp", 1),
        "use_cpu_initialization": True,
        "pipeline_model_parallel_size": degrees.get("pp", 1),
        "virtual_pipeline_model_parallel_size": degrees.get("vpp"),
        "pipeline_dtype": torch.float32,
    }
    if fields.get("num_experts") or fields.get("n_routed_experts"):
        options |= _expert_options(fields, degrees)
    if latent:
        options |= {
            "q_lora_rank": fields["q_lora_rank"],
            "kv_lora_rank": fields["kv_lora_rank"],
            "qk_head_dim": fields["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": fields["qk_rope_head_dim"],
            "v_head_dim": fields["v_head_dim"],
            "multi_latent_attention": True,
        }
    return options


def _expert_options(fields: dict[str, Any], degrees: dict[str, int]) -> dict[str, Any]:
    width, dense = fields["moe_intermediate_size"], fields.get("first_k_dense_replace", 0)
    options: dict[str, Any] = {
        "num_moe_experts": fields.get("num_experts") or fields["n_routed_experts"],
        "moe_ffn_hidden_size": width,
        "moe_router_topk": 2,
        "moe_layer_freq": [int(layer >= dense) for layer in range(fields["num_hidden_layers"])],
        "moe_token_dispatcher_type": "allgather",
        "sequence_parallel": degrees.get("tp", 1) > 1,
    }
    if fields.get("n_shared_experts"):
        options["moe_shared_expert_intermediate_size"] = fields["n_shared_experts"] * width
        options |= {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    return options


class RMSNorm(torch.nn.Module):
    """The library's own without Apex refuses sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class CoreAttention(torch.nn.Module):
    """Attention of latent heads, whose values are narrower than their keys: the library's own takes none. Without
    parameters, as that one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        heads = [one.permute(1, 2, 0, 3) for one in (query, key, value)]  # sequence, batch, head, element
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return mixed.permute(2, 0, 1, 3).flatten(2)
