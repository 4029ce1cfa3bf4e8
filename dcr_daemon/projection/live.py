"""What a trainer hands over on one rank → the map of that rank, bound to the tensors that it reads.

`live` is called once per run: it looks at names, shapes, placements and the framework's own conversion, and says what
this rank is the source of. `Live.rebind` is called at every step: it binds the tensors of that step to the same map, in
milliseconds, and refuses what is no longer laid out alike. Nothing here communicates, copies or gathers; whether the
maps of all ranks together are the source of everything exactly once is judged by the gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.projection.megatron.live import Megatron
from dcr_daemon.projection.plan import Map
from dcr_daemon.projection.tracing import Conversion

Signature = tuple[tuple[Any, ...], ...]  #: of every tensor handed over: name, local shape, dtype, placements, mesh


@dataclass(frozen=True, slots=True)
class Live:
    """Attributes:
    map: what this rank is the source of; `map.residual` names what it could not map, with reasons.
    tensors: the rank's own (detached torch tensors, never DTensors), by the names of the map's shards. A shard's local
        places count the elements of its tensor in row-major order, whatever its strides are.
    dropped: tensors that were handed over and are no part of the stream, with the reason; for the log.
    conversion: what the framework's export does to whole tensors; none where their names are canonical ones.
    """

    map: Map
    tensors: Mapping[str, Any]
    dropped: Mapping[str, str] = field(default_factory=dict)
    conversion: Conversion | None = None

    @property
    def signature(self) -> Signature:
        """Equal exactly if the map would be the same. Hashable."""
        raise NotImplementedError

    def same(self, weights: Any) -> bool:
        """Whether `rebind` would take these weights."""
        raise NotImplementedError

    def rebind(self, weights: Any) -> Live:
        """The same map over the tensors that `weights` has now.

        Raises:
            Incompatible: they are not laid out as those that the map was made of; the message names what changed.
        """
        raise NotImplementedError

    def without(self, residual: Mapping[str, str]) -> Live:
        """The same, but for canonical tensors that the gate made residual: this rank is no source of them any more."""
        return replace(self, map=self.map.without(residual))


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
        replica: number of this rank, and how many, among the ranks that hold alike what the mesh of a DTensor does not
            count. By default plain tensors are alike on every rank, and the mesh of a DTensor counts all of its copies.
        ignore: globs of names outside the layout to drop.
        conversion: what an export does to whole tensors, for layouts of one's own; transformers models bring theirs.
        adapter: torchtitan's state-dict adapter, for a state dict of its names.
        megatron: architecture and grid of a Megatron model.
        mapped: the finished map, for what nothing here understands; `weights` are then local tensors by parameter.

    Raises:
        Incompatible: names, shapes or dtypes that have no place in the layout, all of them in one error.
        Misuse: arguments that exclude each other, or weights of no known kind.
    """
    raise NotImplementedError
