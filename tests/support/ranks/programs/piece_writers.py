"""One rank of four that trains with FSDP2 and writes its checkpoints in pieces, as training scripts do.

Run as a program, one process per rank, by tests/publish/watch/test_watch_pieces.py; gloo over a file, no ports. Beside
each checkpoint rank 0 writes what the framework's own full export makes of the same weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WORLD = 4
MOE: dict[str, Any] = {
    "vocab_size": 70, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "num_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "tie_word_embeddings": False,
}  # fmt: skip


class Small(nn.Module):
    """Sizes that four ranks divide in every way: evenly, with short and with empty shards, by rows and by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 16)
        self.up = nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)
        self.head = nn.Linear(16, 3)
        self.norm = nn.LayerNorm(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.down(torch.relu(self.up(self.embed(x))))
        return self.head(hidden).sum() + self.norm(hidden[..., :7]).square().sum()


def by_columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if tuple(parameter.shape) == (16, 24) else None


class Run:
    """One model in training. `out/watch` has its checkpoints, `out/full` what they should be, `out/base` the start."""

    def __init__(self, out: Path, model: nn.Module, batch: Callable[[], torch.Tensor]) -> None:
        self.out, self.model, self.batch = out, model, batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        self.number = 0

    def step(self) -> Path:
        """A real step of the optimizer; where its checkpoint belongs."""
        self.optimizer.zero_grad()
        self.batch().backward()
        self.optimizer.step()
        self.number += 1
        return self.out / "watch" / f"step_{self.number}"

    def export(self, write: Callable[[dict[str, torch.Tensor], Path], None]) -> None:
        export(self.model, self.out / "full" / f"step_{self.number}", write)


def export(model: nn.Module, path: Path, write: Callable[[dict[str, torch.Tensor], Path], None]) -> None:
    """The framework's own full state dict, written by rank 0."""
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        write(full, path)
    dist.barrier()


def write_rounded(full: dict[str, torch.Tensor], path: Path) -> None:
    path.mkdir(parents=True)
    save_file({name: tensor.bfloat16().contiguous() for name, tensor in full.items()}, path / "model.safetensors")


def small(out: Path) -> None:
    """fp32 masters of a bf16 base, four checkpoints by four ways to write them."""
    torch.manual_seed(0)
    model = Small()
    if dist.get_rank() == 0:
        write_rounded(model.state_dict(), out / "base")
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)), shard_placement_fn=by_columns)
    run = Run(out, model, lambda: model(torch.arange(13) + 0))
    place = run.step()
    weights, states = get_state_dict(model, run.optimizer)
    dcp.save({"model": weights, "optim": states, "step": 1}, storage_writer=FileSystemWriter(place))
    run.export(write_rounded)
    place = run.step()
    weights, states = get_state_dict(model, run.optimizer)
    dcp.save(weights | {"optimizer": states}, storage_writer=FsspecWriter(str(place)))
    run.export(write_rounded)
    place = run.step()
    weights, states = get_state_dict(model, run.optimizer)
    dcp.async_save(
        {"app": {"model": weights, "optimizer": states}},
        storage_writer=FileSystemWriter(place, single_file_per_rank=False),
        process_group=dist.new_group(backend="gloo"),
    ).result()
    run.export(write_rounded)
    place = run.step()
    write_sharded(get_model_state_dict(model), place)
    run.export(write_rounded)


def write_sharded(weights: dict[str, Any], place: Path, **more: Any) -> None:
    dcp.save(weights, storage_writer=HuggingFaceStorageWriter(str(place), save_distributed=True, **more))


def experts(out: Path) -> None:
    """transformers 5: experts fused in memory, one by one in the checkpoint; fp32 over a bf16 base."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def made() -> Any:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **MOE), dtype=torch.float32)

    def save_pretrained(full: dict[str, torch.Tensor], path: Path) -> None:
        whole = made()
        whole.load_state_dict(full)
        whole.bfloat16().save_pretrained(path)

    torch.manual_seed(0)
    model = made()
    if dist.get_rank() == 0:
        save_pretrained(model.state_dict(), out / "base")
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    tokens = torch.arange(70).reshape(2, 35)
    run = Run(out, model, lambda: model(input_ids=tokens, labels=tokens).loss)
    place = run.step()
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=place / "pytorch_model_fsdp_0")
    _, states = get_state_dict(model, run.optimizer)
    dcp.save({"optimizer": states}, checkpoint_id=place / "optimizer_0")
    run.export(save_pretrained)
    place = run.step()
    write_sharded(get_model_state_dict(model), place, enable_consolidation=True)
    run.export(save_pretrained)


def uneven(out: Path) -> None:
    """FSDP over tensor parallelism, of sizes that neither divides."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 13), nn.Linear(13, 7))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if dist.get_rank() == 0:
        write_rounded(model.state_dict(), out / "base")
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    with torch.no_grad():  # the library's own layers compute nothing with such sizes
        for parameter in model.parameters():
            parameter.mul_(1.1)
    dcp.save(get_model_state_dict(model), checkpoint_id=out / "watch/step_1")
    export(model, out / "full/step_1", write_rounded)


def main(rank: int, out: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{out}/meet", rank=rank, world_size=WORLD)
    for name, write in {"small": small, "experts": experts, "uneven": uneven}.items():
        write(out / name)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]))
