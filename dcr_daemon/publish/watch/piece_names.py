"""Which pieces of a checkpoint make which canonical tensor: names, shapes, and whether nothing is missing or double.

The names are the layout's, or they are behind a prefix (`model.` of a state dict inside a state dict), or they are
those of the transformers library's own modules, whose conversion leads to the layout's. What lies beside the model
(another top-level key, optimizer states) is no part of it. What the checkpoint's own table says is judged like anything
else that others wrote: every element of every tensor must have exactly one piece, before one byte of weights is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from dcr_daemon.canonical.compose import chain
from dcr_daemon.canonical.coverage import exactly_once
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.canonical.region import Region, slab, whole
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.files.piece_map import Piece
from dcr_daemon.projection.frameworks.library import library
from dcr_daemon.projection.mismatches import MISMATCHES
from dcr_daemon.projection.sharding.named import plain
from dcr_daemon.wording import shorten

OPTIMIZERS = ("optim", "opt_state")  #: how the top-level keys of optimizer states begin, in all trainers that we know


@dataclass(frozen=True, slots=True)
class Part:
    """A piece's share of one canonical tensor: `region` leads from the piece's elements to the tensor's."""

    piece: Piece
    region: Region


@dataclass(frozen=True, slots=True)
class PiecedTensor:
    """One canonical tensor, or a stranger to the layout; `given` is its name and shape in the stream, and the dtype
    that its pieces have."""

    given: TensorSpec
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class PieceFit:
    """What a checkpoint's pieces are to the stream.

    Attributes:
        tensors: what is to be published, and strangers that may be second copies of it.
        lacks: what is still to come, if more files may come; empty if nothing is missing.
        refusal: why the checkpoint contradicts itself; empty if it does not.
        misfit: it is consistent, and not this stream's model: what differs.
        alien: nothing of it can be a model's: optimizer states by themselves.
    """

    tensors: tuple[PiecedTensor, ...] = ()
    lacks: str = ""
    refusal: str = ""
    mismatch: Incompatible | None = None
    no_model: bool = False


Target = tuple[tuple[int, ...], list[Region]]  #: shape of a whole tensor of the checkpoint, and where it leads


class PieceNames:
    """Fits checkpoints to one layout. May take seconds, and import transformers, where names are not the layout's.

    Args:
        ignore: globs of names that are dropped, whole or without their prefix.
        config: the model's `config.json`; None if there is none.
    """

    def __init__(self, layout: Layout, ignore: Sequence[str] = (), config: Mapping[str, Any] | None = None) -> None:
        self._layout, self._ignore, self._config = layout, ignore, config
        self._direct: dict[str, Target] = {spec.name: (spec.shape, whole(spec.name, spec.shape)) for spec in layout}
        self._library: dict[str, Target] | Incompatible | None = None

    def fit(self, pieces: Iterable[Piece], *, ended: bool) -> PieceFit:
        """Judge all pieces of a checkpoint that are there; `ended` if no more are to come."""
        given: dict[str, list[Piece]] = {}
        for piece in pieces:
            given.setdefault(plain(piece.tensor, self._layout), []).append(piece)
        named = {name: found for name, found in given.items() if not self._is_beside(name)}
        if not named:
            return PieceFit(no_model=True)
        names = _resolve(named, self._direct)
        why: Incompatible | None = None
        if not names.clash and names.has_unknown and names.missing:
            # Some names are strange and some are missing: they may be what the library calls these tensors.
            of_library = self._library_targets()
            if isinstance(of_library, Incompatible):
                why = of_library
            else:
                names = max(names, _resolve(named, of_library), key=lambda names: names.share)
        if names.clash:
            return PieceFit(refusal=names.clash)
        return _PieceJudge(self._layout, names.targets, names.own, ended=ended).fit(why)

    def _is_beside(self, name: str) -> bool:
        top = name.partition(".")[0]
        if any(fnmatchcase(name, glob) for glob in self._ignore):
            return True
        return top.startswith(OPTIMIZERS) and not any(known.partition(".")[0] == top for known in self._direct)

    def _library_targets(self) -> dict[str, Target] | Incompatible:
        """Those of the library's tensors that lead to the layout."""
        if self._library is None:
            try:
                self._library = self._made()
            except Incompatible as error:
                self._library = error
        return self._library

    def _made(self) -> dict[str, Target]:
        if self._config is None:
            raise Incompatible(
                "these are no names of the checkpoint, and there is no config.json that says what model it is",
                hint="give --base with the checkpoint that the stream was created from, config.json included",
            )
        model = library(self._config)
        leads = {
            name: [region for region in regions if region.name in self._layout]
            for name, regions in model.conversion.regions.items()
        }
        targets = {name: (model.shapes[name], regions) for name, regions in leads.items() if regions}
        if not targets:
            raise Incompatible("the model of config.json saves no tensor of the stream's layout")
        return targets


@dataclass(frozen=True, slots=True)
class _Naming:
    """The checkpoint's tensors under one set of names: `own` are the model's, without their prefix."""

    targets: Mapping[str, Target]
    own: Mapping[str, list[Piece]]
    clash: str

    @property
    def missing(self) -> bool:
        return bool(self.targets.keys() - self.own.keys())

    @property
    def has_unknown(self) -> bool:
        return bool(self.own.keys() - self.targets.keys())

    @property
    def share(self) -> float:
        """Of what is wanted, what is there."""
        return len(self.targets.keys() & self.own.keys()) / max(len(self.targets), 1)


