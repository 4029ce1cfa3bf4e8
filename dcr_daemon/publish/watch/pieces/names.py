"""Which tensors of a checkpoint in pieces are the model's, and what the stream calls them.

The names are the layout's, or they have a prefix (`model.` of a state dict inside a state dict), or they are those of
the transformers library's own modules, whose conversion leads to the layout's. Everything beside the model (another
top-level key, optimizer states) is left out. Whether the pieces then make the stream's tensors, `fit` judges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.canonical.region import whole
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.files.piece_map import Piece
from dcr_daemon.projection.frameworks.library import library
from dcr_daemon.projection.sharding.named import plain
from dcr_daemon.publish.inputs.tied import TiedTensors
from dcr_daemon.publish.watch.pieces.fit import PieceFit, PieceJudge, Target
from dcr_daemon.wording import shorten

OPTIMIZERS = ("optim", "opt_state")  #: how the top-level keys of optimizer states begin, in all trainers that we know


class PieceNames:
    """Finds the names of checkpoints of one layout, and judges their pieces. May take seconds, and import transformers,
    where names are not the layout's.

    Args:
        ignore: globs of names to drop, with or without their prefix.
        config: the model's `config.json`; None if there is none.
        tied: of `PieceJudge`.
    """

    def __init__(
        self,
        layout: Layout,
        ignore: Sequence[str] = (),
        *,
        config: Mapping[str, Any] | None = None,
        tied: TiedTensors | None = None,
    ) -> None:
        self._tied = tied or TiedTensors()
        self._layout, self._ignore, self._config = layout, ignore, config
        self._direct: dict[str, Target] = {spec.name: (spec.shape, whole(spec.name, spec.shape)) for spec in layout}
        self._library: dict[str, Target] | Incompatible | None = None

    def fit(self, pieces: Iterable[Piece], *, complete: bool) -> PieceFit:
        """Judge all pieces of a checkpoint that are there; `complete` if no more are to come."""
        by_name: dict[str, list[Piece]] = {}
        for piece in pieces:
            by_name.setdefault(plain(piece.tensor, self._layout), []).append(piece)
        by_name = {name: pieces for name, pieces in by_name.items() if not self._is_beside_model(name)}
        if not by_name:
            return PieceFit(no_model=True)
        naming = _resolve(by_name, self._direct)
        cause: Incompatible | None = None
        if not naming.ambiguity and naming.has_unknown and naming.has_missing:
            # The unknown names may be what the library calls the missing tensors.
            of_library = self._library_targets()
            if isinstance(of_library, Incompatible):
                cause = of_library
            else:
                naming = max(naming, _resolve(by_name, of_library), key=lambda naming: naming.coverage)
        if naming.ambiguity:
            return PieceFit(refusal=naming.ambiguity)
        return PieceJudge(self._layout, naming.targets, naming.given, complete, cause, self._tied).fit()

    def _is_beside_model(self, name: str) -> bool:
        top = name.partition(".")[0]
        if any(fnmatchcase(name, glob) for glob in self._ignore):
            return True
        return top.startswith(OPTIMIZERS) and not any(known.partition(".")[0] == top for known in self._direct)

    def _library_targets(self) -> dict[str, Target] | Incompatible:
        """The library's tensors that lead to the layout, or why they are not known."""
        if self._library is None:
            try:
                self._library = self._read_library()
            except Incompatible as error:
                self._library = error
        return self._library

    def _read_library(self) -> dict[str, Target]:
        if self._config is None:
            raise Incompatible(
                "these names are not the stream's, and no config.json says which model they belong to",
                hint="give --base with the checkpoint that the stream was created from, config.json included",
            )
        model = library(self._config)
        inside = {
            name: [region for region in regions if region.name in self._layout]
            for name, regions in model.conversion.regions.items()
        }
        targets = {name: (model.shapes[name], regions) for name, regions in inside.items() if regions}
        if not targets:
            raise Incompatible("the model of config.json saves no tensor of the stream's layout")
        return targets


@dataclass(frozen=True, slots=True)
class _Naming:
    """A checkpoint read by one set of names.

    Attributes:
        targets: tensors of the model, by these names.
        given: the checkpoint's pieces of the model, by these names, without their prefix.
        ambiguity: why the prefix cannot be told; empty if it can.
    """

    targets: Mapping[str, Target]
    given: Mapping[str, list[Piece]]
    ambiguity: str

    @property
    def has_missing(self) -> bool:
        return bool(self.targets.keys() - self.given.keys())

    @property
    def has_unknown(self) -> bool:
        return bool(self.given.keys() - self.targets.keys())

    @property
    def coverage(self) -> float:
        """The fraction of the targets that are there."""
        return len(self.targets.keys() & self.given.keys()) / max(len(self.targets), 1)


def _resolve(by_name: Mapping[str, list[Piece]], targets: Mapping[str, Target]) -> _Naming:
    prefix, ambiguity = _prefix(by_name, targets)
    return _Naming(targets, _model_tensors(by_name, prefix, targets), ambiguity)


def _prefix(names: Iterable[str], known: Container[str]) -> tuple[str, str]:
    """What the checkpoint writes before the model's names; and why that cannot be told, if so."""
    counts: Counter[str] = Counter()
    for name in names:
        counts[""] += name in known
        counts.update(name[: dot + 1] for dot, c in enumerate(name) if c == "." and name[dot + 1 :] in known)
    most = max(counts.values())
    best = sorted(prefix for prefix, count in counts.items() if count == most)
    if most == 0 or "" in best:
        return "", ""
    # A second model of the same names (an average of the weights, a reference) lies beside the one called "model".
    called_model = [prefix for prefix in best if prefix.split(".")[-2] == "model"] or best
    if len(called_model) > 1:
        return "", (
            f"the model's names are in it {len(called_model)} times, behind {shorten(called_model)}: "
            "--ignore all but one"
        )
    return called_model[0], ""


def _model_tensors(by_name: Mapping[str, list[Piece]], prefix: str, known: Iterable[str]) -> dict[str, list[Piece]]:
    """The model's tensors without their prefix. A tensor with another top-level key than the model's is none of it."""
    if prefix:
        return {name.removeprefix(prefix): found for name, found in by_name.items() if name.startswith(prefix)}
    tops = {name.partition(".")[0] for name in known}
    inside = {name: found for name, found in by_name.items() if name.partition(".")[0] in tops}
    return inside or dict(by_name)
