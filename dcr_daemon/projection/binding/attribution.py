"""Which canonical elements each tensor handed over is the source of, and what becomes of those that are of none.

One rule for names, whatever was handed over: a tensor outside the layout is dropped only if it is the memory of a
layout tensor (a tied head), if the framework's own export leaves it out, or if `ignore` says so. What an export could
write but this rank cannot project is residual, by canonical name. Everything else is a misfit, and all misfits are one
error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dcr_daemon.canonical.compose import chain
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.canonical.region import Region, whole
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.frameworks.megatron import model as megatron_model
from dcr_daemon.projection.frameworks.megatron.live import Megatron, shards_of
from dcr_daemon.projection.mismatches import LayoutMismatches
from dcr_daemon.projection.owners import owned
from dcr_daemon.projection.region_map import Map, Shard
from dcr_daemon.projection.region_map import shards_of as shards_of_regions
from dcr_daemon.projection.sharding.copies import Copies
from dcr_daemon.projection.sharding.dtensor import local_part
from dcr_daemon.projection.sharding.local import encoded, is_tensor, local, memory, unreadable
from dcr_daemon.projection.tracing import Conversion
from dcr_daemon.projection.values import Add, dtype_of

EXTRA = "_extra_state"  #: torch's ending of what modules keep beside weights: Transformer Engine its scales, as bytes


@dataclass(slots=True)
class AttributionResult:
    """Attributes:
    shards: of the rank, in the order of what was handed over.
    residual: canonical names with reasons.
    dropped: local names with reasons; `tied` are those that are another's memory, by its name.
    skipped: those of `dropped` that need not be looked at again.
    """

    shards: list[Shard] = field(default_factory=list)
    residual: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)

    @property
    def map(self) -> Map:
        return Map(tuple(self.shards)).without(self.residual)

    def drop(self, name: str, why: str) -> None:
        """For good: later steps do not look at it."""
        self.dropped[name] = why
        self.skipped.add(name)


class Attribution:
    """Of modules and state dicts. One object for one look at one rank's tensors."""

    def __init__(
        self, layout: Layout, mismatches: LayoutMismatches, conversion: Conversion | None, copies: Copies
    ) -> None:
        self._layout, self._mismatches, self._copies = layout, mismatches, copies
        self._conversion = conversion
        opaque = {name: why for name, why in conversion.opaque.items() if name in layout} if conversion else {}
        self._computed_with = (
            {source for name in opaque for source in conversion.sources.get(name, ())} if conversion else set()
        )
        self._found = AttributionResult(residual=opaque)

    def of(self, tensors: Mapping[str, Any]) -> AttributionResult:
        """Judge every tensor (DTensors as such). Misfits are noted, not raised."""
        self._check_shapes()
        extras = [name for name, tensor in tensors.items() if not self._take(name, tensor)]
        known = {memory(local(tensors[shard.parameter])): shard.parameter for shard in self._found.shards}
        for name in extras:
            self._judge(name, tensors[name], known)
        return self._found

    def _check_shapes(self) -> None:
        """What an export calls like a layout tensor has its shape."""
        for name, (_, shape) in self._conversion.tensors.items() if self._conversion else ():
            if name in self._layout:
                self._mismatches.judge_shape(name, shape, self._layout[self._layout.index(name)].shape)

    def _targets(self, name: str, tensor: Any) -> Sequence[Region] | None:
        """Of the whole tensor; none if nobody said that there is such a tensor."""
        if self._conversion is not None:
            return self._conversion.regions.get(name)
        return whole(name, tuple(tensor.shape)) or [Region(name, (), 0, (), 0, ())]

    def _take(self, name: str, tensor: Any) -> bool:
        """Whether the tensor is a layout tensor's source or has been judged; if not, it is an extra."""
        if not is_tensor(tensor):
            self._take_other(name, tensor)
            return True
        if name.endswith(EXTRA) and name not in self._layout:
            self._found.drop(name, "kept beside the weights")
            return True
        targets = self._targets(name, tensor)
        if targets is None:
            return False
        goes_to = dict.fromkeys(region.name for region in targets)
        inside = [target for target in goes_to if target in self._layout]
        if not targets:
            if name not in self._computed_with:
                self._found.drop(name, "the export leaves it out")
            return True
        if not inside:
            return False
        for target in goes_to:
            if target not in self._layout and not self._mismatches.ignores(target):
                self._mismatches.note("added", target)
        self._bind(name, tensor, targets, inside)
        return True

    def _take_other(self, name: str, value: Any) -> None:
        if name.endswith(EXTRA) or self._mismatches.ignores(name):
            self._found.drop(name, f"a {type(value).__name__}, not a tensor")
        else:
            self._mismatches.note("not tensors", f"{name} (a {type(value).__name__})")

    def _bind(self, name: str, tensor: Any, targets: Sequence[Region], inside: list[str]) -> None:
        if self._conversion is None and not self._mismatches.judge_shape(
            name, tensor.shape, self._layout[self._layout.index(name)].shape
        ):
            return
        mine = local(tensor)
        if why := unreadable(mine):
            self._mismatches.note("without values here", f"{name} ({why})")
        elif why := encoded(mine) or self._bind_readable(name, tensor, targets, inside):
            self._found.residual |= dict.fromkeys(inside, why)

    def _bind_readable(self, name: str, tensor: Any, targets: Sequence[Region], inside: list[str]) -> str:
        """Returns why the tensor can only be exported; "" if all is said."""
        try:
            dtype, here = dtype_of(name, tensor), None
        except Incompatible as error:
            self._mismatches.note("retyped", error.message)
            return ""
        if not self._mismatches.judge_dtype(name, dtype, inside):
            return ""
        try:
            here = local_part(name, tensor)
        except Incompatible as error:
            return error.message
        kept = {name: [region for region in targets if region.name in self._layout]}
        regions = owned(chain(here.regions, kept), *self._copies.of(here, tensor))
        self._found.shards += shards_of_regions(name, here.shape, dtype, regions, self._layout)
        return ""

    def _judge(self, name: str, tensor: Any, known: Mapping[tuple[object, ...], str]) -> None:
        """An extra: dropped, or a misfit under the names that it would be exported by."""
        exported = list(dict.fromkeys(region.name for region in self._targets(name, tensor) or ())) or [name]
        mine = local(tensor)
        if self._mismatches.ignores(name) or all(map(self._mismatches.ignores, exported)):
            self._found.drop(name, "ignored")
        elif not mine.numel():  # nothing of it is here; a rank that holds some of it judges
            self._found.dropped[name] = "outside the layout, and empty on this rank"
        elif (other := known.get(memory(mine))) is not None:
            self._found.dropped[name] = f"the memory of {other}"
            self._found.tied[name] = other
        else:
            for one in exported:
                self._mismatches.note("added", one)


