"""Residual tensors, which no rank can project: the framework's own export constructs them whole.

Only the tensors that the verdict names are constructed, one group at a time, and each is kept by one rank, its owner
(gate.py). The export may be a collective, so every rank runs it over the same names in the same order, and to
its end: a rank that finds a fault, or whose caller gives up, still takes part until the others are done.
There are two exporters:

    Hook     the user's function `export(names)`: Megatron-Bridge's export, a loop over `full_tensor()`, anything
    Gather   our own, for DTensors and plain tensors: gathers just the parameters that a residual tensor is made of, and
             runs the framework's conversion on these alone
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Protocol

import torch

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.agreement.declaration import Export
from dcr_daemon.projection.agreement.gate import Verdict
from dcr_daemon.projection.tracing import Conversion, Convert
from dcr_daemon.projection.values import Cast, apply, castable, dtype_names
from dcr_daemon.wording import shorten

ExportHook = Callable[[Sequence[str]], Iterable[tuple[str, Any]]]


class Exporter(Protocol):
    """Constructs whole canonical tensors, on all ranks of a group together."""

    @property
    def kind(self) -> Export:
        """How it is declared (declaration.py)."""

    def can_build(self, name: str) -> bool:
        """Whether this rank gets the whole tensor when it takes part."""

    def partners(self, name: str) -> Collection[int]:
        """The ranks without which constructing a tensor never ends on this one; none for a hook, which all call."""

    def build(self, names: Sequence[str], wanted: Collection[str]) -> Generator[tuple[str, Any], None, None]:
        """Construct `names`; gives those of `wanted` (torch, detached). To be run to its end on every rank.

        Raises:
            Incompatible: the framework's result is not what was asked for; all faults in one error, at the end.
        """


class Residual:
    """The residual tensors of one group, as one of its ranks sees them.

    Args:
        exporter: of the kind that the verdict names.
    """

    def __init__(self, verdict: Verdict, layout: Layout, *, rank: int, exporter: Exporter) -> None:
        self.names = tuple(verdict.residual)
        self.owned = frozenset(verdict.owned(rank))
        self.overwrites = frozenset(layout.index(name) for name in verdict.overwrites)  #: layout indices
        self._layout, self._exporter = layout, exporter

    def iterate(self, names: Iterable[str] | None = None) -> Generator[tuple[int, Any], None, None]:
        """Layout index and tensor (torch, canonical dtype and shape, contiguous, detached) of what this rank owns.

        A tensor may be the framework's memory, valid until the next one is asked for. Ranks that own nothing get
        nothing, and must iterate all the same. A caller that may stop early uses `contextlib.closing`, which runs the
        export to its end.

        Args:
            names: some of the residual tensors, the same on every rank; all of them by default.

        Raises:
            Incompatible: see `Exporter.build`.
        """
        chosen = self.names if names is None else _chosen(self.names, set(names))
        with closing(self._exporter.build(chosen, self.owned)) as built:
            for name, tensor in built:
                index = self._layout.index(name)
                yield index, apply(Cast(self._layout[index].dtype), tensor).contiguous()


def _chosen(residual: Sequence[str], names: set[str]) -> tuple[str, ...]:
    if unexpected := sorted(names.difference(residual)):
        raise Incompatible(f"not residual by the verdict: {shorten(unexpected)}")
    return tuple(name for name in residual if name in names)


class Hook:
    """Drives the user's `export(names)`: called alike on every rank, it gives whole tensors in the order of `names`."""

    kind: Export = "hook"

    def __init__(self, export: ExportHook, layout: Layout) -> None:
        self._export, self._layout = export, layout

    def can_build(self, name: str) -> bool:
        return True

    def partners(self, name: str) -> Collection[int]:
        return ()

    def build(self, names: Sequence[str], wanted: Collection[str]) -> Generator[tuple[str, Any], None, None]:
        if not names:
            return
        given = iter(self._export(tuple(names)))
        faults, due = _Faults(self._layout), iter(names)
        ours = True  # whether it is not the export that fails: then the other ranks still need it
        try:
            while True:
                ours = False
                item = next(given, _END)
                ours = True
                if item is _END:
                    break
                name, tensor = _pair(item)
                if not faults.expects(name, due):
                    continue
                ours = False
                whole = _whole(tensor)
                ours = True
                if faults.fits(name, whole) and name in wanted and not faults.found:
                    yield name, whole
                del item, tensor, whole
        finally:
            if ours:
                for _ in given:
                    pass
        faults.absent(due)
        faults.check("the residual export")


_END = object()


def _pair(item: Any) -> tuple[str, Any]:
    """An item of the hook as name and tensor; anything else gets a name that no tensor has."""
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], torch.Tensor):
        return item
    return f"a {type(item).__name__} and no pair of name and tensor", None


