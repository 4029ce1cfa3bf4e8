"""A trial of an export on small synthetic tensors: one parameter, and those that are exported together with it.

Three tests, each of which returns "" or what is wrong: numbered elements come out where the trace says; the value
functions treat special values as the export does; a patch of a 1 % edit gives what exporting the edited tensor gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from dcr_daemon.canonical.compose import chain
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.canonical.region import Region, box, indices, whole, wire_pieces
from dcr_daemon.projection.probes.synthetic import DIGIT, digits, edited, numbered, random_bits, same, special
from dcr_daemon.projection.region_map import Shard
from dcr_daemon.projection.sharding.dtensor import cuts_of
from dcr_daemon.projection.sharding.intervals import shard
from dcr_daemon.projection.tracing import FOREIGN, Conversion, trace
from dcr_daemon.projection.values import Bits, Value, apply, between, dtype_of, torch_dtype

EDITED = 100  #: the patch test edits one element in this many


@dataclass(frozen=True)
class ExportTrial:
    """Attributes:
    name: of the parameter.
    tensors: the real ones by name; only dtypes and placements are looked at.
    shards: of the parameter, for its value functions.
    export: of a table of whole tensors.
    shapes: of the stand-ins, by name.
    """

    name: str
    tensors: Mapping[str, Any]
    shards: Sequence[Shard]
    layout: Layout
    export: Callable[[dict[str, Any]], Mapping[str, Any]]
    shapes: Mapping[str, tuple[int, ...]]

    def fault(self) -> str:
        """The first fault found, "" if there is none. Exceptions of the export propagate."""
        return self.numbers() or self.values() or self.edit()

    @cached_property
    def _dtypes(self) -> dict[str, Any]:
        return {source: self.tensors[source].dtype for source in self.shapes}

    @cached_property
    def _traced(self) -> Conversion:
        on_meta = {s: torch.empty(shape, dtype=self._dtypes[s], device="meta") for s, shape in self.shapes.items()}
        return trace(self.export, on_meta)

    def _moved(self) -> list[str]:
        return [name for name in self._traced.tensors if name not in self._traced.opaque]

    def _published(self) -> list[str]:
        return [name for name in self._moved() if name in self.layout]

    def _pieces(self, target: str) -> list[tuple[str, Any, Any]]:
        """Source, and places in it and in the target, of all that is moved to `target`."""
        return [
            (source, *map(torch.from_numpy, indices(region)))
            for source, regions in self._traced.regions.items()
            for region in regions
            if region.name == target
        ]

    def numbers(self) -> str:
        """Numbered elements come out where the trace says."""
        given, firsts = numbered(self.shapes)
        exported = self._numbers_out(given)
        for name in self._moved():
            shape = self._traced.tensors[name][1]
            if name not in exported or tuple(exported[name].shape) != shape:
                return f"the export of numbered elements gives no {name} of {shape}"
            expected = torch.full((exported[name].numel(),), -1)
            for source, src, dst in self._pieces(name):
                expected[dst] = src + firsts[source]
            if not torch.equal(exported[name].reshape(-1), expected):
                return "the export puts elements elsewhere than the conversion says"
        return ""

    def _numbers_out(self, given: dict[str, Any]) -> dict[str, Any]:
        """The export of numbers: as they are, or digit by digit where it takes nothing but the parameters' dtypes."""
        try:
            exported = dict(self.export(dict(given)))
        except FOREIGN:
            exported = {}
        if exported and all(exported[name].dtype == torch.int64 for name in self._moved() if name in exported):
            return exported
        tables = digits(given, self._dtypes)
        if not tables:
            raise ValueError("it takes no whole numbers")
        total: dict[str, Any] = {}
        for place, table in enumerate(tables):
            for name, tensor in self.export(table).items():
                digit = tensor.to(torch.int64) * DIGIT**place
                total[name] = total[name] + digit if name in total else digit
        return total

    def values(self) -> str:
        """The value functions give what the export and torch's own cast give, bit for bit."""
        given = {s: special(shape, self._dtypes[s]) for s, shape in self.shapes.items()}
        exported = self._exported(given)
        for name in self._published():
            for source, src, dst in self._pieces(name):
                value = self._value(source, name)
                ours = apply(value, given[source].reshape(-1)[src])
                theirs = exported[name].reshape(-1)[dst]
                if ours.dtype != theirs.dtype or not same(ours, theirs, exact=value == Bits()).all():
                    return f"{value} of special values is not what the export gives"
        return ""

    def edit(self) -> str:
        """An edit of 1 % of what this rank holds, patched by its boxes, makes the export's old result its new one."""
        here = self._here()
        places = [tuple(map(torch.from_numpy, indices(region))) for region in here]
        size = sum(src.numel() for src, _ in places)
        if not size:
            return ""
        before = {s: random_bits(shape, self._dtypes[s], seed=1) for s, shape in self.shapes.items()}
        old = torch.empty(size, dtype=self._dtypes[self.name])
        for src, dst in places:
            old[src] = before[self.name].reshape(-1)[dst]
        chosen = torch.randperm(size, generator=torch.Generator().manual_seed(2))[: -(-size // EDITED)]
        new = edited(old, chosen, seed=3)
        after = before | {self.name: before[self.name].clone()}
        for src, dst in places:
            after[self.name].reshape(-1)[dst] = new[src]
        patched = {name: tensor.clone().reshape(-1) for name, tensor in self._exported(before).items()}
        self._patch(patched, here, old=old, new=new)
        exact = all(self._value(self.name, name) == Bits() for name in patched)
        for name, tensor in self._exported(after).items():
            if not same(patched[name], tensor, exact=exact).all():
                return "a patch of a 1 % edit is not the export of the edited tensor"
        return ""

    def _here(self) -> list[Region]:
        """What this rank would hold of the parameter's stand-in."""
        tensor, shape = self.tensors[self.name], self.shapes[self.name]
        if not hasattr(tensor, "placements"):
            return whole(self.name, shape)
        if tensor.device_mesh.get_coordinate() is None:
            return []
        return shard(self.name, shape, cuts_of(self.name, tensor))

    def _patch(self, canonical: Mapping[str, Any], here: list[Region], *, old: Any, new: Any) -> None:
        """Write what an edit of the local tensor changes into flat canonical tensors, box by box as a chunk says it."""
        for region in chain(here, {self.name: self._traced.regions[self.name]}):
            if region.name not in canonical:
                continue
            value = self._value(self.name, region.name)
            for piece in wire_pieces(region):
                src = torch.from_numpy(indices(piece)[0])
                was, becomes = apply(value, old[src]), apply(value, new[src])
                hits = torch.nonzero(~same(was, becomes, exact=True)).reshape(-1)
                canonical[region.name][torch.from_numpy(box(piece).canonical(hits.numpy()))] = becomes[hits]

    def _exported(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The export's tensors that the checkpoint has, in its dtypes. An export may write to what it is given."""
        exported = self.export({source: tensor.clone() for source, tensor in given.items()})
        return {
            name: exported[name].to(torch_dtype(self.layout[self.layout.index(name)].dtype))
            for name in self._published()
        }

    def _value(self, source: str, target: str) -> Value:
        """How elements of `source` become those of `target`: as the map says of this parameter, else a plain copy."""
        canonical = self.layout[self.layout.index(target)].dtype
        if source == self.name:
            for one in self.shards:
                if one.regions and canonical == (one.dtype if isinstance(one.value, Bits) else one.value.canonical):
                    return one.value
        return between(target, dtype_of(source, self.tensors[source]), canonical)
