"""The framework's own export, in bf16: what a version must be, bit for bit. Nothing of DCR is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict


def unwrapped(model: nn.Module) -> Any:
    return getattr(model, "module", model)


def export(model: nn.Module, out: Path) -> None:
    """Gather everything on rank 0, convert it as `save_pretrained` does, round it, write it. All ranks call alike."""
    inner = unwrapped(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(inner, options=options)
    if dist.get_rank() == 0:
        _write(inner, full, out)
    dist.barrier()


def _write(model: Any, full: dict[str, torch.Tensor], out: Path) -> None:
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    tied = getattr(model, "all_tied_weights_keys", None) or {}
    plain = {name: tensor for name, tensor in revert_weight_conversion(model, full).items() if name not in tied}
    out.mkdir(parents=True)
    bf16 = {name: tensor.to(torch.bfloat16).contiguous().clone() for name, tensor in plain.items()}
    save_file(bf16, out / "model.safetensors", metadata={"format": "pt"})
