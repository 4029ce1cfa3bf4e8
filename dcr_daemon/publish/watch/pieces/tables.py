"""Tables of checkpoints in pieces, each read and judged once: `.metadata` files, and headers of sharded files."""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.safetensors import Header
from dcr_daemon.errors import Corrupt, Incompatible, NotFound
from dcr_daemon.projection.files.piece_map import METADATA, Piece, dcp_pieces, pieces_of
from dcr_daemon.publish.inputs.tied import TiedTensors
from dcr_daemon.publish.watch.file_identity import FileIdentity, identity_of
from dcr_daemon.publish.watch.pieces.fit import PieceFit
from dcr_daemon.publish.watch.pieces.names import PieceNames

STALLED = 30  #: timed scans after which files that are newer than their table count as copied, not as being rewritten


@dataclass(frozen=True, slots=True)
class PieceTable:
    """The table of a distributed checkpoint: how it fits, and how many bytes each file has at least."""

    fit: PieceFit
    file_sizes: Mapping[str, int]


class PieceTables:
    """Remembers verdicts by the identity of the files that they were read from. Used by one thread at a time.

    Args:
        ignore, config, tied: of `PieceNames`.
    """

    def __init__(self, ignore: Sequence[str], config: Mapping[str, Any] | None, *, tied: TiedTensors) -> None:
        self._ignore, self._config, self._tied = ignore, config, tied
        self._naming: tuple[Layout, PieceNames] | None = None
        self._tables: dict[tuple[Path, FileIdentity], PieceTable] = {}
        self._fits: dict[Path, tuple[frozenset[FileIdentity], PieceFit]] = {}
        self._unchanged: dict[Path, tuple[frozenset[FileIdentity], int]] = {}

    def of_distributed(self, directory: Path, identity: FileIdentity, *, layout: Layout) -> PieceTable:
        """The table of a distributed checkpoint whose `.metadata` has this identity."""
        key = directory, identity
        if key not in self._tables:
            sizes: dict[str, int] = {}

            def read() -> Sequence[Piece]:
                pieces = dcp_pieces(directory)
                for piece in pieces:
                    sizes[piece.file] = max(sizes.get(piece.file, 0), piece.span[1])
                return pieces

            try:
                self._tables[key] = PieceTable(self._fit(read, layout, complete=True), sizes)
            except (NotFound, Incompatible) as error:  # it cannot be read now: nothing to remember
                return PieceTable(PieceFit(refusal=error.message), {})
        return self._tables[key]

    def of_sharded_files(
        self,
        directory: Path,
        identity: frozenset[FileIdentity],
        *,
        headers: Mapping[str, Header],
        layout: Layout,
        complete: bool,
    ) -> PieceFit:
        """The verdict on the files of a sharded safetensors writer; `complete` if no more are to come."""
        known = self._fits.get(directory)
        if known is None or known[0] != identity:
            fit = self._fit(lambda: pieces_of(headers, directory), layout, complete=complete)
            known = self._fits[directory] = identity, fit
        return known[1]

    def _fit(self, read: Callable[[], Sequence[Piece]], layout: Layout, *, complete: bool) -> PieceFit:
        try:
            pieces = read()
        except Corrupt as error:
            return PieceFit(refusal=error.message)
        if self._naming is None or self._naming[0] is not layout:
            self._naming = layout, PieceNames(layout, self._ignore, config=self._config, tied=self._tied)
        return self._naming[1].fit(pieces, complete=complete)

    def check_files(
        self, directory: Path, table: PieceTable, *, identity: FileIdentity, timed: bool
    ) -> tuple[dict[str, FileIdentity], dict[str, str]]:
        """The files that a table names, as they are now; and by name what is wrong with those that are not as it says.

        A table is written last. A newer file belongs to the next table, which is still to come, or it was copied after
        its table. Nothing tells the two apart, so a newer file must stay unchanged for `STALLED` timed scans.
        """
        present: dict[str, FileIdentity] = {}
        wrong: dict[str, str] = {}
        for name, size in table.file_sizes.items():
            try:
                found = (directory / name).stat()
            except OSError:
                wrong[name] = "not there yet"
                continue
            present[name] = identity_of(name, found)
            if not stat.S_ISREG(found.st_mode):
                wrong[name] = "is not a regular file"
            elif found.st_size < size:
                wrong[name] = f"has {found.st_size} bytes of the {size} that {METADATA} promises"
        newer = sorted(name for name, file in present.items() if file.mtime_ns > identity.mtime_ns)
        now = frozenset(present.values())
        before, scans = self._unchanged.get(directory, (None, 0))
        scans = timed + (scans if before == now else 0)
        self._unchanged[directory] = now, scans
        if newer and not wrong and scans < STALLED:
            wrong[newer[0]] = f"newer than {METADATA}: being rewritten, or copied without its time"
        return present, wrong

    def forget_except(self, seen: set[Path]) -> None:
        """Forget directories that the last scan did not meet."""
        self._tables = {key: table for key, table in self._tables.items() if key[0] in seen}
        for directories in (self._fits, self._unchanged):
            for directory in directories.keys() - seen:
                del directories[directory]
