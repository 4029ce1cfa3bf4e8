"""Attribution: the canonical elements for which each of a rank's tensors is the source. `bind` calls it once per run.

In: the tensors of a module, a state dict, Megatron's model chunks, or a finished map. Out: shards with their regions,
residual canonical tensors, and dropped local tensors, each with a reason. A tensor outside the layout is dropped only
if it is the memory of a layout tensor (a tied head), if the framework's own export leaves it out, or if `ignore` says
so. A canonical tensor that an export could write, but this rank cannot project, is residual. Everything else is noted
in `LayoutMismatches`, and becomes one error.
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

EXTRA = (
    "_extra_state"  #: how names end of what torch modules keep beside weights (Transformer Engine: scales, as bytes)
)


@dataclass(slots=True)
class AttributionResult:
    """Attributes:
    shards: the rank's, in the order of its tensors.
    residual: canonical names, with reasons.
    dropped: local names, with reasons.
    tied: local names that were dropped because they are the memory of another tensor, with that one's name.
    skipped: local names that were dropped for all later steps too.
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
        """Drop a tensor for this step and all later ones."""
        self.dropped[name] = why
        self.skipped.add(name)


class Attribution:
    """Attributes the tensors of a module or a state dict. One object is used once, for one rank."""

    def __init__(
        self, layout: Layout, mismatches: LayoutMismatches, *, conversion: Conversion | None, copies: Copies
    ) -> None:
        self._layout, self._mismatches, self._copies = layout, mismatches, copies
        self._conversion = conversion
        opaque = {name: why for name, why in conversion.opaque.items() if name in layout} if conversion else {}
        self._computed_with = (
            {source for name in opaque for source in conversion.sources.get(name, ())} if conversion else set()
        )
        self._found = AttributionResult(residual=opaque)

    def of(self, tensors: Mapping[str, Any]) -> AttributionResult:
        """Attribute all tensors (DTensors as such). Mismatches are noted, not raised."""
        self._check_shapes()
        extras = [name for name, tensor in tensors.items() if not self._take(name, tensor)]
        known = {memory(local(tensors[shard.parameter])): shard.parameter for shard in self._found.shards}
        for name in extras:
            self._judge_extra(name, tensors[name], known)
        return self._found

    def _check_shapes(self) -> None:
        """Judge the shapes of tensors that the export writes under names of the layout."""
        for name, (_, shape) in self._conversion.tensors.items() if self._conversion else ():
            if name in self._layout:
                self._mismatches.judge_shape(name, shape, expected=self._layout[self._layout.index(name)].shape)

    def _targets(self, name: str, tensor: Any) -> Sequence[Region] | None:
        """The canonical regions of a whole tensor; None if the conversion does not know a tensor of this name."""
        if self._conversion is not None:
            return self._conversion.regions.get(name)
        return whole(name, tuple(tensor.shape)) or [Region(name, (), 0, (), 0, ())]

    def _take(self, name: str, tensor: Any) -> bool:
        """Attribute or drop one tensor; False if it is extra, to be judged when all others are known."""
        if not is_tensor(tensor):
            self._take_value(name, tensor)
            return True
        if name.endswith(EXTRA) and name not in self._layout:
            self._found.drop(name, "kept beside the weights")
            return True
        targets = self._targets(name, tensor)
        if targets is None:
            return False
        canonical = dict.fromkeys(region.name for region in targets)
        inside = [target for target in canonical if target in self._layout]
        if not targets:
            if name not in self._computed_with:
                self._found.drop(name, "the export leaves it out")
            return True
        if not inside:
            return False
        for target in canonical:
            if target not in self._layout and not self._mismatches.ignores(target):
                self._mismatches.note("added", target)
        self._bind(name, tensor, targets=targets, inside=inside)
        return True

    def _take_value(self, name: str, value: Any) -> None:
        if name.endswith(EXTRA) or self._mismatches.ignores(name):
            self._found.drop(name, f"a {type(value).__name__}, not a tensor")
        else:
            self._mismatches.note("not tensors", f"{name} (a {type(value).__name__})")

    def _bind(self, name: str, tensor: Any, *, targets: Sequence[Region], inside: list[str]) -> None:
        if self._conversion is None and not self._mismatches.judge_shape(
            name, tensor.shape, expected=self._layout[self._layout.index(name)].shape
        ):
            return
        mine = local(tensor)
        if why := unreadable(mine):
            self._mismatches.note("without values here", f"{name} ({why})")
        elif why := encoded(mine) or self._bind_readable(name, tensor, targets=targets, inside=inside):
            self._found.residual |= dict.fromkeys(inside, why)

    def _bind_readable(self, name: str, tensor: Any, *, targets: Sequence[Region], inside: list[str]) -> str:
        """Add its shards. Returns why the tensor can only be exported; "" if it was attributed or a mismatch noted."""
        try:
            dtype, here = dtype_of(name, tensor), None
        except Incompatible as error:
            self._mismatches.note("retyped", error.message)
            return ""
        if not self._mismatches.judge_dtype(name, dtype, targets=inside):
            return ""
        try:
            here = local_part(name, tensor)
        except Incompatible as error:
            return error.message
        kept = {name: [region for region in targets if region.name in self._layout]}
        regions = owned(chain(here.regions, kept), *self._copies.of(here, tensor))
        self._found.shards += shards_of_regions(name, here.shape, dtype, regions, self._layout)
        return ""

    def _judge_extra(self, name: str, tensor: Any, known: Mapping[tuple[object, ...], str]) -> None:
        """Drop an extra tensor, or note a mismatch under the names that it would be exported by."""
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
            for canonical in exported:
                self._mismatches.note("added", canonical)


