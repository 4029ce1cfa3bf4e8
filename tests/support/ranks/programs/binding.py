"""One rank of a world of four: models sharded in every way, mapped as they are, and every block of the rank read.

Run as a program, one process per rank, by tests/projection/binding/test_bind_ranks.py; gloo over a file, no ports.
Argument two is a folder with a tiny transformers model in `base`; what the rank has read goes to `rank<n>.pickle`
there.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.binding.bind import live
from support.measure.torch_allocations import Allocations
from support.ranks.readings import readings

WORLD = 4
LIMIT = 1 << 10  #: bytes of a block
PLAIN = {"first.weight": (8, 6), "first.bias": (8,), "second.weight": (6, 8), "norm.weight": (6,)}

Scene = tuple[Any, dict[str, Any]]  #: weights, and what else `live` is told


def published(base: Path) -> Layout:
    """The stream's layout: the model's checkpoint in bf16."""
    with Checkpoint(base) as checkpoint:
        return Layout(TensorSpec(spec.name, "BF16", spec.shape) for spec in checkpoint.layout)


def loaded(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def sharded(base: Path, mesh: Any, **more: Any) -> Any:
    model = loaded(base)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **more)
    return fully_shard(model, mesh=mesh, **more)


class Wrapper(nn.Module):
    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy


def fsdp(base: Path) -> Scene:
    return sharded(base, init_device_mesh("cpu", (4,))), {}


def columns(base: Path) -> Scene:
    """Shard(1) wherever it divides, inside a wrapper of the user's own, compiled."""
    model = sharded(
        base,
        init_device_mesh("cpu", (4,)),
        shard_placement_fn=lambda p: Shard(1 if p.ndim > 1 and p.shape[1] % WORLD == 0 else 0),
    )
    return torch.compile(Wrapper(model)), {}


def hybrid(base: Path) -> Scene:
    return sharded(base, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))), {}


def offloaded(base: Path) -> Scene:
    return sharded(base, init_device_mesh("cpu", (4,)), offload_policy=CPUOffloadPolicy(pin_memory=False)), {}


def tensor_parallel(base: Path) -> Scene:
    """The library's own plan: packed gate and up projections, plain tensors (router, norms) beside DTensors."""
    return apply_tensor_parallelism(loaded(base), init_device_mesh("cpu", (4,))), {}


def two_ways(base: Path, plan: dict[str, str] | None) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = apply_tensor_parallelism(loaded(base), mesh["tp"], plan)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def over_tensor_parallel(base: Path) -> Scene:
    return two_ways(base, None), {}


def over_expert_parallel(base: Path) -> Scene:
    experts = "model.layers.*.mlp.experts"
    return two_ways(base, {f"{experts}.gate_up_proj": "grouped_gemm", f"{experts}.down_proj": "grouped_gemm"}), {}


def partitioned(base: Path) -> Scene:
    """As DeepSpeed's ZeRO-3 does it: a padded partition beside each parameter, whose own data are gone."""
    model = loaded(base)
    for parameter in model.parameters():
        size = -(-parameter.numel() // WORLD)
        padded = torch.zeros(size * WORLD)
        padded[: parameter.numel()] = parameter.detach().reshape(-1)
        parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()
        parameter.ds_tensor = padded[dist.get_rank() * size :][:size].clone()
        parameter.data = torch.empty(0)
    return model, {}


SCENES: dict[str, Callable[[Path], Scene]] = {
    "fsdp": fsdp,
    "columns": columns,
    "hybrid": hybrid,
    "offloaded": offloaded,
    "tp": tensor_parallel,
    "fsdp over tp": over_tensor_parallel,
    "fsdp over experts": over_expert_parallel,
    "zero3": partitioned,
}


def of_scene(scene: Scene, layout: Layout, rank: int) -> dict[str, Any]:
    """What the rank reads before and after all its weights doubled, and what it allocated meanwhile."""
    weights, more = scene
    with Allocations() as seen:
        held = live(weights, layout, rank=rank, world=WORLD, **more)
        before = readings(held, layout, LIMIT)
        assert held.same(weights)
        with torch.no_grad():
            for tensor in held.tensors.values():
                tensor.mul_(2)
        after = readings(held.rebind(weights), layout, LIMIT)
    gathered = {name: t.full_tensor() for name, t in held.inputs.items() if type(t).__name__ == "Partitioned"}
    return {
        "before": before,
        "after": after,
        "residual": dict(held.map.residual),
        "dropped": dict(held.dropped),
        "largest": seen.largest,
        "gathered": {name: tensor.double().sum().item() for name, tensor in gathered.items()},
        "placements": {repr(p) for t in held.inputs.values() for p in getattr(t, "placements", ())},
    }


def replicated_tensor_parallel() -> Iterator[tuple[str, Layout, Scene]]:
    """Tensor parallel on half of the ranks, the same again on the others, and plain tensors beside it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.ModuleDict({"first": nn.Linear(6, 8), "second": nn.Linear(8, 6, bias=False), "norm": nn.RMSNorm(6)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape))
    parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    layout = Layout(TensorSpec(name, "F32", shape) for name, shape in PLAIN.items())
    yield "replicated tp", layout, (model.state_dict(), {"replica": (mesh.get_local_rank("dp"), 2)})
    whole = init_device_mesh("cpu", (4,))
    table = {
        "sum": DTensor.from_local(torch.ones(6), whole, [Partial()], run_check=False),
        "rows": DTensor.from_local(torch.full((2, 3), float(dist.get_rank())), whole, [Shard(0)], run_check=False),
    }
    yield "partial", Layout([TensorSpec("sum", "F32", (6,)), TensorSpec("rows", "F32", (8, 3))]), (table, {})


def moved() -> Incompatible | None:
    """What is said of a tensor whose rows are cut over another mesh, with the same local shape."""
    rows = torch.zeros(2, 3)
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    first = {"rows": DTensor.from_local(rows, line, [Shard(0)], run_check=False)}
    second = {"rows": DTensor.from_local(rows, square, [Shard(0), Shard(0)], run_check=False)}
    held = live(first, Layout([TensorSpec("rows", "F32", (8, 3))]), rank=dist.get_rank(), world=WORLD)
    assert not held.same(second)
    try:
        held.rebind(second)
    except Incompatible as error:
        return error
    return None


def main(rank: int, out: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/meet", rank=rank, world_size=WORLD)
    layout = published(out / "base")
    told = {name: of_scene(scene(out / "base"), layout, rank) for name, scene in SCENES.items()}
    told |= {name: of_scene(scene, own, rank) for name, own, scene in replicated_tensor_parallel()}
    told["moved"] = moved()  # type: ignore[assignment]
    (out / f"rank{rank}.pickle").write_bytes(pickle.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
