"""One rank of a world of four: numbered tensors placed in every way, and what the projection says of each.

Run as a program, one process per rank, by tests/projection/sharding/test_dtensor.py; gloo over a file, no ports.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.canonical.region import Region, indices
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.sharding.dtensor import local_part
from support.tensors.maps import map_of

WORLD = 4


def numbered(*shape: int) -> torch.Tensor:
    """Every element is its own canonical index."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def distributed() -> Iterator[tuple[str, DTensor]]:
    """`distribute_tensor` over one and two mesh dimensions, even and not, down to empty shards."""
    row, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for size in (8, 7, 5, 3, 1):
        yield f"row.{size}", distribute_tensor(numbered(size, 6), row, [Shard(0)])
        yield f"column.{size}", distribute_tensor(numbered(5, size), row, [Shard(-1)])
    yield "replicated", distribute_tensor(numbered(4, 3), row, [Replicate()])
    yield "scalar", distribute_tensor(torch.zeros(()), row, [Replicate()])
    for name, placements in {
        "grid": [Shard(0), Shard(1)],
        "nested": [Shard(0), Shard(0)],
        "inner": [Replicate(), Shard(0)],
        "outer": [Shard(1), Replicate()],
        "both": [Replicate(), Replicate()],
    }.items():
        for shape in ((8, 6), (7, 5), (2, 3, 4)):
            yield f"{name}.{shape}", distribute_tensor(numbered(*shape), square, placements)
    for rows in (16, 8, 24):  # torch itself packs even sizes only
        yield f"packed.{rows}", distribute_tensor(numbered(rows, 3), row, [_StridedShard(0, split_factor=2)])
        yield f"packed.columns.{rows}", distribute_tensor(numbered(3, rows), row, [_StridedShard(1, split_factor=2)])
    yield "packed.pair", distribute_tensor(numbered(12, 3), square, [Replicate(), _StridedShard(0, split_factor=2)])


class Numbered(nn.Module):
    """Linear layers whose weights are numbered, uneven in all the ways a rank count can be uneven to them."""

    def __init__(self, sizes: tuple[tuple[int, int], ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(columns, rows) for rows, columns in sizes)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(numbered(*parameter.shape))


def named(label: str, module: nn.Module) -> Iterator[tuple[str, DTensor]]:
    for name, parameter in module.named_parameters():
        yield f"{label}.{name}", parameter.detach()


def modules() -> Iterator[tuple[str, DTensor]]:
    """FSDP2, HSDP, and FSDP2 over tensor parallelism, as training scripts apply them."""
    mesh = init_device_mesh("cpu", (4,))
    sharded = Numbered(((8, 6), (7, 5), (2, 9)))
    fully_shard(sharded, mesh=mesh)
    yield from named("fsdp", sharded)
    columns = Numbered(((3, 8), (5, 4)))
    fully_shard(columns, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else Shard(0))
    yield from named("fsdp.columns", columns)
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = Numbered(((8, 6), (5, 3)))
    fully_shard(hybrid, mesh=square)
    yield from named("hsdp", hybrid)
    yield from named("fsdp over tp", over_tensor_parallelism(((16, 6), (6, 16))))


def uneven() -> Iterator[tuple[str, DTensor]]:
    yield from named("fsdp over uneven tp", over_tensor_parallelism(((13, 6), (6, 13), (7, 4), (4, 7), (3, 2), (2, 3))))


def over_tensor_parallelism(sizes: tuple[tuple[int, int], ...]) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Numbered(sizes)
    styles = [ColwiseParallel(), RowwiseParallel()]
    parallelize_module(model, mesh["tp"], {f"layers.{i}": styles[i % 2] for i in range(len(sizes))})
    fully_shard(model, mesh=mesh["dp"])
    return model


def check_local(name: str, tensor: DTensor) -> None:
    """The regions name every local element once, with the canonical index that it really has."""
    local = tensor.to_local().reshape(-1)
    here = local_part(name, tensor)
    seen = torch.zeros(local.numel(), dtype=torch.int64)
    for region in here.regions:
        src, dst = (torch.from_numpy(side) for side in indices(region))
        assert torch.equal(local[src], dst.to(torch.float32)), (name, tensor.placements, region)
        seen[src] += 1
    assert bool((seen == 1).all()), (name, tensor.placements)


def check_refusal() -> None:
    mesh = init_device_mesh("cpu", (4,))
    unfinished = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    with pytest.raises(Incompatible, match="no part of a finished tensor"):
        local_part("gradient", unfinished)


def plain(regions: list[Region]) -> list[Any]:
    return [[r.name, r.shape, r.src, r.src_strides, r.dst, r.dst_strides] for r in regions]


def main(rank: int, out: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{out}/meet", rank=rank, world_size=WORLD)
    saved = {**dict(distributed()), **dict(modules())}
    everything = saved | dict(uneven())
    for name, tensor in everything.items():
        check_local(name, tensor)
    check_refusal()
    layout = Layout(TensorSpec(name, "F32", tuple(tensor.shape)) for name, tensor in everything.items())
    everything["on every rank"] = numbered(9)  # type: ignore[assignment]
    layout = Layout([*layout, TensorSpec("on every rank", "F32", (9,))])
    made = map_of(everything.items(), layout, plain_replica=(rank, WORLD))
    (out / f"rank{rank}.json").write_text(json.dumps(plain(list(made.regions))))
    if rank == 0:
        (out / "layout.json").write_bytes(layout.encoded)
    writable = {name: tensor for name, tensor in saved.items() if not name.startswith("packed")}
    dcp.save({"model": writable, "step": 3}, checkpoint_id=out / "dcp")
    writer = HuggingFaceStorageWriter(str(out / "sharded"), save_distributed=True, enable_consolidation=False)
    dcp.save(writable, storage_writer=writer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