class Gather:
    """Gathers the parameters that residual tensors are made of, and runs the framework's own conversion on them.

    Args:
        tensors: gives this step's parameters by local name: DTensors, and plain tensors that are whole.
        layout: of the stream.
        conversion: what the framework's export does (tracing.py); none where names are canonical ones.
        convert: that export itself, over a table of whole tensors; none likewise.
    """

    kind: Export = "own"

    def __init__(
        self,
        tensors: Callable[[], Mapping[str, Any]],
        layout: Layout,
        *,
        conversion: Conversion | None = None,
        convert: Convert | None = None,
    ) -> None:
        self._tensors, self._layout = tensors, layout
        self._conversion, self._convert = conversion, convert

    def can_build(self, name: str) -> bool:
        sources, tensors = self._sources(name), self._tensors()
        return bool(sources) and all(source in tensors and _reachable(tensors[source]) for source in sources)

    def partners(self, name: str) -> Collection[int]:
        tensors = self._tensors()
        return {rank for source in self._sources(name) if source in tensors for rank in _members(tensors[source])}

    def _sources(self, name: str) -> tuple[str, ...]:
        if self._conversion is None:
            return (name,)
        return self._conversion.sources.get(name, ()) if self._convert is not None else ()

    def build(self, names: Sequence[str], wanted: Collection[str]) -> Generator[tuple[str, Any], None, None]:
        tensors, faults = self._tensors(), _Faults(self._layout)
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in names:
            if self.can_build(name):
                groups.setdefault(self._sources(name), []).append(name)
        left = iter(groups.items())
        ours = True  # as in `Hook`
        try:
            for sources, of in left:
                ours = False
                gathered = {source: _whole(tensors[source]) for source in sources}
                ours = True
                mine = [name for name in of if name in wanted]
                exported = self._converted(gathered) if mine else {}
                del gathered
                for name in mine:
                    if name not in exported:
                        faults.note(f"{name} is not exported from {', '.join(sources)} alone")
                    elif faults.fits(name, exported[name]):
                        yield name, exported[name].detach()
                del exported
        finally:
            if ours:
                for sources, _ in left:
                    for source in sources:
                        _whole(tensors[source])
        faults.check("the framework's conversion")

    def _converted(self, gathered: dict[str, Any]) -> Mapping[str, Any]:
        return gathered if self._convert is None else self._convert(gathered)


def _reachable(tensor: Any) -> bool:
    """Whether this rank is one of those that gather the tensor."""
    mesh = getattr(tensor, "device_mesh", None)  # ZeRO-3 has a group, which every holder is in
    return mesh is None or mesh.get_coordinate() is not None


def _members(tensor: Any) -> Sequence[int]:
    """The ranks of `torch.distributed` that gather the tensor together; none where it is whole."""
    if (mesh := getattr(tensor, "device_mesh", None)) is not None:
        ranks: list[int] = mesh.mesh.flatten().tolist()
        return ranks
    if (group := getattr(tensor, "group", None)) is not None:
        return torch.distributed.get_process_group_ranks(group)
    return ()


def _whole(tensor: Any) -> Any:
    """The whole of a DTensor, by a collective of its mesh; a plain tensor is whole."""
    detached = tensor.detach()
    return detached.full_tensor() if hasattr(detached, "full_tensor") else detached


class _Faults:
    """The faults of an export, collected so that one error lists all of them."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._seen: set[str] = set()
        self._lost = False  # the order is lost: later tensors are not checked
        self.found: list[str] = []

    def note(self, text: str) -> None:
        self.found.append(text)

    def expects(self, name: str, due: Iterator[str]) -> bool:
        """Whether `name` is the next tensor that is due."""
        if self._lost:
            return False
        expected = next(due, None)
        if name == expected:
            self._seen.add(name)
            return True
        self._lost = True
        if name in self._seen:
            self.note(f"{name} a second time")
        else:
            self.note(f"{name} where {expected} is due" if expected else f"{name}, which was not asked for")
        return False

    def absent(self, due: Iterator[str]) -> None:
        """Note the tensors that are missing at the end, unless the order was lost before."""
        if not self._lost and (missing := list(due)):
            self.note(f"nothing for {shorten(missing)}")

    def fits(self, name: str, tensor: Any) -> bool:
        """Whether shape and dtype are the layout's; a dtype may also round or widen to it, as everywhere."""
        spec = self._layout[self._layout.index(name)]
        dtype = dtype_names().get(tensor.dtype, str(tensor.dtype))
        if tuple(tensor.shape) == spec.shape and castable(dtype, spec.dtype):
            return True
        self.note(f"{name} as {dtype} {tuple(tensor.shape)}, and the checkpoint has {_shown(spec)}")
        return False

    def check(self, what: str) -> None:
        if self.found:
            raise Incompatible(
                f"{what} does not give what the checkpoint has: {shorten(self.found, separator='; ')}",
                hint="an export gives exactly the tensors that it is asked for, whole, in that order, on every rank",
            )


def _shown(spec: TensorSpec) -> str:
    return f"{spec.dtype} {spec.shape}"