def _resolve(named: Mapping[str, list[Piece]], targets: Mapping[str, Target]) -> _Naming:
    prefix, clash = _prefix(named, targets)
    return _Naming(targets, _model_tensors(named, prefix, targets), clash)


def _prefix(names: Iterable[str], known: Container[str]) -> tuple[str, str]:
    """What the checkpoint writes before the model's names, and why that cannot be told, if so."""
    counts: Counter[str] = Counter()
    for name in names:
        counts[""] += name in known
        counts.update(name[: dot + 1] for dot, c in enumerate(name) if c == "." and name[dot + 1 :] in known)
    most = max(counts.values())
    found = sorted(prefix for prefix, count in counts.items() if count == most)
    if most == 0 or "" in found:
        return "", ""
    # A second model of the same names (an average of the weights, a reference) lies beside the one called so.
    called = [prefix for prefix in found if prefix.split(".")[-2] == "model"] or found
    if len(called) > 1:
        return "", f"the model's names are in it {len(called)} times, behind {', '.join(called)}: --ignore all but one"
    return called[0], ""


def _model_tensors(named: Mapping[str, list[Piece]], prefix: str, known: Iterable[str]) -> dict[str, list[Piece]]:
    """The model's tensors without their prefix. What has another top-level key than the model lies beside it."""
    if prefix:
        return {name.removeprefix(prefix): found for name, found in named.items() if name.startswith(prefix)}
    tops = {name.partition(".")[0] for name in known}
    own = {name: found for name, found in named.items() if name.partition(".")[0] in tops}
    return own or dict(named)


class _PieceJudge:
    """One checkpoint under settled names."""

    def __init__(
        self, layout: Layout, targets: Mapping[str, Target], own: Mapping[str, list[Piece]], *, ended: bool
    ) -> None:
        self._layout, self._targets, self._own, self._ended = layout, targets, own, ended
        self._parts: dict[str, list[Part]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._short: list[str] = []
        self._problems: dict[str, list[str]] = {}

    def fit(self, why: Incompatible | None) -> PieceFit:
        """`why` the names could not be looked up in the library, if that was tried."""
        if refusal := self._contradiction():
            return PieceFit(refusal=refusal)
        for name, found in self._own.items():
            self._place(name, found)
        short, refusal = self._uncovered()
        if refusal:
            return PieceFit(refusal=refusal)
        missing = sorted({*self._short, *short, *(name for name in self._targets if name not in self._own)})
        if missing and not self._ended:
            return PieceFit(lacks=f"pieces of {shorten(missing)}" + (f"; {why.message}" if why else ""))
        if missing:
            self._problems |= {
                "missing": missing,
                "added": sorted(self._own.keys() - self._targets.keys()),
            }
        return PieceFit(mismatch=self._misfit(why)) if self._problems else PieceFit(tuple(self._tensors()))

    def _misfit(self, why: Incompatible | None) -> Incompatible:
        texts = [
            f"{kind}: {shorten(sorted(names), limit=MISMATCHES)}"
            for kind, names in sorted(self._problems.items())
            if names
        ]
        hint = why.hint if why else "nothing of it is published; write it again, or correct --base"
        return Incompatible("; ".join([*texts, *([why.message] if why else [])]), hint=hint)

    def _contradiction(self) -> str:
        mixed = [name for name, found in self._own.items() if len({piece.dtype for piece in found}) > 1]
        if mixed:
            return f"pieces of {shorten(sorted(mixed))} have several dtypes"
        if packed := sorted(name for name, found in self._own.items() if any(piece.packed for piece in found)):
            return f"{shorten(packed)} are packed by {self._own[packed[0]][0].packed}: write without extensions"
        return ""

    def _place(self, name: str, found: list[Piece]) -> None:
        shape = found[0].whole
        wanted, regions = self._targets.get(name, (shape, whole(name, shape)))
        if shape != wanted:
            if (
                not self._ended
                and len(shape) == len(wanted)
                and all(n <= m for n, m in zip(shape, wanted, strict=True))
            ):
                self._short.append(name)
            else:
                said = f"{name} (is {list(shape)}, should be {list(wanted)})"
                self._problems.setdefault("reshaped", []).append(said)
            return
        for region in regions:
            self._parts.setdefault(region.name, [])
        if name not in self._targets:
            self._shapes[name] = shape
            self._parts.setdefault(name, [])
        for piece in found:
            for region in chain(slab(name, shape, piece.starts, piece.shape), {name: regions}):
                self._parts[region.name].append(Part(piece, region))

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._layout[self._layout.index(name)].shape if name in self._layout else self._shapes[name]

    def _uncovered(self) -> tuple[list[str], str]:
        """Tensors of which pieces are missing, and what is wrong with the table: overlaps, or gaps if it has ended."""
        shapes = {name: self._shape(name) for name in self._parts}
        findings = exactly_once((part.region for parts in self._parts.values() for part in parts), shapes)
        wrong = [finding for finding in findings if self._ended or finding.kind != "missing"]
        if wrong:
            return [], f"its pieces do not make whole tensors: {shorten(wrong, separator='; ')}"
        return [finding.name for finding in findings], ""

    def _tensors(self) -> Iterable[PiecedTensor]:
        empty = {name: found for name, found in self._own.items() if name in self._layout and not self._parts.get(name)}
        for name, found in empty.items():  # a tensor without elements has pieces and no regions
            yield PiecedTensor(TensorSpec(name, found[0].dtype, found[0].whole), ())
        for name, parts in self._parts.items():
            if parts:
                parts.sort(key=lambda part: part.region.dst)
                yield PiecedTensor(TensorSpec(name, parts[0].piece.dtype, self._shape(name)), tuple(parts))
