"""The map of one Megatron rank, predicted from architecture and grid alone; `live` finds it in a real process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dcr_daemon.projection.frameworks.megatron.grid import Grid, Holder
from dcr_daemon.projection.frameworks.megatron.model import VOCABULARY_MULTIPLE, parameters
from dcr_daemon.projection.frameworks.megatron.parameter import Parameter
from dcr_daemon.projection.frameworks.models.architecture import Architecture, Experts
from dcr_daemon.projection.owners import owned
from dcr_daemon.projection.region_map import Map, Shard
from dcr_daemon.projection.values import Add, Value, between


@dataclass(frozen=True, slots=True)
class Spot:
    """Where one rank has a parameter: chunk of layers, and the numbers that its name carries there."""

    parameter: Parameter
    holder: Holder
    chunk: int  #: virtual stage
    layer: int
    expert: int | None

    @property
    def names(self) -> list[str]:
        return list(self.parameter.local_names(self.layer, self.expert))


def of_rank(
    architecture: Architecture,
    grid: Grid,
    rank: int,
    *,
    dtype: str | None = None,
    vocabulary_multiple: int = VOCABULARY_MULTIPLE,
) -> Map:
    """What rank number `rank` is the source of.

    Args:
        dtype: of the parameters in memory; the canonical tensors' own by default.

    Raises:
        UsageError: the degrees do not divide the model.
    """
    shards = []
    for spot in spots(architecture, grid, rank=rank, vocabulary_multiple=vocabulary_multiple):
        name = spot.names[0] if grid.vpp == 1 else f"{spot.chunk}.{spot.names[0]}"
        shards.append(shard(spot, name, dtype or spot.parameter.targets[0].spec.dtype))
    return Map(tuple(shards))


def shard(spot: Spot, name: str, dtype: str) -> Shard:
    """A rank's share of a parameter; without regions where other replicas own them all."""
    held = spot.parameter.held(spot.holder.share, spot.holder.shares)
    regions = owned(held.regions, spot.holder.replica, spot.holder.replicas)
    return Shard(name, held.shape, dtype, value_of(spot.parameter, dtype), tuple(regions))


def value_of(parameter: Parameter, dtype: str) -> Value:
    """How a parameter of `dtype` becomes its canonical tensors, which are all of one dtype."""
    spec = parameter.targets[0].spec
    return Add(parameter.add, spec.dtype) if parameter.add else between(spec.name, dtype, spec.dtype)


def spots(
    architecture: Architecture, grid: Grid, *, rank: int, vocabulary_multiple: int = VOCABULARY_MULTIPLE
) -> Iterator[Spot]:
    """Every parameter that a rank has, in the order of the model."""
    chunks = grid.chunks(len(architecture.layers))
    stage, counts = rank // grid.stage, experts_of(architecture)
    for parameter in parameters(architecture, vocabulary_multiple=vocabulary_multiple):
        chunk = grid.chunk_of(parameter.place, chunks)
        if chunk % grid.pp != stage:
            continue
        local = grid.local_expert(parameter, counts)
        holder = grid.holder(parameter, rank, local[0] if local else 0)
        if holder is not None:
            layer = parameter.place.layer - (chunks[chunk].start if parameter.place.part == "decoder" else 0)
            yield Spot(parameter, holder, chunk // grid.pp, layer, local[1] if local else None)


def experts_of(architecture: Architecture) -> int:
    """Experts of a layer; 0 in a dense model."""
    return max((layer.feed.count for layer in architecture.layers if isinstance(layer.feed, Experts)), default=0)
