"""One checkpoint below a watched directory, as a look saw it: what of it is there, and what it still lacks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.safetensors import Header
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.files.piece_map import METADATA, SHARDING_INFO
from dcr_daemon.publish.watch.file_identity import FileIdentity, number_in, together
from dcr_daemon.publish.watch.piece_names import Fit
from dcr_daemon.publish.watch.pieces import PieceFiles
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
        """Tensors in it, by its own header."""
        return list(self.header.spans) if self.header else []

    @property
    def in_pieces(self) -> bool:
        """Whether it holds pieces of tensors, and not whole ones."""
        return self.header is not None and SHARDING_INFO in self.header.metadata


@dataclass(frozen=True, slots=True)
class Pieces:
    """A checkpoint in pieces of which all is there that is known to belong to it. It is taken up at one go."""

    files: PieceFiles
    fit: Fit


@dataclass(slots=True, eq=False)
class Found:
    """One checkpoint directory as the last look saw it.

    `files` are the complete ones by name, `waiting` says by name what the others lack. `index` is the weight map of
    its index file, `marked` whether the marker is there, `completion` its place among those that became complete.
    `fresh` means that a file is here that may well be complete, and was not looked at often enough to tell. `in_pieces`
    means that its tensors lie in pieces, and `pieces` says how once its files are there. `refusal` says why it will not
    be published before somebody changes it.
    """

    path: Path
    relative: str
    files: dict[str, CompleteFile] = field(default_factory=dict)
    waiting: dict[str, str] = field(default_factory=dict)
    index: dict[str, str] | None = None
    marked: bool = True
    completion: int = 0
    fresh: bool = False
    in_pieces: bool = False
    pieces: Pieces | None = None
    refusal: str = ""

    @property
    def number(self) -> int | None:
        return number_in(self.relative)

    @property
    def order(self) -> tuple[bool, int, str]:
        """Oldest first: by number; without one, by completion."""
        number = self.number
        return (number is None, self.completion if number is None else number, self.relative)

    @property
    def identity(self) -> frozenset[FileIdentity]:
        return together((file.identity for file in self.files.values()), METADATA)

    def lacks(self, layout: Layout) -> str:
        """What this checkpoint still waits for, or why it is refused; empty if it is complete."""
        if self.refusal:
            return self.refusal
        if self.waiting:
            return "; ".join(f"{name}: {why}" for name, why in sorted(self.waiting.items()))
        if not self.marked:
            return "its marker file"
        if self.in_pieces:
            return self.pieces.fit.lacks if self.pieces else "its pieces"
        if missing := self.missing(layout):
            return f"tensors {shorten(missing)}"
        return ""

    def missing(self, layout: Layout) -> list[str]:
        """Layout tensors that no complete file holds."""
        held = {name for file in self.files.values() for name in file.names}
        return [spec.name for spec in layout if spec.name not in held]

    def ended(self, *, marker: bool) -> bool:
        """Whether no more files are to come, as far as anything says so: then what is missing is an error."""
        if self.waiting or not self.files or not self.marked or self.in_pieces or self.refusal:
            return False  # what lies in pieces was judged as a whole
        numbered = [match for name in self.files if (match := _SHARD.search(name))]
        all_shards = bool(numbered) and len({m[1] for m in numbered}) == int(numbered[0][2])
        # A marker may be left over from what this directory held before: shards that count themselves know better.
        marked = marker and not numbered
        return marked or self.index is not None or all_shards or "model.safetensors" in self.files

    def check_index(self) -> None:
        """Raise `Incompatible` if the index and the (complete) files disagree."""
        if self.index is None:
            return
        homes = {name: file.path.name for file in self.files.values() for name in file.names}
        if wrong := sorted(n for n in self.index.keys() | homes.keys() if self.index.get(n) != homes.get(n)):
            raise Incompatible(
                f"the index of {self.path} disagrees with its files about {shorten(wrong)}",
                hint="nothing of it is published; write the checkpoint again, or remove it",
            )
