"""Random checkpoints of small models, with the names of tensors that transformers or vLLM give them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.vllm import inprocess

#: The parts that vLLM's loaders put together, where a model class does not say it.
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def write_checkpoint_of(config: Any, out: Path) -> Path:
    """A BF16 checkpoint of the transformers model of `config`."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(1)
    architectures = config.architectures
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    saved = model.state_dict()
    for tensor in (*model.parameters(), *(tensor for name, tensor in model.named_buffers() if name in saved)):
        if tensor.is_floating_point():
            tensor.data += 0.02 * torch.randn_like(tensor)  # norms and biases are constants otherwise
    model.to(torch.bfloat16)
    model.config.architectures = architectures
    model.save_pretrained(out)
    return out


def write_checkpoint_for(config: Any, out: Path, *, renamed: dict[str, str], **options: Any) -> Path:
    """A BF16 checkpoint with the tensors that vLLM's own model of `config` has.

    `renamed`: patterns of its names, and what they are in a checkpoint.
    """
    config.save_pretrained(out)
    torch.manual_seed(1)
    tensors = {}
    for name, tensor in _tensors(inprocess.unloaded(out, **options)):
        for pattern, name_in_checkpoint in renamed.items():
            name = re.sub(pattern, name_in_checkpoint, name)
        tensors[name] = (1 + 0.05 * torch.randn(tensor.shape)).to(torch.bfloat16)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's parameters as a checkpoint has them: fused projections and stacked experts taken apart."""
    packed = PACKED | getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules():
        inside, _, last = path.rpartition(".")
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            sizes = getattr(module, "output_sizes", [])
            if hasattr(module, "org_vocab_size"):  # padded
                yield f"{path}.{name}", parameter[: module.org_vocab_size]
            elif name in ("w13_weight", "w2_weight"):
                yield from _experts(path.replace(".routed_experts", ""), name, parameter)
            elif last in packed and len(packed[last]) == len(sizes):
                for part, rows in zip(packed[last], parameter.split(sizes), strict=True):
                    yield f"{inside}.{part}.{name}", rows
            else:
                yield f"{path}.{name}".replace(".routed_experts", ""), parameter


def _experts(path: str, name: str, stacked: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for expert, matrix in enumerate(stacked):
        if name == "w2_weight":
            yield f"{path}.{expert}.down_proj.weight", matrix
        else:
            for part, rows in zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True):
                yield f"{path}.{expert}.{part}.weight", rows
