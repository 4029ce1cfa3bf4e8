"""A rank's weights, in any form that a trainer has, as the rank's map bound to the tensors that it reads.

`live` is called once per run: it looks at names, shapes, placements and the framework's own conversion, and says what
this rank is the source of. `Live.rebind` is called at every step: it binds the tensors of that step to the same map, in
milliseconds, and refuses tensors whose shapes, dtypes or placements changed. Nothing here communicates, copies or
gathers; whether the maps of all ranks together cover every element exactly once is decided by the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.canonical.region import Region
from dcr_daemon.errors import Incompatible, UsageError
from dcr_daemon.projection.binding.attribution import Attribution, of_chunks, of_map
from dcr_daemon.projection.frameworks import transformers_v5
from dcr_daemon.projection.frameworks.megatron.live import Megatron, named_chunks
from dcr_daemon.projection.frameworks.torchtitan import adapter_conversion
from dcr_daemon.projection.mismatches import LayoutMismatches
from dcr_daemon.projection.region_map import Map
from dcr_daemon.projection.sharding.copies import Copies
from dcr_daemon.projection.sharding.local import Signature, changes, is_tensor, local, memory, signature
from dcr_daemon.projection.sharding.named import COMPILED, is_module, shared_prefix, table, unwrapped
from dcr_daemon.projection.tracing import FOREIGN, Conversion, Convert
from dcr_daemon.wording import shorten


@dataclass(frozen=True, slots=True)
class InputAdapter:
    """Turns the weights of a step into named tensors, as it was done when the map was made.

    Attributes:
        chunks: number of Megatron's model chunks; 0 for modules and state dicts.
        prefix: of all names of the weights; the map's names are without it.
        skipped: names (without the prefix) that are never part of the stream.
    """

    chunks: int = 0
    prefix: str = ""
    skipped: frozenset[str] = frozenset()

    def tensors(self, weights: Any) -> dict[str, Any]:
        """Tensors and DTensors by the names of the map."""
        entries = named_chunks(weights, self.chunks) if self.chunks else _table(weights)
        bare = ((name.removeprefix(self.prefix), value) for name, value in entries.items())
        return {name: value for name, value in bare if name not in self.skipped}


@dataclass(frozen=True, slots=True)
class Live:
    """Attributes:
    map: what this rank is the source of; `map.residual` names what it could not map, with reasons.
    tensors: the rank's own (detached torch tensors, never DTensors), by the names of the map's shards. A shard's local
        places count the elements of its tensor in row-major order, whatever its strides are.
    dropped: input tensors that are no part of the stream, with the reason; for the log.
    inputs: the input tensors (DTensors as such) that are part of the stream, by local name; residual tensors are
        gathered from these.
    conversion: what the framework's export does to whole tensors; none where their names are canonical ones.
    convert: that export itself, over a table of some whole tensors; none likewise, or if it is not known.
    signature: shapes, dtypes and placements of all inputs; equal exactly if the map would be the same. Hashable.
    tied: dropped tensors that are the memory of another, with the other's name.
    """

    map: Map
    tensors: Mapping[str, Any]
    dropped: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    conversion: Conversion | None = None
    convert: Convert | None = None
    signature: Signature = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    input_adapter: InputAdapter = InputAdapter()

    def same(self, weights: Any) -> bool:
        """Whether `rebind` would take these weights."""
        return not self._changes(self.input_adapter.tensors(weights))

    def rebind(self, weights: Any) -> Live:
        """The same map over the tensors that `weights` has now.

        Raises:
            Incompatible: they are not laid out as those that the map was made of; the message names what changed.
        """
        tensors = self.input_adapter.tensors(weights)
        if changed := self._changes(tensors):
            raise Incompatible(
                f"the weights are not laid out as when publishing began: {shorten(changed)}",
                hint="names, dtypes and placements stay through a run; after a change of the mesh make a new Publisher",
            )
        return replace(self, tensors={name: local(tensors[name]) for name in self.tensors}, inputs=tensors)

    def without(self, residual: Mapping[str, str]) -> Live:
        """The same, but for canonical tensors that the gate made residual: this rank is no source of them any more."""
        return replace(self, map=self.map.without(residual))

    def with_followers(self, follows: Mapping[str, str]) -> Live:
        """The same, with canonical tensors that follow others (`Map.with_followers`)."""
        return replace(self, map=self.map.with_followers(follows)) if follows else self

    def _changes(self, tensors: Mapping[str, Any]) -> list[str]:
        now = signature(tensors)
        if now != self.signature and (changed := changes(self.signature, now)):
            return changed
        return [
            f"{name} is no longer the memory of {other}"
            for name, other in self.tied.items()
            if memory(local(tensors[name])) != memory(local(tensors[other]))
        ]


def live(
    weights: Any,
    layout: Layout,
    *,
    rank: int,
    world: int,
    replica: tuple[int, int] | None = None,
    ignore: Sequence[str] = (),
    conversion: Conversion | None = None,
    adapter: Any = None,
    megatron: Megatron | None = None,
    mapped: Map | None = None,
) -> Live:
    """Map what this rank holds.

    Args:
        weights: a module (plain, FSDP2, tensor parallel, compiled, DDP), a transformers model, a state dict, or
            Megatron's list of model chunks.
        rank, world: of this process among those that publish together.
        replica: number of this rank, and how many, among the ranks that hold alike what the widest mesh among the
            tensors does not count. By default it counts all copies; without any mesh, every rank holds the same.
        ignore: globs of names outside the layout to drop.
        conversion: what an export does to whole tensors, for a user's own format; transformers models bring theirs.
        adapter: torchtitan's state-dict adapter, for a state dict of its names.
        megatron: architecture and grid of a Megatron model.
        mapped: the finished map, for weights of an unknown kind; `weights` are then local tensors by parameter.

    Raises:
        Incompatible: names, shapes or dtypes that have no place in the layout, all of them in one error.
        UsageError: arguments that exclude each other, or weights of no known kind.
    """
    ways = {"conversion": conversion, "adapter": adapter, "megatron": megatron, "mapped": mapped}
    if len(chosen := [name for name, way in ways.items() if way is not None]) > 1:
        raise UsageError(f"{' and '.join(chosen)} exclude each other", hint="give the one that describes these weights")
    instead = "give the transformers model itself, whose class knows how it saves, or Trainer(conversion=...)"
    mismatches = LayoutMismatches(layout, ignore, instead=instead)
    convert: Convert | None = None
    if megatron is not None:
        input_adapter = InputAdapter(chunks=megatron.grid.vpp)
        found = of_chunks(weights, megatron, layout=layout, mismatches=mismatches)
    elif mapped is not None:
        input_adapter = InputAdapter()
        found = of_map(mapped, input_adapter.tensors(weights), layout=layout, mismatches=mismatches)
    else:
        input_adapter, tensors, conversion, convert = _converted(
            weights, layout, mismatches=mismatches, conversion=conversion, adapter=adapter
        )
        attribution = Attribution(
            layout,
            mismatches,
            conversion=conversion,
            copies=Copies(rank, world, replica=replica, tensors=tensors.values()),
        )
        found = attribution.of(tensors)
    mismatches.check(f"what rank {rank} of {world} holds")
    input_adapter = replace(input_adapter, skipped=frozenset(found.skipped))
    tensors = input_adapter.tensors(weights)
    made = found.map
    return Live(
        made,
        {shard.parameter: local(tensors[shard.parameter]) for shard in made.shards},
        found.dropped,
        tensors,
        conversion,
        convert,
        signature(tensors),
        found.tied,
        input_adapter,
    )


def _table(weights: Any) -> dict[str, Any]:
    if is_module(weights) or isinstance(weights, Mapping):
        return table(weights)
    raise UsageError(
        f"a {type(weights).__name__} was given as this rank's weights",
        hint="give a module or a state dict; a list of Megatron's model chunks goes with Trainer(megatron=...)",
    )


def _converted(
    weights: Any, layout: Layout, *, mismatches: LayoutMismatches, conversion: Conversion | None, adapter: Any
) -> tuple[InputAdapter, dict[str, Any], Conversion | None, Convert | None]:
    """All inputs by the names that their conversion knows, the conversion, and the export that it was traced from."""
    entries = _table(weights)
    counted = [name for name in entries if not mismatches.ignores(name)]
    model, at = _library_model(weights, counted)
    if conversion is not None:
        known: Container[str] = conversion.regions
    elif model is not None:
        known = {name.removeprefix(at) for name in counted}
    else:
        known = layout if adapter is None else entries
    input_adapter = InputAdapter(prefix=at or shared_prefix(counted, known))
    tensors = input_adapter.tensors(weights)
    whole = {name: tensor for name, tensor in tensors.items() if is_tensor(tensor)}
    if conversion is not None:
        return input_adapter, tensors, conversion, None
    if adapter is not None:
        return input_adapter, tensors, _followed(lambda: adapter_conversion(adapter, whole)), adapter.to_hf
    if model is None:
        return input_adapter, tensors, None, None
    traced = _followed(lambda: transformers_v5.conversion(model, whole))
    left_out: dict[str, list[Region]] = {
        name: [] for name in whole if name not in traced.regions
    }  # `_keys_to_ignore_on_save`
    return (
        input_adapter,
        tensors,
        replace(traced, regions={**traced.regions, **left_out}),
        transformers_v5.converter(model),
    )


def _followed(trace: Callable[[], Conversion]) -> Conversion:
    """An export followed on tensors without elements. It is third-party code, and may not accept them."""
    try:
        return trace()
    except FOREIGN as error:
        raise Incompatible(
            f"the framework's own export does not run on these tensors: {type(error).__name__}: {error}",
            hint="give what it does as Trainer(conversion=...), or the finished map as Trainer(mapped=...)",
        ) from error


def _library_model(weights: Any, names: list[str]) -> tuple[Any, str]:
    """The transformers model that all these names belong to, and what they begin with; none if there is none."""
    if not hasattr(weights, "named_modules"):
        return None, ""
    for name, module in unwrapped(weights).named_modules():
        if transformers_v5.is_model(module):
            at = f"{name.replace(COMPILED, '')}." if name else ""
            return (module, at) if all(one.startswith(at) for one in names) else (None, "")
    return None, ""
