"""Whether the pieces of a checkpoint, under known names, make the stream's tensors: each element exactly once.

What the checkpoint's own table says is judged like anything else that others wrote: shapes, dtypes and coverage, before
one byte of weights is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dcr_daemon.canonical.compose import chain
from dcr_daemon.canonical.coverage import exactly_once
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.canonical.region import Region, slab, whole
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.files.piece_map import Piece
from dcr_daemon.projection.mismatches import LayoutMismatches
from dcr_daemon.publish.inputs.tied import TiedTensors
from dcr_daemon.wording import shorten

Target = tuple[tuple[int, ...], list[Region]]  #: shape of a whole tensor of the checkpoint, and its canonical regions


@dataclass(frozen=True, slots=True)
class Part:
    """What a piece holds of one canonical tensor: `region` leads from the piece's elements to the tensor's."""

    piece: Piece
    region: Region


@dataclass(frozen=True, slots=True)
class PiecedTensor:
    """One canonical tensor, or one outside the layout. `given` has its name and shape in the stream, and the dtype of
    its pieces."""

    given: TensorSpec
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class PieceFit:
    """The verdict on a checkpoint's pieces. At most one attribute beside `cause` is set.

    Attributes:
        tensors: what is to be published, and tensors outside the layout that may be second copies of it.
        incomplete: what is still missing, if more files may come.
        refusal: why the checkpoint contradicts itself.
        mismatches: how it differs from this stream's model, if it does not contradict itself.
        cause: why its names could not be looked up in the transformers library, if that was tried in vain.
        no_model: it holds no model at all, only optimizer states.
    """

    tensors: tuple[PiecedTensor, ...] = ()
    incomplete: str = ""
    refusal: str = ""
    mismatches: LayoutMismatches | None = None
    cause: Incompatible | None = None
    no_model: bool = False

    def check(self, subject: str) -> None:
        """Raise `Incompatible` if the checkpoint is not this stream's model; `subject` names it."""
        if self.mismatches:
            self.mismatches.check(subject, self.cause)


@dataclass(slots=True)
class PieceJudge:
    """Judges one checkpoint.

    Attributes:
        targets: tensors that a checkpoint of this model holds, under the names that it uses.
        given: its pieces by tensor, under the same names.
        complete: no more pieces are to come.
        cause: of `PieceFit`.
        tied: tensors that need no pieces, as others have the same bits.
    """

    layout: Layout
    targets: Mapping[str, Target]
    given: Mapping[str, list[Piece]]
    complete: bool
    cause: Incompatible | None = None
    tied: TiedTensors = field(default_factory=TiedTensors)
    _parts: dict[str, list[Part]] = field(init=False, default_factory=dict)
    _shapes: dict[str, tuple[int, ...]] = field(init=False, default_factory=dict)
    _short: list[str] = field(init=False, default_factory=list)

    def fit(self) -> PieceFit:
        if refusal := self._contradiction():
            return PieceFit(refusal=refusal)
        mismatches = LayoutMismatches(self.layout)
        for name, pieces in self.given.items():
            self._place(name, pieces, mismatches)
        uncovered, refusal = self._uncovered()
        if refusal:
            return PieceFit(refusal=refusal)
        absent = self.targets.keys() - self.given.keys()
        absent = {name for name in absent if self.tied.source(name, self._parts) is None}
        missing = sorted({*self._short, *uncovered, *absent})
        if missing and not self.complete:
            return PieceFit(
                incomplete=f"pieces of {shorten(missing)}" + (f"; {self.cause.message}" if self.cause else "")
            )
        if missing:
            for name in missing:
                mismatches.note("missing", name)
            for name in self.given.keys() - self.targets.keys():
                mismatches.note("added", name)
        if mismatches:
            return PieceFit(mismatches=mismatches, cause=self.cause)
        return PieceFit(tuple(self._tensors()))

    def _contradiction(self) -> str:
        """Why the pieces of one tensor cannot belong together."""
        mixed = [name for name, pieces in self.given.items() if len({piece.dtype for piece in pieces}) > 1]
        if mixed:
            return f"pieces of {shorten(sorted(mixed))} have several dtypes"
        packed = sorted(name for name, pieces in self.given.items() if any(piece.packed for piece in pieces))
        if packed:
            return f"{shorten(packed)} are packed by {self.given[packed[0]][0].packed}: write without extensions"
        return ""

    def _place(self, name: str, pieces: list[Piece], mismatches: LayoutMismatches) -> None:
        """Judge the whole tensor that these pieces belong to, and say where they lie in canonical tensors."""
        shape = pieces[0].whole
        expected, regions = self.targets.get(name, (shape, whole(name, shape)))
        if not self.complete and _may_grow_to(shape, expected):
            self._short.append(name)
            return
        mismatches.judge_dtype(
            name, pieces[0].dtype, targets=dict.fromkeys(r.name for r in regions if r.name in self.layout)
        )
        if not mismatches.judge_shape(name, shape, expected=expected):
            return
        for region in regions:
            self._parts.setdefault(region.name, [])
        if name not in self.targets:
            self._shapes[name] = shape
            self._parts.setdefault(name, [])
        for piece in pieces:
            for region in chain(slab(name, shape, starts=piece.starts, sizes=piece.shape), {name: regions}):
                self._parts[region.name].append(Part(piece, region))

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.layout[self.layout.index(name)].shape if name in self.layout else self._shapes[name]

    def _uncovered(self) -> tuple[list[str], str]:
        """Tensors of which pieces are missing; and why to refuse: overlaps, or gaps although no more pieces come."""
        shapes = {name: self._shape(name) for name in self._parts}
        findings = exactly_once((part.region for parts in self._parts.values() for part in parts), shapes)
        wrong = [finding for finding in findings if self.complete or finding.kind != "missing"]
        if wrong:
            return [], f"its pieces do not make whole tensors: {shorten(wrong, separator='; ')}"
        return [finding.name for finding in findings], ""

    def _tensors(self) -> Iterable[PiecedTensor]:
        for name, pieces in self.given.items():
            if name in self.layout and not self._parts.get(name):  # without elements: pieces, but no regions
                yield PiecedTensor(TensorSpec(name, pieces[0].dtype, pieces[0].whole), ())
        for name, parts in self._parts.items():
            if parts:
                parts.sort(key=lambda part: part.region.dst)
                yield PiecedTensor(TensorSpec(name, parts[0].piece.dtype, self._shape(name)), tuple(parts))


def _may_grow_to(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether a tensor of which pieces are still to come is only short of `expected`."""
    return (
        shape != expected and len(shape) == len(expected) and all(n <= m for n, m in zip(shape, expected, strict=True))
    )
