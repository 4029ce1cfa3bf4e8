"""The map of one rank: its local tensors (shards), and which canonical elements each is the source of.

Every part of `projection` that reads a framework or a file answers with these records. Local places count the elements
of a local tensor in its own row-major order, whatever its memory strides are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dcr_daemon.canonical.coverage import Finding, exactly_once
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.canonical.region import Region, digest
from dcr_daemon.projection.values import Bits, Value, between


@dataclass(frozen=True, slots=True)
class Shard:
    """One local tensor of this rank.

    Attributes:
        parameter: its name in the training process, or in the file.
        shape: of the local tensor; may be empty, and then there are no regions.
        dtype: safetensors name of its dtype.
        value: how its elements become canonical ones.
        regions: local places to canonical elements; of replicated tensors only those that this rank owns.
    """

    parameter: str
    shape: tuple[int, ...]
    dtype: str
    value: Value
    regions: tuple[Region, ...]

    @property
    def elements(self) -> int:
        """Canonical elements that this shard is the source of."""
        return sum(region.elements for region in self.regions)


@dataclass(frozen=True, slots=True)
class Map:
    """All that one rank is the source of.

    Attributes:
        shards: in the order of the source; a parameter with two value functions is two shards.
        residual: canonical tensors that the rank could not map, with the reason. They are never guessed.
    """

    shards: tuple[Shard, ...]
    residual: Mapping[str, str] = field(default_factory=dict)

    @property
    def regions(self) -> Iterator[Region]:
        return (region for shard in self.shards for region in shard.regions)

    @property
    def elements(self) -> int:
        return sum(shard.elements for shard in self.shards)

    def without(self, residual: Mapping[str, str]) -> Map:
        """The same map without these canonical tensors, which are residual for the reasons given.

        Shards stay even without regions, because they name what the rank holds.
        """
        shards = tuple(
            replace(shard, regions=tuple(region for region in shard.regions if region.name not in residual))
            if any(region.name in residual for region in shard.regions)
            else shard
            for shard in self.shards
        )
        return Map(shards, {**self.residual, **residual})

    def with_followers(self, follows: Mapping[str, str]) -> Map:
        """The same map as the source of more canonical tensors: each is tied to the one that it is given with, and has
        the same elements."""
        return replace(self, shards=tuple(replace(shard, regions=_doubled(shard, follows)) for shard in self.shards))

    def baseline_bytes(self, layout: Layout) -> int:
        """Bytes of the baseline that this rank keeps: what it owns, in the canonical dtype."""
        return sum(region.elements * layout[layout.index(region.name)].width for region in self.regions)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over regions, values and dtypes; equal exactly if the ranks project in the same way."""
        values = sorted((shard.parameter, shard.dtype, str(shard.value)) for shard in self.shards)
        table: dict[str, list[Region]] = {}
        for shard in self.shards:
            table.setdefault(shard.parameter, []).extend(shard.regions)
        return hashlib.sha256(f"{digest(table)} {values} {sorted(self.residual)}".encode()).hexdigest()


def _doubled(shard: Shard, follows: Mapping[str, str]) -> tuple[Region, ...]:
    more = (replace(r, name=name) for r in shard.regions for name, source in follows.items() if r.name == source)
    return (*shard.regions, *more)


def shards_of(
    parameter: str, shape: Sequence[int], dtype: str, regions: Iterable[Region], layout: Layout
) -> list[Shard]:
    """The shards of a local tensor: one per value function, or one without regions if it is the source of nothing.

    Regions of tensors outside `layout` are dropped; the caller knows whether that is allowed (for a tied head it is).

    Raises:
        Incompatible: its dtype cannot stand for a canonical tensor's.
    """
    by_value: dict[Value, list[Region]] = {}
    for region in regions:
        if region.name in layout:
            value = between(parameter, dtype, layout[layout.index(region.name)].dtype)
            by_value.setdefault(value, []).append(region)
    found = by_value or {Bits(): []}
    return [Shard(parameter, tuple(shape), dtype, value, tuple(of_value)) for value, of_value in found.items()]


def gaps(maps: Iterable[Map], layout: Layout) -> list[Finding]:
    """What keeps the maps of all ranks together from being the source of every canonical element exactly once.

    Tensors that a map calls residual count as covered. Holders of a finding number the regions over all maps in order.
    """
    maps = list(maps)
    residual = {name for one in maps for name in one.residual}
    shapes = {spec.name: spec.shape for spec in layout if spec.name not in residual}
    return exactly_once((region for one in maps for region in one.regions if region.name not in residual), shapes)
