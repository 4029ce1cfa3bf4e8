"""DeepSpeed ZeRO-3: every parameter is a flat row of elements, cut in equal partitions.

Partition r of W holds elements [r·p, (r + 1)·p) of the flattened parameter, p = ceil(elements / W), as
`partition_parameters.py` cuts it; the last ones are padded, or hold nothing but padding. Parameters below the
persistence threshold are whole on every rank: they are replicas, and have an owner.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dcr_daemon.canonical.region import Region, intersect_src, whole
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.owners import owned


@dataclass(frozen=True, slots=True, eq=False)
class Partitioned:
    """A parameter of which this rank has a partition, with a tensor's attributes: `shape` and `dtype` are the whole's.

    Attributes:
        local: the partition, flat and padded to the size of all of them.
        rank, ranks: of this process in `group`, whose partitions together are the parameter.
        hidden: why the partition's memory does not hold the parameter's values; "" if it does.
    """

    shape: tuple[int, ...]
    dtype: Any
    local: Any
    rank: int
    ranks: int
    group: Any = None
    hidden: str = ""

    @classmethod
    def of(cls, parameter: Any) -> Partitioned:
        """A parameter as DeepSpeed marks it: `ds_tensor` is the partition, `ds_shape` the shape of the whole."""
        import torch.distributed as dist

        part, group = parameter.ds_tensor, getattr(parameter, "ds_process_group", None)
        rank = getattr(parameter, "ds_zero_partition_rank", None)
        ranks = getattr(parameter, "ds_zero_partition_world_size", None)
        rank = dist.get_rank(group=group) if rank is None else rank
        ranks = dist.get_world_size(group=group) if ranks is None else ranks
        hidden = "its partition is quantised" if hasattr(part, "ds_quant_scale") else ""
        if getattr(getattr(part, "status", None), "name", "AVAILABLE") != "AVAILABLE":
            hidden = "its partition is swapped out"
        return cls(tuple(parameter.ds_shape), parameter.dtype, part.detach(), int(rank), int(ranks), group, hidden)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    def detach(self) -> Partitioned:
        return self

    def full_tensor(self) -> Any:
        """The whole parameter, by a collective of its group."""
        import torch
        import torch.distributed as dist

        flat = torch.empty(self.ranks * self.local.numel(), dtype=self.dtype, device=self.local.device)
        dist.all_gather_into_tensor(flat, self.local, group=self.group)
        return flat[: self.numel()].view(self.shape)

    def regions(self, name: str) -> list[Region]:
        """Where the partition lies in the whole parameter.

        Raises:
            Incompatible: its memory does not hold the parameter's values.
        """
        if self.hidden:
            raise Incompatible(f"{name} cannot be read: {self.hidden}", hint="keep partitions in memory to publish")
        size = int(self.local.numel())
        return partition(whole(name, self.shape), self.numel(), rank=self.rank, world=self.ranks, size=size)


def partition(
    regions: Iterable[Region], elements: int, *, rank: int, world: int, size: int | None = None
) -> list[Region]:
    """What lies in a rank's partition of a parameter, places counted from the partition's start.

    Args:
        regions: of the whole parameter (its conversion to canonical tensors).
        elements: of the whole parameter.
        size: elements per partition where the framework aligns them (DeepSpeed's own `ds_tensor.ds_numel`); else p.

    Raises:
        Incompatible: partitions of `size` are too small to hold the parameter.
    """
    size = -(-elements // world) if size is None else size
    if size * world < elements:
        raise Incompatible(f"{world} partitions of {size} elements cannot hold a parameter of {elements}")
    lo, hi = rank * size, min((rank + 1) * size, elements)
    return [piece.shifted(src=-lo) for region in regions for piece in intersect_src(region, lo, hi)]


def persistent(regions: Iterable[Region], rank: int, world: int) -> list[Region]:
    """What a rank owns of a parameter that every rank keeps whole."""
    return owned(regions, rank, world)
