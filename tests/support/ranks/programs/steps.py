"""A rank whose weights are a function of the step: what a group of processes must publish is known without it.

    dcr URL BASE STATE PLACE MESH STEPS      started by fork_server.py, entry `support.ranks.programs.steps:main`

MESH is how the ranks share the model: `4` for FSDP2 over four, `2x2` for FSDP2 over tensor parallelism, `1x4` for
tensor parallelism alone. Begins with the step after the newest version, as a trainer that resumes; publishes a step
when `PLACE/go-STEP` exists, once more if it comes to nothing. RIG_MEET names the file over which the ranks of this life
find each other; RIG_SPOILT the step at which this rank hands over half of its weights at first.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dcr_daemon import Publisher
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.directory import write_checkpoint
from dcr_daemon.errors import DcrError, Fenced

NAME = "trainer"
FENCED = 12
SHAPES = {"a": (64, 48), "b": (32, 64), "c": (70, 33), "d": (7, 5), "scale": (48,)}  #: c and d are never cut evenly
LAYOUT = Layout(
    TensorSpec(f"{name}.weight", "BF16", shape) if len(shape) > 1 else TensorSpec(name, "BF16", shape)
    for name, shape in SHAPES.items()
)


def values(step: int) -> dict[str, torch.Tensor]:
    """fp32 tensors of a step: those of the step before, one element in ten moved."""
    made = {}
    for number, spec in enumerate(LAYOUT):
        rng = np.random.default_rng(number)
        one = rng.normal(size=spec.shape).astype("f4")
        for _ in range(step):
            one += np.where(rng.random(spec.shape) < 0.1, rng.normal(size=spec.shape) * 0.1, 0).astype("f4")
        made[spec.name] = torch.from_numpy(one)
    return made


def bits(step: int) -> dict[str, Any]:
    """The same, as the stream must have it."""
    return {name: one.to(torch.bfloat16).view(torch.uint16).numpy().reshape(-1) for name, one in values(step).items()}


def write_base(out: Path) -> Path:
    write_checkpoint(out, LAYOUT, bits_of=bits(0).__getitem__)
    return out


def write_step(out: Path, step: int) -> Path:
    """A whole checkpoint, for one process that watches a directory."""
    write_checkpoint(out, LAYOUT, bits_of=bits(step).__getitem__)
    return out


class Model(nn.Module):
    def __init__(self, step: int) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            if len(shape) > 1:
                setattr(self, name, nn.Linear(shape[1], shape[0], bias=False))
            else:
                setattr(self, name, nn.Parameter(torch.zeros(shape)))
        self.load_state_dict(values(step))


def held(step: int, mesh: str) -> dict[str, Any]:
    """What this rank holds of the weights of a step."""
    model = Model(step)
    data, _, tensor = mesh.partition("x")
    if tensor:
        grid = init_device_mesh("cpu", (int(data), int(tensor)), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, grid["tp"], {"a": ColwiseParallel(), "b": RowwiseParallel()})
        if int(data) > 1:
            fully_shard(model, mesh=grid["dp"])
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (int(data),)))
    return model.state_dict()


def main() -> None:
    url, base, state, place, mesh, steps = sys.argv[1:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{os.environ['RIG_MEET']}", rank=rank, world_size=world)
    try:
        with Publisher(url, base=base, create=True, name=NAME, state=state, anchor_every=1, patience=60.0) as publisher:
            for step in range(_newest(publisher, rank) + 1, int(steps) + 1):
                _wait_for(Path(place) / f"go-{step}")
                weights = held(step, mesh)
                spoilt = dict(list(weights.items())[::2]) if os.environ.get("RIG_SPOILT") == str(step) else weights
                try:
                    sealed = publisher.publish(spoilt, step=step).wait_sealed(100)
                except Fenced:
                    raise
                except DcrError as error:  # on every rank, if on one
                    print(f"rank {rank}: step {step}, again: {error}", flush=True)
                    sealed = publisher.publish(weights, step=step).wait_sealed(100)
                print(f"rank {rank}: step {step} is version {sealed.version}", flush=True)
    except Fenced as error:
        print(f"rank {rank}: fenced: {error}", flush=True)
        os._exit(FENCED)
    sys.stdout.flush()
    os._exit(0)  # gloo would wait for ranks that are gone


def _newest(publisher: Publisher, rank: int) -> int:
    """The newest version, as rank 0 knows it. A trainer would know it from its own checkpoint. Not by a collective: its
    error would hide that a rank which slept was fenced meanwhile."""
    told = Path(os.environ["RIG_MEET"] + "-newest")
    if rank == 0:
        part = told.with_name(told.name + "-part")
        part.write_text(str(publisher.version))
        part.rename(told)
    _wait_for(told)
    return int(told.read_text())


def _wait_for(path: Path) -> None:
    until = time.monotonic() + 100
    while not path.exists():
        assert time.monotonic() < until, f"{path} never came"
        time.sleep(0.01)
