"""One checkpoint below a watched directory as the last scan found it: which files are complete, and what is missing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.safetensors import Header
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.files.piece_map import METADATA, SHARDING_INFO
from dcr_daemon.publish.inputs.tied import TiedTensors
from dcr_daemon.publish.watch.file_identity import FileIdentity, checkpoint_identity
from dcr_daemon.publish.watch.pieces.fit import PieceFit
from dcr_daemon.publish.watch.pieces.reader import PieceFiles
from dcr_daemon.wording import shorten

_SHARD = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")


@dataclass(frozen=True, slots=True)
class CompleteFile:
    """`header` is None for a file that is no safetensors file."""

    path: Path
    identity: FileIdentity
    header: Header | None

    @property
    def names(self) -> list[str]:
        """Names of the tensors in it, by its own header."""
        return list(self.header.spans) if self.header else []

    @property
    def in_pieces(self) -> bool:
        """Whether it holds pieces of tensors, and not whole ones."""
        return self.header is not None and SHARDING_INFO in self.header.metadata


@dataclass(frozen=True, slots=True)
class CompletePieces:
    """A checkpoint in pieces of which all known files are there. It is ingested as a whole."""

    files: PieceFiles
    fit: PieceFit


@dataclass(slots=True, eq=False)
class CheckpointCandidate:
    """One checkpoint directory as the last scan found it.

    Attributes:
        step: the training step that its path tells; None if it tells none.
        files: complete files by name.
        unfinished: the other files by name, each with what it lacks.
        index: the weight map of the index file; None without one.
        passed_by: weight files beside those that are read.
        tied: tensors of the layout that it need not hold.
        has_marker: whether the marker file is there and new enough, or none is asked for.
        rewritten: whether its files replace older ones.
        written_ns: the newest modification time among its files, complete or not; nanoseconds since 1970.
        undetermined: whether a file may be complete, but has not been scanned often enough to tell.
        in_pieces: whether its tensors are stored in pieces.
        pieces: the pieces, once all files are there.
        refusal: why the checkpoint is not published until somebody changes it; empty if it may be published.
    """

    path: Path
    relative: str
    step: int | None = None
    files: dict[str, CompleteFile] = field(default_factory=dict)
    unfinished: dict[str, str] = field(default_factory=dict)
    index: dict[str, str] | None = None
    passed_by: list[str] = field(default_factory=list)
    tied: TiedTensors = field(default_factory=TiedTensors)
    has_marker: bool = True
    rewritten: bool = False
    written_ns: int = 0
    undetermined: bool = False
    in_pieces: bool = False
    pieces: CompletePieces | None = None
    refusal: str = ""

    @property
    def order(self) -> tuple[int, int, str]:
        """Oldest first: by the time at which it became whole. A step tells only those of one time apart: numbers begin
        anew with each run of a trainer."""
        return (self.written_ns, -1 if self.step is None else self.step, self.relative)

    @property
    def identity(self) -> frozenset[FileIdentity]:
        return checkpoint_identity((file.identity for file in self.files.values()), METADATA)

    def why_incomplete(self, layout: Layout) -> str:
        """What is still missing, or why the checkpoint is refused; empty if it is complete."""
        if self.refusal:
            return self.refusal
        if self.unfinished:
            reasons: dict[str, list[str]] = {}
            for name, why in sorted(self.unfinished.items()):
                reasons.setdefault(why, []).append(name)
            return shorten((f"{shorten(names)}: {why}" for why, names in reasons.items()), separator="; ")
        if not self.has_marker:
            return "its marker file" + ", made after the last write: it is being rewritten in place" * self.rewritten
        if self.in_pieces:
            return self.pieces.fit.incomplete if self.pieces else "its pieces"
        if missing := self.missing_tensors(layout):
            return f"tensors {shorten(missing)}"
        return ""

    def missing_tensors(self, layout: Layout) -> list[str]:
        """Layout tensors that no complete file holds."""
        held = {name for file in self.files.values() for name in file.names}
        missing = [spec.name for spec in layout if spec.name not in held]
        return [name for name in missing if self.tied.source(name, held) is None]

    def is_final(self, *, marker: bool) -> bool:
        """Whether something says that no more files will come. Tensors that are missing then are an error.

        Args:
            marker: whether the watcher was told to wait for a marker file.
        """
        if self.unfinished or not self.files or not self.has_marker or self.in_pieces or self.refusal:
            return False  # pieces were judged as a whole already
        numbered = [match for name in self.files if (match := _SHARD.search(name))]
        all_shards = bool(numbered) and len({m[1] for m in numbered}) == int(numbered[0][2])
        # A marker may be left over from what this directory held before: numbered shards are the better evidence.
        trusted = marker and not numbered
        return trusted or self.index is not None or all_shards or "model.safetensors" in self.files

    def check_index(self, layout: Layout) -> None:
        """Raise `Incompatible` if the index and the (complete) files disagree."""
        if self.index is None:
            return
        homes = {name: file.path.name for file in self.files.values() for name in file.names}
        wrong = {name for name in self.index.keys() | homes.keys() if self.index.get(name) != homes.get(name)}
        wrong -= {name for name in wrong - homes.keys() if self.tied.explains_absence(name, homes, layout)}
        if wrong:
            raise Incompatible(
                f"the index of {self.path} disagrees with its files about {shorten(sorted(wrong))}",
                hint="nothing of it is published; write the checkpoint again, or remove it",
            )