def of_chunks(chunks: Any, megatron: Megatron, layout: Layout, mismatches: LayoutMismatches) -> AttributionResult:
    """Of a Megatron rank. A parameter that no closed form speaks of is a misfit, unless something is residual that may
    be made of it."""
    run = megatron
    seen = shards_of(chunks, run.architecture, run.grid, run.rank)
    found = AttributionResult(residual=dict(seen.map.residual))
    predicted = {spec.name: spec for spec in megatron_model.layout(run.architecture)}
    for shard in seen.map.shards:
        found.shards += _as_published(shard, layout, mismatches, found)
    for name in {region.name for shard in seen.map.shards for region in shard.regions}:
        if name not in layout and not mismatches.ignores(name):
            mismatches.note("added", name)
    for name, spec in predicted.items():
        if name in layout:
            mismatches.judge_shape(name, spec.shape, layout[layout.index(name)].shape, by="the architecture")
    for name, shape in seen.unknown.items():
        if mismatches.ignores(name):
            found.drop(name, "ignored")
        elif found.residual:
            found.drop(name, f"no closed form speaks of it; {len(found.residual)} tensors are residual")
        else:
            mismatches.note("added", f"{name} {list(shape)}")
    found.residual = {name: why for name, why in found.residual.items() if name in layout}
    return found


def _as_published(shard: Shard, layout: Layout, mismatches: LayoutMismatches, found: AttributionResult) -> list[Shard]:
    """A shard of Megatron's closed forms with the stream's dtypes, which need not be the architecture's."""
    if not isinstance(shard.value, Add):
        try:
            return shards_of_regions(shard.parameter, shard.shape, shard.dtype, shard.regions, layout)
        except Incompatible as error:
            found.residual |= {region.name: error.message for region in shard.regions}
            return []
    inside = tuple(region for region in shard.regions if region.name in layout)
    dtypes = {layout[layout.index(region.name)].dtype for region in inside} or {shard.value.canonical}
    return [
        replace(
            shard,
            value=replace(shard.value, canonical=dtype),
            regions=tuple(r for r in inside if layout[layout.index(r.name)].dtype == dtype),
        )
        for dtype in sorted(dtypes)
    ]


def of_map(mapped: Map, tensors: Mapping[str, Any], layout: Layout, mismatches: LayoutMismatches) -> AttributionResult:
    """Of a finished map: its tensors are there as it describes them, and its regions lie inside them and the layout."""
    found = AttributionResult(residual=dict(mapped.residual))
    for name in tensors.keys() - {shard.parameter for shard in mapped.shards}:
        found.drop(name, "the map does not speak of it")
    for shard in mapped.shards:
        name, tensor = shard.parameter, tensors.get(shard.parameter)
        if tensor is None:
            mismatches.note("missing", name)
            continue
        mine = local(tensor)
        is_like, should = (dtype_of(name, mine), tuple(mine.shape)), (shard.dtype, shard.shape)
        if is_like != should:
            mismatches.note(
                "not as mapped", f"{name} (is {is_like[0]} {list(is_like[1])}, should be {should[0]} {list(should[1])})"
            )
        if why := unreadable(mine):
            mismatches.note("without values here", f"{name} ({why})")
        for region in shard.regions:
            if region.name not in layout:
                mismatches.note("added", region.name)
            elif region.dst_last >= layout[layout.index(region.name)].elements or region.src_last >= mine.numel():
                mismatches.note("not as mapped", f"{name} ({region} leaves it, or its tensor)")
        found.shards.append(shard)
    return found
