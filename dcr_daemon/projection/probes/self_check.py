"""The checks of a rank's own map before it is declared: against the placements, and against the real export.

Nothing communicates, no weight is read or changed, and nothing as large as a tensor of the model is allocated. For
every parameter at full size, with regions alone:

    map       what the map says is what placements and conversion say

Once for all parameters of a form (equal names but for numbers, equal shape, placement and regions), so that a model of
94 layers costs as much as one layer; at full size by tracing the export again, then on synthetic tensors
(export_trial.py):

    trace     the export of these parameters alone moves elements as the conversion says
    numbers   the export of numbered elements puts each where the conversion says
    values    the value functions treat zeros of both signs, denormals, infinities and NaNs as the export does
    edit      a random 1 % edit, projected, compared and patched into the export's result, is the export of the edited

What fails is residual, by name. device_mesh.py tests whether torch itself places elements so, and export_check.py tests
exports that give live weights only.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcr_daemon import runtime
from dcr_daemon.canonical.compose import chain, compose
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.canonical.region import Region, invert, normalise, whole
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.probes.export_trial import ExportTrial
from dcr_daemon.projection.probes.synthetic import shrunk
from dcr_daemon.projection.region_map import Map, Shard
from dcr_daemon.projection.sharding.dtensor import local_part
from dcr_daemon.projection.tracing import FOREIGN, Conversion, Convert, trace

CAP = 16 << 20  #: bytes that a probe may have allocated at a time
_COPIES = 40  #: bytes per element of a stand-in: its numbers, their export, what is expected, and the pairs


@dataclass(frozen=True, slots=True)
class Probed:
    """Attributes:
    residual: canonical names that failed, with the reason; to be declared.
    checked: parameters (tensors, for an export) that were covered by a probe.
    forms: how many probes that took.
    seconds: of this rank.
    """

    residual: Mapping[str, str]
    checked: int
    forms: int
    seconds: float


def numberless(name: str) -> str:
    """A name without its numbers: equal for the same parameter of all layers and experts."""
    return re.sub(r"\d+", "*", name)


def probe(
    tensors: Mapping[str, Any],
    mapped: Map,
    layout: Layout,
    *,
    conversion: Conversion | None = None,
    convert: Convert | None = None,
    cap: int = CAP,
) -> Probed:
    """Probe this rank's map.

    Args:
        tensors: DTensors and whole tensors by the names of the map's shards; only shapes, dtypes and placements are
            looked at. Shards of others (closed forms, a map of one's own) are not judged here.
        conversion: what the export does to whole tensors; none where names are canonical ones.
        convert: that export itself, for any part of the tensors; without it, the conversion is not tested.
        cap: bytes that may be allocated at a time.
    """
    started = runtime.monotonic()
    parameters: dict[str, list[Shard]] = defaultdict(list)
    for one in mapped.shards:
        if one.parameter in tensors and _judged(
            one.parameter, tensors[one.parameter], layout=layout, conversion=conversion
        ):
            parameters[one.parameter].append(one)
    model = _Model(tensors, layout, conversion, convert, cap // _COPIES)
    faults = model.misplaced(parameters)
    forms: dict[Hashable, list[str]] = defaultdict(list)
    for name, shards in parameters.items():
        if name not in faults:
            forms[_form(name, tensors[name], shards=shards, targets=model.targets(name))].append(name)
    for members in forms.values():
        if why := model.trial_fault(members[0], parameters[members[0]]):
            faults |= dict.fromkeys(members, why)
    residual = {target: why for name, why in faults.items() for target in model.fed(name, parameters[name])}
    return Probed(residual, len(parameters), len(forms), runtime.monotonic() - started)


def _judged(name: str, tensor: Any, *, layout: Layout, conversion: Conversion | None) -> bool:
    if conversion is not None:
        return name in conversion.regions
    return name in layout and tuple(tensor.shape) == layout[layout.index(name)].shape


def _form(name: str, tensor: Any, *, shards: Sequence[Shard], targets: Sequence[Region]) -> Hashable:
    """Equal for parameters that one trial covers."""
    regions = tuple((r.shape, r.src, r.src_strides, r.dst, r.dst_strides) for r in targets)
    mesh, values = getattr(tensor, "device_mesh", None), tuple(sorted(str(one.value) for one in shards))
    placed = str(getattr(tensor, "placements", "")), tuple(mesh.shape) if mesh is not None else ()
    return numberless(name), tuple(tensor.shape), str(tensor.dtype), placed, values, regions


def within(region: Region, truth: Sequence[Region]) -> bool:
    """Whether each pair of `region` is one of `truth`'s, however either is cut into boxes."""
    if region in truth:
        return True
    agreed = 0
    for one in truth:
        if one.name == region.name and one.src <= region.src_last and region.src <= one.src_last:
            for pair in compose(invert(region), one):
                if pair.src == pair.dst and all(n == 1 or a == b for n, a, b in pair.axes):
                    agreed += pair.elements
    return agreed == region.elements


def _all_within(shards: Sequence[Shard], truth: Iterable[Region]) -> bool:
    by_name: dict[str, list[Region]] = defaultdict(list)
    for one in truth:
        by_name[one.name].append(one)
    return all(within(region, by_name.get(region.name, ())) for one in shards for region in one.regions)


@dataclass(frozen=True)
class _Model:
    """What is to be probed, whole."""

    tensors: Mapping[str, Any]
    layout: Layout
    conversion: Conversion | None
    convert: Convert | None
    elements: int  #: of stand-ins together

    def misplaced(self, parameters: Mapping[str, Sequence[Shard]]) -> dict[str, str]:
        """Parameters whose regions are not what placements, conversion and export say at full size, with reasons."""
        faults = {}
        for name, shards in parameters.items():
            try:
                truth = chain(local_part(name, self.tensors[name]).regions, {name: self.targets(name)})
            except Incompatible as error:
                faults[name] = error.message
                continue
            if not _all_within(shards, truth):
                faults[name] = "its map is not what its placement and the export say"
        return faults

    def targets(self, name: str) -> Sequence[Region]:
        """Where a whole parameter goes."""
        if self.conversion is None:
            return whole(name, tuple(self.tensors[name].shape))
        return self.conversion.regions[name]

    def fed(self, name: str, shards: Sequence[Shard]) -> list[str]:
        """Canonical tensors that a parameter is a source of, on this rank and on others."""
        names = dict.fromkeys(region.name for one in shards for region in one.regions)
        names |= dict.fromkeys(region.name for region in self.targets(name))
        return [target for target in names if target in self.layout]

    def trial_fault(self, name: str, shards: Sequence[Shard]) -> str:
        """What is wrong with the export of one parameter, by a trial on synthetic tensors; "" if nothing is."""
        if self.conversion is not None and self.convert is None:
            return ""
        sources = self._sources(name)
        if absent := [source for source in sources if source not in self.tensors]:
            return f"it is exported together with {', '.join(absent)}, which this rank does not have"
        export = self.convert or dict
        try:
            again = trace(export, {source: self.tensors[source] for source in sources}).regions[name]
        except FOREIGN as error:
            return f"its export does not run on {', '.join(sources)} alone: {error}"
        if set(map(normalise, again)) != set(map(normalise, self.targets(name))):
            return "the conversion is not what the export does"
        real = {source: tuple(self.tensors[source].shape) for source in sources}
        why = "no stand-in is small enough"
        for shapes in shrunk(real, self.elements):
            try:
                return ExportTrial(name, self.tensors, shards, self.layout, export, shapes).fault()
            except FOREIGN as error:
                why = str(error)
        return f"its export does not run on small stand-ins: {why}"

    def _sources(self, name: str) -> tuple[str, ...]:
        """The parameters that are exported with this one: all that its canonical tensors are made of."""
        if self.conversion is None:
            return (name,)
        targets = dict.fromkeys(region.name for region in self.targets(name))
        return tuple(sorted({name, *(s for target in targets for s in self.conversion.sources.get(target, ()))}))
