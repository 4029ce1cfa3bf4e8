"""A transformers model's own parameters, from the architecture alone: what FSDP2, ZeRO-3 or replicas cut.

The library keeps checkpoint tensors as they are, except for the experts of a layer, which it fuses: `gate_up_proj` of
(experts, 2 · width, hidden) and `down_proj` of (experts, hidden, width). A live model is mapped by probing the library;
this is the prediction for a plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from dcr_daemon.canonical.compose import chain
from dcr_daemon.canonical.layout import TensorSpec
from dcr_daemon.canonical.region import Region, slab, whole
from dcr_daemon.projection.frameworks.megatron.model import parameters
from dcr_daemon.projection.frameworks.megatron.parameter import Parameter
from dcr_daemon.projection.frameworks.megatron.splits import Columns, Joined, Padded, QueryGroups, Rows
from dcr_daemon.projection.frameworks.models.architecture import Architecture
from dcr_daemon.projection.sharding.intervals import Cut, shard
from dcr_daemon.projection.sharding.zero3 import partition

Trainer = Literal["fsdp2", "zero3", "transformers"]


@dataclass(frozen=True, slots=True)
class Form:
    """A parameter but for its names: `parts` equal canonical tensors, in turn, of `shape[0] · parts` when stacked.

    `axis` is what tensor parallelism cuts, `None` where it leaves the parameter whole; `groups` are packed on it.
    """

    shape: tuple[int, ...]
    parts: int = 1
    axis: int | None = None
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Module:
    kind: str
    form: Form
    targets: tuple[TensorSpec, ...]


def modules(architecture: Architecture) -> Iterator[Module]:
    """Every parameter of the library's model. It has no multi-token prediction."""
    experts: dict[tuple[int, int, int], list[TensorSpec]] = {}
    stacked: set[str] = set()
    for parameter in parameters(architecture):
        if parameter.expert is None:
            for target in parameter.targets:
                yield Module(parameter.kind, Form(target.spec.shape, axis=_axis(parameter)), (target.spec,))
        elif parameter.targets[0].spec.elements != parameter.split.sizes[0]:
            spec = parameter.targets[0].spec
            if spec.name not in stacked:
                stacked.add(spec.name)
                yield Module(parameter.kind, Form(spec.shape, axis=_stacked_axis(spec)), (spec,))
        else:
            specs = [target.spec for target in parameter.targets]
            axis = 2 if isinstance(parameter.split, Columns) else 1
            experts.setdefault((parameter.place.layer, axis, len(specs)), []).extend(specs)
    for (_, axis, halves), specs in experts.items():
        rows, width = specs[0].shape
        form = Form((len(specs) // halves, halves * rows, width), len(specs), axis=axis, groups=halves)
        yield Module("experts", form, tuple(specs))


def _axis(parameter: Parameter) -> int | None:
    """What the library's tensor parallel plans cut of an ordinary tensor. They leave sequence mixers whole."""
    split = parameter.split
    if parameter.kind.startswith(("mamba", "delta", "norm")):
        return None
    if isinstance(split, Rows | QueryGroups | Padded) or (isinstance(split, Joined) and len(parameter.targets) == 2):
        return 0
    return 1 if isinstance(split, Columns) else None


def _stacked_axis(spec: TensorSpec) -> int | None:
    return {"gate_up_proj": 2, "gate_up_proj_bias": 1, "down_proj": 1}.get(spec.name.rpartition(".")[2])


@lru_cache(maxsize=1 << 14)
def regions(form: Form, trainer: Trainer, rank: int, tp: int, dp: int) -> tuple[Region, ...]:
    """What a rank holds; tensor-parallel ranks have consecutive numbers. Regions are named "0", "1", … by target."""
    over_data, over_tensor = divmod(rank, tp)
    full = _whole(form)
    if trainer == "zero3":
        flat = [region for of_part in full.values() for region in of_part]
        return tuple(partition(flat, math.prod(form.shape), rank=rank, world=tp * dp))
    cuts = []
    if trainer == "fsdp2":
        strided = tp if form.axis == 0 else 1
        cuts.append(Cut(0, dp, over_data, strided))
    if form.axis is not None and tp > 1:
        packed = 1 if trainer == "fsdp2" and form.axis == 0 else form.groups
        cuts.append(Cut(form.axis, tp, over_tensor, packed))
    return tuple(chain(shard("", form.shape, cuts), full))


@lru_cache(maxsize=1 << 10)
def _whole(form: Form) -> dict[str, list[Region]]:
    if form.parts == 1:
        return {"": whole("0", form.shape)}
    size = math.prod(form.shape) // form.parts
    return {
        "": [
            r.shifted(src=i * size)
            for i in range(form.parts)
            for r in slab(str(i), (size,), starts=(0,), sizes=(size,))
        ]
    }
