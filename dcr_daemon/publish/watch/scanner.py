"""What lies below a watched directory, and what of it is complete. Reads headers and tables, never weights.

A *checkpoint* is a directory, 1 to 4 levels down, that directly holds `*.safetensors`, or a `.metadata` over `*.distcp`
files, as torch's distributed checkpoints do. A *file is complete* when its writer closed it (or moved it in), or when
two timed looks in a row found it unchanged and nobody was seen writing to it; and its header parses and its length is
exactly what the header says. A *checkpoint is complete* when its complete files hold every tensor of the layout once,
its index, if it has one, agrees, and the marker, if one is asked for, is there. Files of a sharded writer hold pieces:
together they must hold every element of every tensor once. A `.metadata` is written last: with it, and with all files
that it names as long as it says and no newer, a distributed checkpoint is complete.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.directory import find_index, read_index
from dcr_daemon.checkpoint.safetensors import Header, read_header
from dcr_daemon.errors import Corrupt, DcrError, Incompatible
from dcr_daemon.projection.files.piece_map import METADATA
from dcr_daemon.publish.watch.candidate import CheckpointCandidate, CompleteFile, CompletePieces
from dcr_daemon.publish.watch.file_identity import (
    FileIdentity,
    checkpoint_identity,
    identify,
    is_digest,
    only_attributes_changed,
    without_inodes,
)
from dcr_daemon.publish.watch.piece_fit import PieceFit
from dcr_daemon.publish.watch.piece_reader import PieceFiles
from dcr_daemon.publish.watch.piece_tables import PieceTables
from dcr_daemon.wording import shorten

DEPTH = 4  #: levels below the watched directory at which checkpoints are looked for
STABLE_SCANS = 2  #: timed looks that must find a file unchanged, if nobody was seen writing to it
STABLE_SCANS_UNCLOSED = 30  #: the same for one that was written to and never closed: a stalled writer, or a lost notice
SHARDED = "sharded"  #: where torch's writer leaves the pieces from which it makes the checkpoint one level up


class CheckpointScanner:
    """Remembers what earlier looks saw. `scan` is blocking and cheap when little has changed.

    Args:
        root: the watched directory.
        exclude: directories that are never checkpoints, nor anything in them.
        marker: name of the file that a complete checkpoint must hold.
        ignore: globs of names outside the layout that checkpoints in pieces may hold.
        config: the model's `config.json`, for checkpoints under a training framework's names.
    """

    def __init__(
        self,
        root: Path,
        exclude: list[Path],
        marker: str | None,
        ignore: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._root, self._marker = root, marker
        self._tables = PieceTables(ignore, config)
        self._exclude = {path.resolve() for path in exclude}
        self._notices: deque[tuple[Path, str]] = deque()
        self._versions: dict[frozenset[FileIdentity], set[str]] = {}
        self._version_paths: dict[str, frozenset[FileIdentity]] = {}
        self._closed_as: dict[Path, FileIdentity] = {}
        self._unchanged: dict[Path, tuple[FileIdentity, int]] = {}
        self._unclosed: dict[Path, None] = {}
        self._stable: dict[Path, FileIdentity] = {}
        self._headers: dict[tuple[Path, FileIdentity], Header | str] = {}
        self._completed: dict[tuple[str, frozenset[FileIdentity]], int] = {}
        self._by_table: dict[FileIdentity, frozenset[FileIdentity]] = {}
        self._refused: dict[str, tuple[frozenset[FileIdentity], str]] = {}

    def mark_refused(self, relative: str, identity: frozenset[FileIdentity], why: str) -> None:
        """The very files of this checkpoint were found not to be what they claim: they are not to be tried again."""
        self._refused[relative] = identity, why

    def mark_published(self, relative: str, identity: frozenset[FileIdentity]) -> None:
        """A checkpoint is a version now, and is not to be found again."""
        self._versions.setdefault(identity, set()).add(relative)
        self._version_paths[relative] = without_inodes(identity)
        table = next((file for file in identity if file.name == METADATA), None)
        if table and not any(map(is_digest, identity)):
            self._by_table[table] = identity

    def _is_version(self, relative: str, identity: frozenset[FileIdentity]) -> bool:
        """Whether the very files at `relative` are a version. A directory that was renamed since is that version still,
        and nothing new; one that holds links to the files of another, which is still there, is a checkpoint of its own:
        somebody may be waiting for its number."""
        places = self._versions.get(identity)
        if not places:
            # Moved to another disk with their times, as `rsync -a` does, files have other inodes and are the same.
            return bool(identity) and self._version_paths.get(relative) == without_inodes(identity)
        if relative not in places and any((self._root / place).is_dir() for place in places):
            return False
        places.add(relative)
        return True

    def file_closed(self, path: Path) -> None:
        """A writer closed the file, or it was moved in. From any thread."""
        self._notices.append((path, "closed"))

    def file_created(self, path: Path) -> None:
        """There is a new file; it may have been closed before anybody watched its directory. From any thread."""
        self._notices.append((path, "created"))

    def file_written(self, path: Path) -> None:
        """The file was written to, so its writer will be seen closing it. From any thread."""
        self._notices.append((path, "written"))

    def _apply_file_events(self) -> None:
        while self._notices:
            path, what = self._notices.popleft()
            identity, known = identify(path), self._closed_as.get(path)
            if what == "written" and known and identity and only_attributes_changed(known, identity):
                self._closed_as[path] = identity
                continue
            for table in (self._closed_as, self._unchanged, self._stable, self._unclosed):
                table.pop(path, None)
            if what == "closed" and identity:
                self._closed_as[path] = identity
            elif what == "written":
                self._unclosed[path] = None

    def scan(self, layout: Layout, timed: bool) -> dict[str, CheckpointCandidate]:
        """All checkpoints that are no versions yet, by relative path.

        A `timed` look counts for files that nobody was seen closing.
        """
        self._apply_file_events()
        found = {}
        seen: set[Path] = set()
        joined: set[str] = set()
        for directory in self._directories(self._root, 0):
            seen.add(directory)  # tables are remembered by their directory
            checkpoint = self._scan_directory(directory, timed, seen, layout)
            if directory.name == SHARDED and self._supersedes_parent(directory, checkpoint):
                joined.add(directory.parent.relative_to(self._root).as_posix())
            if checkpoint:
                found[checkpoint.relative] = checkpoint
                refused = self._refused.get(checkpoint.relative)
                if refused and not checkpoint.unfinished and refused[0] == checkpoint.identity:
                    checkpoint.refusal = refused[1]
                if not checkpoint.lacks(layout):
                    key = (checkpoint.relative, checkpoint.identity)
                    checkpoint.completed_as = self._completed.setdefault(key, len(self._completed))
        self._tables.forget_except(seen)
        for name in joined & found.keys():
            del found[name]  # the same weights, joined by the writer from pieces that are there already
        for table in (self._closed_as, self._unchanged, self._stable, self._unclosed):
            for path in table.keys() - seen:
                del table[path]
        self._headers = {key: header for key, header in self._headers.items() if key[0] in seen}
        return found

    def _supersedes_parent(self, directory: Path, checkpoint: CheckpointCandidate | None) -> bool:
        """Whether pieces lie here, new or published, from which a writer makes the checkpoint one level up."""
        if checkpoint is None:
            published = directory.relative_to(self._root).as_posix() in self._version_paths
            return published and next(directory.glob("shard-*.safetensors"), None) is not None
        return checkpoint.in_pieces

    def _directories(self, directory: Path, depth: int) -> Iterator[Path]:
        """Candidates in name order. Links are not followed: `latest` would be a second copy of a checkpoint."""
        try:
            with os.scandir(directory) as entries:
                names = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False) and e.name[0] != ".")
        except OSError:
            return  # vanished between two looks
        for name in names:
            path = directory / name
            if path.resolve() in self._exclude:
                continue
            yield path
            if depth + 1 < DEPTH:
                yield from self._directories(path, depth + 1)

    def _scan_directory(
        self, directory: Path, timed: bool, seen: set[Path], layout: Layout
    ) -> CheckpointCandidate | None:
        relative = directory.relative_to(self._root).as_posix()
        found = CheckpointCandidate(directory, _printable(relative))
        try:
            names = sorted(path.name for path in directory.iterdir())
        except PermissionError as error:  # it may hold what the trainer takes for published
            found.unfinished["directory"] = f"cannot be listed: {error.strerror}"
            return found
        except OSError:
            return None  # vanished between two looks
        paths = [directory / name for name in names if name.endswith(".safetensors") and name[0] != "."]
        is_distributed = METADATA in names or any(name.endswith(".distcp") for name in names)
        if not paths and not is_distributed:
            return None
        for name in (relative, *(path.name for path in paths)):
            if name != _printable(name):
                found.unfinished["name"] = (
                    f"{_printable(name)} is not UTF-8, as the name of a source must be: rename it"
                )
                return found
        found.has_marker = self._marker is None or (directory / self._marker).exists()
        if is_distributed:
            if paths:
                found.refusal = f"it holds {paths[0].name} and a distributed checkpoint: leave one of them"
                return found
            return self._scan_distributed(found, timed, seen, layout)
        return self._scan_files(found, paths, timed, seen, layout)

    def _scan_files(
        self, found: CheckpointCandidate, paths: list[Path], timed: bool, seen: set[Path], layout: Layout
    ) -> CheckpointCandidate | None:
        """A directory of safetensors files: of whole tensors, or of a sharded writer."""
        try:
            index = find_index(found.path)
            found.index = read_index(index) if index else None
        except (Corrupt, Incompatible) as error:
            found.unfinished["index"] = error.message
        if found.index is not None:
            named = set(found.index.values())
            paths = [path for path in paths if path.name in named]
            found.unfinished |= dict.fromkeys(named - {path.name for path in paths}, "not there yet")
        if self._is_version(found.relative, checkpoint_identity(filter(None, map(identify, paths)))):
            return None
        for path in paths:
            seen.add(path)
            self._scan_file(path, timed, found)
        if any(file.in_pieces for file in found.files.values()):
            self._judge_pieces(found, layout)
        return found

    def _judge_pieces(self, found: CheckpointCandidate, layout: Layout) -> None:
        """Files of a sharded writer, of which some are complete."""
        found.in_pieces = True
        whole = sorted(name for name, file in found.files.items() if not file.in_pieces)
        if whole:
            found.refusal = f"{shorten(whole)} hold whole tensors, its other files hold pieces"
        elif found.index is not None:
            found.refusal = "its files hold pieces, and its index names one file for each tensor"
        elif not found.unfinished and found.has_marker:
            headers = {name: file.header for name, file in found.files.items() if file.header}
            complete = self._marker is not None
            fit = self._tables.of_sharded_files(found.path, found.identity, headers, layout, complete=complete)
            self._set_pieces(found, PieceFiles(found.path, _file_identities(found), archives=False), fit)

    def _set_pieces(self, found: CheckpointCandidate, files: PieceFiles, fit: PieceFit) -> None:
        found.pieces, found.refusal = CompletePieces(files, fit), fit.refusal

    def _scan_distributed(
        self, found: CheckpointCandidate, timed: bool, seen: set[Path], layout: Layout
    ) -> CheckpointCandidate | None:
        """A directory of torch's distributed checkpoint, written or being written."""
        found.in_pieces = True
        path = found.path / METADATA
        seen.add(path)
        identity = identify(path)
        if identity is None:
            found.unfinished[METADATA] = "not there yet"
            return found
        if (version := self._by_table.get(identity)) is not None:
            now = frozenset(identify(found.path / file.name, file.name) for file in version)
            if now != version:
                found.unfinished[METADATA] = "that of a version, whose files are being rewritten or taken away"
                return found
            if self._is_version(found.relative, version):
                return None
        if not self._is_stable(path, identity, timed, found):
            return found
        table = self._tables.of_distributed(found.path, identity, layout)
        if table.fit.no_model:
            return None
        if table.fit.refusal:
            found.refusal = table.fit.refusal
            return found
        there, lacking = self._tables.check_files(found.path, table, identity, timed=timed)
        there[METADATA] = identity
        found.files = {name: CompleteFile(found.path / name, file, None) for name, file in there.items()}
        if self._is_version(found.relative, found.identity):
            return None
        found.unfinished |= lacking
        self._set_pieces(found, PieceFiles(found.path, there, archives=True), table.fit)
        return found

    def _scan_file(self, path: Path, timed: bool, found: CheckpointCandidate) -> None:
        identity = identify(path)
        if identity is None or not self._is_stable(path, identity, timed, found):
            return
        key = (path, identity)
        if key not in self._headers:
            self._headers[key] = _read_header(path)
        header = self._headers[key]
        if isinstance(header, str):
            found.unfinished[path.name] = header
        else:
            found.files[path.name] = CompleteFile(path, identity, header)

    def _is_stable(self, path: Path, identity: FileIdentity, timed: bool, found: CheckpointCandidate) -> bool:
        """Whether a file is through with being written, as far as looks and notices tell."""
        if identity not in (self._closed_as.get(path), self._stable.get(path)):
            before, looks = self._unchanged.get(path, (None, 0))
            looks = timed + (looks if before == identity else 0)
            self._unchanged[path] = (identity, looks)
            if looks < (STABLE_SCANS_UNCLOSED if path in self._unclosed else STABLE_SCANS):
                found.unfinished[path.name] = "still being written"
                found.undetermined |= before in (None, identity) and path not in self._unclosed
                return False
        self._stable[path] = identity
        return True


def _file_identities(found: CheckpointCandidate) -> dict[str, FileIdentity]:
    return {name: file.identity for name, file in found.files.items()}


def _printable(name: str) -> str:
    """`name` with escapes for bytes of a file name that are no UTF-8: no record, no log and no terminal takes those."""
    return name.encode("utf-8", "backslashreplace").decode()


def _read_header(path: Path) -> Header | str:
    """The header, or what is wrong with the file."""
    try:
        return read_header(path)
    except DcrError as error:
        return error.message.replace(f"{path} ", "")
