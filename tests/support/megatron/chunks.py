"""Tiny models of every family as Megatron's ranks hold them: named tensors, with or without numbers in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dcr_daemon.canonical.region import indices
from dcr_daemon.projection.frameworks.megatron.grid import Grid
from dcr_daemon.projection.frameworks.megatron.shards import spots
from dcr_daemon.projection.frameworks.models.architecture import Architecture
from dcr_daemon.projection.frameworks.models.families import read_architecture

PLAIN = {"vocab_size": 301, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}  # fmt: skip
MOE = {"num_experts": 8, "moe_intermediate_size": 16}
ROUTED = {"n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
          "num_nextn_predict_layers": 1}  # fmt: skip
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
DELTA = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 3, "linear_value_head_dim": 5}
HYBRID = {"hybrid_override_pattern": "M*E-", "mamba_num_heads": 8, "mamba_head_dim": 4, "n_groups": 4,
          "ssm_state_size": 3, "n_routed_experts": 8, "moe_intermediate_size": 16, "moe_latent_size": 24,
          "moe_shared_expert_intermediate_size": 24, "num_nextn_predict_layers": 1,
          "mtp_hybrid_override_pattern": "*E"}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": PLAIN | {"attention_bias": True, "mlp_bias": True},
    "qwen3": PLAIN | {"tie_word_embeddings": True},
    "qwen3_moe": PLAIN | MOE,
    "qwen3_next": PLAIN | MOE | DELTA | {"shared_expert_intermediate_size": 24},
    "deepseek_v3": PLAIN | ROUTED | LATENT,
    "glm4_moe": PLAIN | ROUTED | {"attention_bias": True, "use_qk_norm": True},
    "gpt_oss": PLAIN | {"num_local_experts": 8},
    "nemotron_h": PLAIN | HYBRID,
}


def architecture(family: str, **fields: Any) -> Architecture:
    return read_architecture({"model_type": family} | FAMILIES[family] | fields)


class Chunk:
    """A module tree's names, as Megatron gives them."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, t) for name, t in self.tensors.items() if not name.endswith("expert_bias")]

    def named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, t) for name, t in self.tensors.items() if name.endswith("expert_bias")]


def live(
    model: Architecture,
    grid: Grid,
    rank: int,
    *,
    spelling: int = 0,
    wrapper: str = "module.",
    canonical: Mapping[str, torch.Tensor] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Chunk]:
    """Chunks with one rank's parameters, called by one of their names.

    Args:
        canonical: whole tensors (flat, any dtype that holds whole numbers) to take the values from; -1 is where no
            checkpoint tensor has a place. Without them, parameters are on the meta device.
    """
    chunks = [Chunk() for _ in range(grid.vpp)]
    for spot in spots(model, grid, rank=rank):
        names = spot.names
        held = spot.parameter.held(spot.holder.share, spot.holder.shares)
        kind = torch.float32 if spot.parameter.targets[0].spec.dtype == "F32" else dtype
        tensor = torch.empty(held.shape, dtype=kind, device="meta")
        if canonical is not None:
            tensor = torch.full(held.shape, -1.0, dtype=kind)
            for region in held.regions:
                src, dst = (torch.from_numpy(side) for side in indices(region))
                tensor.view(-1)[src] = (canonical[region.name][dst] - spot.parameter.add).to(kind)
        chunks[spot.chunk].tensors[wrapper + names[spelling % len(names)]] = tensor
    return chunks
