"""The ways to cut a model that are tried: each a small real transformers model with a real optimizer, by name.

Every model has one tensor that is large for it, an embedding of some MiB, so that a rank which allocated a whole one
would be seen among the buffers of fixed size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

COMMON: dict[str, Any] = {
    "vocab_size": 16_000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "initializer_range": 0.08, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
UNEVEN = {"vocab_size": 16_001, "num_experts": 6}  #: over four ranks; the last one holds no expert
TIED = {"tie_word_embeddings": True}
QUIET = 3e-6  #: a learning rate at which about one bf16 value in a hundred changes

Build = Callable[[Path], nn.Module]


@dataclass(frozen=True)
class Case:
    """`build` makes this rank's part of the model from a checkpoint; `config` is what differs from `COMMON`.

    `given`: what `publish` is handed, `module` or `state_dict`. `rates`: the learning rate of each step; 0 for a step
    that changes nothing. `cut`: whether no rank holds the largest tensor whole.
    """

    name: str
    kind: str
    build: Build
    world: int = 4
    config: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    given: str = "module"
    rates: tuple[float, ...] = (QUIET, 0.0, 3e-2, QUIET)
    cut: bool = True


def loaded(path: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **more)


def sharded(placed: Callable[[nn.Parameter], Shard | None] | None = None, mesh: Callable[[], DeviceMesh] | None = None):
    """FSDP2, layer by layer and the rest, as training scripts apply it."""

    def build(path: Path) -> nn.Module:
        model = loaded(path)
        given = {"mesh": mesh() if mesh else init_device_mesh("cpu", (torch.distributed.get_world_size(),))}
        if placed:
            given["shard_placement_fn"] = placed
        for layer in model.model.layers:
            fully_shard(layer, **given)
        return fully_shard(model, **given)

    return build


def by_columns(parameter: nn.Parameter) -> Shard | None:
    """Every second matrix along its second dimension, which FSDP2 wants to be even."""
    even = parameter.ndim > 1 and parameter.shape[1] % torch.distributed.get_world_size() == 0
    return Shard(1) if even and parameter.shape[0] % 64 == 0 else Shard(0)


def square(*names: str) -> Callable[[], DeviceMesh]:
    return lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def tensor_parallel(dtype: torch.dtype, *, data: bool = True) -> Build:
    """torch's own tensor parallelism of a dense model, under FSDP2 or alone.

    Columns are then cut twice along one dimension, rows along two.
    """
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
        **{f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        **{f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
    }

    def build(path: Path) -> nn.Module:
        model = loaded(path, dtype)
        mesh = square("dp", "tp")() if data else init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh["tp"], plan)
        if data:
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        alike = [one for name, one in model.named_parameters() if name.endswith(("q_norm.weight", "k_norm.weight"))]
        model.averaged = mesh["tp"].get_group(), alike  # each rank has seen its own heads alone
        return model

    return build


def by_transformers(**sizes: int) -> Build:
    """The library's own plans: packed gate and up, whole experts, FSDP2 over them."""

    def build(path: Path) -> nn.Module:
        from transformers.distributed import DistributedConfig
        from transformers.integrations import accelerate

        # The library places the model on "cpu", where it is, and would have another package installed for that.
        with patch.object(accelerate, "is_accelerate_available", return_value=True):
            return loaded(path, distributed_config=DistributedConfig(**sizes))

    return build


def replicated(path: Path) -> nn.Module:
    return DistributedDataParallel(loaded(path))


CASES = [
    Case("fsdp", "qwen3_moe", sharded(), config=EXPERTS),
    Case("fsdp_tied", "qwen3_moe", sharded(), config=EXPERTS | TIED),
    Case("uneven", "qwen3_moe", sharded(), config=EXPERTS | UNEVEN),
    Case("columns", "qwen3_moe", sharded(by_columns), config=EXPERTS),
    Case("hybrid", "qwen3_moe", sharded(mesh=square("replicate", "shard")), config=EXPERTS),
    Case("fsdp_over_tp", "qwen3", tensor_parallel(torch.float32), given="state_dict"),
    Case("fsdp_over_tp_bf16", "qwen3", tensor_parallel(torch.bfloat16), dtype=torch.bfloat16,
         rates=(1e-5, 0.0, 3e-2, 1e-5)),
    Case("tp_plan", "qwen3_moe", by_transformers(tp_size=4), config=EXPERTS | {"num_key_value_heads": 4}, cut=False),
    Case("fsdp_over_tp_plan", "qwen3_moe", by_transformers(tp_size=2, fsdp_size=2), config=EXPERTS),
    Case("replicas", "qwen3_moe", replicated, config=EXPERTS, cut=False),
    Case("alone", "qwen3_moe", loaded, world=1, config=EXPERTS, cut=False),
]  # fmt: skip
#: for models that a server has: five steps that it must show
SERVED = [
    Case("served_dense", "qwen3", tensor_parallel(torch.float32), given="state_dict", rates=(1e-4,) * 5),
    Case("served_moe", "qwen3_moe", sharded(), rates=(1e-4,) * 5),
]
BY_NAME = {case.name: case for case in [*CASES, *SERVED]}