def of_chunks(chunks: Any, megatron: Megatron, *, layout: Layout, mismatches: LayoutMismatches) -> AttributionResult:
    """Attribute a Megatron rank's parameters by closed forms.

    A parameter of which there is no closed form is a mismatch, unless a residual tensor may be made of it.
    """
    seen = shards_of(chunks, megatron.architecture, megatron.grid, megatron.rank)
    found = AttributionResult(residual=dict(seen.map.residual))
    predicted = {spec.name: spec for spec in megatron_model.layout(megatron.architecture)}
    for shard in seen.map.shards:
        found.shards += _as_published(shard, layout, found)
    for name in {region.name for shard in seen.map.shards for region in shard.regions}:
        if name not in layout and not mismatches.ignores(name):
            mismatches.note("added", name)
    for name, spec in predicted.items():
        if name in layout:
            mismatches.judge_shape(name, spec.shape, expected=layout[layout.index(name)].shape, by="the architecture")
    for name, shape in seen.unknown.items():
        if mismatches.ignores(name):
            found.drop(name, "ignored")
        elif found.residual:
            found.drop(name, f"there is no closed form for it; {len(found.residual)} tensors are residual")
        else:
            mismatches.note("added", f"{name} {list(shape)}")
    found.residual = {name: why for name, why in found.residual.items() if name in layout}
    return found


def _as_published(shard: Shard, layout: Layout, found: AttributionResult) -> list[Shard]:
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


def of_map(
    mapped: Map, tensors: Mapping[str, Any], *, layout: Layout, mismatches: LayoutMismatches
) -> AttributionResult:
    """Attribute by a finished map: its tensors must be as it describes them, its regions inside them and the layout."""
    found = AttributionResult(residual=dict(mapped.residual))
    for name in tensors.keys() - {shard.parameter for shard in mapped.shards}:
        found.drop(name, "the map does not name it")
    for shard in mapped.shards:
        name, tensor = shard.parameter, tensors.get(shard.parameter)
        if tensor is None:
            mismatches.note("missing", name)
            continue
        mine = local(tensor)
        dtype, shape = dtype_of(name, mine), tuple(mine.shape)
        if (dtype, shape) != (shard.dtype, shard.shape):
            expected = f"{shard.dtype} {list(shard.shape)}"
            mismatches.note("not as mapped", f"{name} (is {dtype} {list(shape)}, should be {expected})")
        if why := unreadable(mine):
            mismatches.note("without values here", f"{name} ({why})")
        for region in shard.regions:
            if region.name not in layout:
                mismatches.note("added", region.name)
            elif region.dst_last >= layout[layout.index(region.name)].elements or region.src_last >= mine.numel():
                mismatches.note("not as mapped", f"{name} ({region} reaches beyond it, or beyond its canonical tensor)")
        found.shards.append(shard)
    return found
