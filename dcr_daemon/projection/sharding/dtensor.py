"""Regions of plain tensors and DTensors: FSDP2, HSDP, tensor parallelism and any mix of them.

A rank reads its own tensors and its own coordinates in their meshes; nothing is communicated. Where several ranks hold
the same elements (replicated mesh dimensions), each region has one owner (owners.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dcr_daemon.canonical.compose import chain
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.canonical.region import Region, whole
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.owners import owned
from dcr_daemon.projection.region_map import Shard, shards_of
from dcr_daemon.projection.sharding.intervals import Cut, local_shape, shard
from dcr_daemon.projection.sharding.zero3 import Partitioned
from dcr_daemon.projection.values import dtype_of


@dataclass(frozen=True, slots=True)
class LocalPart:
    """What this rank holds of one tensor: regions to the whole tensor, and which of how many replicas it is."""

    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    replica: int = 0
    replicas: int = 1


def local_part(name: str, tensor: Any) -> LocalPart:
    """Where the local tensor of a DTensor, or of a partitioned one, lies in the whole one; a plain tensor is whole.

    Raises:
        Incompatible: partial sums or a placement that is not known, and a local tensor of another size than its
            placements say.
    """
    if isinstance(tensor, Partitioned):
        return LocalPart(tuple(tensor.local.shape), tuple(tensor.regions(name)))
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return LocalPart(tuple(tensor.shape), tuple(whole(name, tuple(tensor.shape))))
    mesh, local = tensor.device_mesh, tensor.to_local()
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return LocalPart(tuple(local.shape), ())
    sizes = [int(mesh.size(i)) for i in range(mesh.ndim)]
    cuts, replica, replicas = _cuts(name, tensor.ndim, placements=placements, sizes=sizes, coordinate=coordinate)
    shape = local_shape(tuple(tensor.shape), cuts)
    regions = shard(name, tuple(tensor.shape), cuts)
    if sum(region.elements for region in regions) != local.numel() or (local.numel() and shape != tuple(local.shape)):
        raise Incompatible(
            f"{name} holds {tuple(local.shape)} here, and its placements {tuple(placements)} over {tuple(sizes)} say "
            f"{shape} of {tuple(tensor.shape)}",
            hint="it can only be published by the residual export",
        )
    return LocalPart(tuple(local.shape), tuple(regions), replica, replicas)


def cuts_of(name: str, tensor: Any) -> list[Cut]:
    """How the placements of a DTensor cut it for this rank, which is one of its mesh.

    Raises:
        Incompatible: partial sums or a placement that is not known.
    """
    mesh = tensor.device_mesh
    sizes = [int(mesh.size(i)) for i in range(mesh.ndim)]
    return _cuts(name, tensor.ndim, placements=tensor.placements, sizes=sizes, coordinate=mesh.get_coordinate())[0]


def _cuts(
    name: str, ndim: int, *, placements: Sequence[Any], sizes: Sequence[int], coordinate: Sequence[int]
) -> tuple[list[Cut], int, int]:
    """Placements in mesh order as cuts, and this rank's number among the replicas, mesh order too."""
    cuts, replica, replicas = [], 0, 1
    for placement, ways, at in zip(placements, sizes, coordinate, strict=True):
        axis = getattr(placement, "dim", None)
        kind = type(placement).__name__
        if placement.is_replicate():
            replica, replicas = replica * ways + at, replicas * ways
        elif kind in ("Shard", "_StridedShard") and axis is not None:
            groups = int(placement.split_factor) if kind == "_StridedShard" else 1
            cuts.append(Cut(axis % ndim, ways, at, groups))
        else:
            raise Incompatible(
                f"{name} is placed as {placement}, which is no part of a finished tensor",
                hint="publish after the optimizer step, when gradients are reduced and parameters settled",
            )
    return cuts, replica, replicas


def shards(
    name: str,
    tensor: Any,
    layout: Layout,
    targets: Sequence[Region] | None = None,
    *,
    replica: tuple[int, int] = (0, 1),
) -> list[Shard]:
    """What this rank is the source of through one of its tensors.

    Args:
        targets: of the whole tensor to canonical ones (`Conversion.regions[name]`); none if it is canonical itself.
        replica: number of this rank, and how many, among the replicas that the tensor's own mesh does not count: a
            plain tensor on every rank, a mesh of only some ranks.

    Raises:
        Incompatible: see `local_part`, and a dtype that cannot stand for the canonical one.
    """
    here = local_part(name, tensor)
    regions = list(here.regions) if targets is None else chain(here.regions, {name: targets})
    number, count = here.replica + replica[0] * here.replicas, here.replicas * replica[1]
    return shards_of(name, here.shape, dtype_of(name, tensor), owned(regions, number, count), layout)
