"""What Megatron runs are tried: models, degrees of parallelism, precisions, and what is handed to `publish`.

The parent of the processes reads this, too: nothing here imports Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WORLD = 4
QUIET, NONE, LOUD = 3e-6, 0.0, 1e-2  #: learning rates: about one bf16 value in a hundred changes, none, most
RATES = (QUIET, NONE, LOUD, QUIET)

ATTENTION = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4, "hidden_size": 32}
PLAIN = ATTENTION | {"vocab_size": 301, "intermediate_size": 48, "num_hidden_layers": 2}
MOE = {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 2, "moe_intermediate_size": 16, "num_experts_per_tok": 2,
          "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}  # fmt: skip
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}

LLAMA = {"model_type": "llama"} | PLAIN
QWEN3 = {"model_type": "qwen3"} | PLAIN
QWEN3_MOE = {"model_type": "qwen3_moe"} | PLAIN | MOE
DEEPSEEK = {"model_type": "deepseek_v3"} | PLAIN | ROUTED | LATENT
GLM = {"model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": True} | PLAIN | ROUTED
TIED = {"tie_word_embeddings": True}
TWO_GROUPS = {"num_key_value_heads": 2}
FOUR_LAYERS = {"num_hidden_layers": 4}


@dataclass(frozen=True)
class Case:
    """`starts`: the degrees of each start of the run on one stream; later ones load what the one before exported.

    Attributes:
        bf16: parameters in bf16 under `Float16Module` and fp32 masters elsewhere; otherwise fp32 ones.
        distributed: Megatron's distributed optimizer.
        fp32_router: the router's weights stay fp32 in a bf16 model.
        handed: `chunks` as the training script has them (wrapped), `bare` ones, or one wrapped `module`.
        residual: `paper` (embeddings and packed attention are left out of a finished map), `marks` (a parameter is
            marked as split another way); Bridge's export is then the hook.
        early: a version is published before the first step.
        vocabulary_multiple: Megatron's `make-vocab-size-divisible-by`; `dcr plan` takes it for 128.
    """

    fields: dict[str, Any]
    starts: tuple[dict[str, int], ...]
    bf16: bool = False
    distributed: bool = False
    fp32_router: bool = False
    handed: str = "chunks"
    residual: str = ""
    early: bool = False
    vocabulary_multiple: int = 128
    rates: tuple[float, ...] = RATES


TP2_EP2 = {"tp": 2, "ep": 2, "dp": 2}
CASES = {
    "moe-tp2-ep2": Case(QWEN3_MOE, (TP2_EP2,), distributed=True),
    "moe-tp2-ep2-bf16": Case(QWEN3_MOE, (TP2_EP2,), bf16=True, distributed=True, fp32_router=True, handed="module"),
    "moe-tp2-ep2-etp2": Case(QWEN3_MOE, ({"tp": 2, "ep": 2, "etp": 2, "dp": 2},), bf16=True),
    "moe-ep4-dp4": Case(QWEN3_MOE, ({"ep": 4, "dp": 4},), distributed=True, handed="bare"),
    "moe-pp2-ep2-dp2": Case(QWEN3_MOE, ({"pp": 2, "ep": 2, "dp": 2},), bf16=True),
    "llama-tp4-g2": Case(LLAMA | TWO_GROUPS, ({"tp": 4},), bf16=True, distributed=True),
    "llama-tp4-little-padding": Case(LLAMA, ({"tp": 4},), vocabulary_multiple=1, rates=(QUIET, LOUD)),
    "llama-tp2-much-padding": Case(LLAMA, ({"tp": 2, "dp": 2},), vocabulary_multiple=512, rates=(QUIET, LOUD)),
    "qwen3-dp4": Case(QWEN3, ({"dp": 4},), distributed=True, handed="module"),
    "qwen3-tied-tp2-pp2": Case(QWEN3 | TIED, ({"tp": 2, "pp": 2},), bf16=True, distributed=True),
    "llama-tp2-pp2-vpp2": Case(LLAMA | FOUR_LAYERS, ({"tp": 2, "pp": 2, "vpp": 2},), distributed=True),
    "qwen2-tp2-dp2": Case({"model_type": "qwen2"} | PLAIN, ({"tp": 2, "dp": 2},), bf16=True, handed="bare"),
    "deepseek-tp2-ep2": Case(DEEPSEEK, (TP2_EP2,), bf16=True, distributed=True, early=True),
    "glm-tp2-ep2": Case(GLM, (TP2_EP2,), bf16=True, early=True),
    "moe-degrees-change": Case(
        QWEN3_MOE, (TP2_EP2, {"tp": 2, "pp": 2}, {"tp": 4}, {"ep": 4, "dp": 4}), distributed=True, rates=(QUIET, LOUD)
    ),
    "moe-residual-paper": Case(QWEN3_MOE, (TP2_EP2,), distributed=True, residual="paper"),
    "llama-residual-marks-pp2": Case(LLAMA, ({"tp": 2, "pp": 2},), bf16=True, residual="marks"),
}  # fmt: skip

REFUSED = "wrong-architecture"  #: no case of publishing, but of not publishing
OTHERS = ({"num_attention_heads": 16}, {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8})
