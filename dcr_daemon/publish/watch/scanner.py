"""Finds checkpoints below a watched directory, and what of each is complete. Reads headers and tables, never weights.

A *checkpoint* is a directory, 1 to 4 levels down, that directly holds `*.safetensors`, or a `.metadata` over `*.distcp`
files, as torch's distributed checkpoints do. A *file is complete* when it is stable (`file_stability`), its header
parses, its length is exactly what the header says, and all of it was written (`write_state`). A *checkpoint is
complete* when its complete files hold every tensor of the layout once, none of them is left over from what the
directory held before (`rewrites`), its index, if it has one, agrees, and the marker, if one is asked for, is there.
Files of a sharded writer hold pieces: together they must hold every element of every tensor once. A `.metadata` is
written last: when it is there, and all files that it names are as long as it says and no newer, a distributed
checkpoint is complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.directory import INDEX, find_index, read_index
from dcr_daemon.checkpoint.safetensors import Header, read_header
from dcr_daemon.checkpoint.weight_files import SINGLE, choose_weight_files
from dcr_daemon.errors import Corrupt, DcrError, Incompatible
from dcr_daemon.projection.files.piece_map import METADATA
from dcr_daemon.publish.inputs.tied import TiedTensors
from dcr_daemon.publish.watch.candidate import CheckpointCandidate, CompleteFile, CompletePieces
from dcr_daemon.publish.watch.file_identity import FileIdentity, checkpoint_identity, identify
from dcr_daemon.publish.watch.file_stability import OPEN, STABLE_SCANS_UNCLOSED, WRITTEN, FileStability
from dcr_daemon.publish.watch.pieces.fit import PieceFit
from dcr_daemon.publish.watch.pieces.reader import PieceFiles
from dcr_daemon.publish.watch.pieces.tables import PieceTables
from dcr_daemon.publish.watch.policy_paths import DEPTH, PolicyPaths
from dcr_daemon.publish.watch.published import FileTimes, Published, PublishedFiles
from dcr_daemon.publish.watch.rewrites import Rewrites
from dcr_daemon.publish.watch.write_state import WriteState, file_system_of
from dcr_daemon.wording import shorten

SHARDED = "sharded"  #: where torch's writer leaves the pieces from which it makes the checkpoint one level up
UNWRITTEN = "its bytes from {} on were never written: preallocated, or copied with holes (or give --marker)"
LEFT_OVER = "not written again yet: the checkpoint is being rewritten in place (touch what stays as it is)"
NOT_LAST = (
    "not newer than the files of a checkpoint that is being rewritten in place: "
    f"it is complete with the next index (touch it to say so), or without one after {STABLE_SCANS_UNCLOSED} scans"
)

_DATA_FILES = (".safetensors", ".distcp", METADATA)


@dataclass(frozen=True, slots=True)
class _Scan:
    """One scan: `timed` if it counts for files that nobody was seen closing, `seen` what it met."""

    layout: Layout
    timed: bool
    seen: set[Path] = field(default_factory=set)


class CheckpointScanner:
    """Finds checkpoints that are no versions yet. `scan` is blocking, and cheap when little has changed.

    Args:
        root: the watched directory.
        exclude: directories that are never checkpoints, nor anything in them.
        paths: which checkpoints are selected, and their steps; by default all are.
        marker: name of the file that a complete checkpoint must hold.
        ignore: globs of names outside the layout that checkpoints in pieces may hold.
        config: the model's `config.json`, for checkpoints under a training framework's names.
        tied: tensors of the layout that a checkpoint need not hold.
        kernel: is asked about files; by default about those on the file system of `root`.
        unknown_scans: of `FileStability`.

    Attributes:
        files: is told of file events.
        files_found: number of files that the last scan looked at.
        unread: what the last scan found that is passed by because it is as old as versions that were not read.
    """

    def __init__(
        self,
        root: Path,
        exclude: list[Path],
        *,
        paths: PolicyPaths | None = None,
        marker: str | None,
        ignore: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
        tied: TiedTensors | None = None,
        kernel: WriteState | None = None,
        unknown_scans: int = STABLE_SCANS_UNCLOSED,
    ) -> None:
        self._tied = tied or TiedTensors()
        self._kernel = kernel or WriteState(file_system_of(root))
        self.files = FileStability(self._kernel, unknown_scans=unknown_scans)
        self.files_found = 0
        self.unread: set[str] = set()
        self._root, self._marker, self._paths = root, marker, paths or PolicyPaths()
        self._exclude = {path.resolve() for path in exclude}
        self._tables = PieceTables(ignore, config, tied=self._tied)
        self._published = PublishedFiles(root)
        self._rewrites = Rewrites(self._published)
        self._unwritten: dict[tuple[Path, FileIdentity], str] = {}
        self._refused: dict[str, tuple[frozenset[FileIdentity], str]] = {}
        self._headers: dict[tuple[Path, FileIdentity], Header | str] = {}

    def mark_refused(self, relative: str, identity: frozenset[FileIdentity], *, why: str) -> None:
        """These files were found not to be what they claim: refuse the checkpoint until they change."""
        self._refused[relative] = identity, why

    def mark_published(self, relative: str, identity: frozenset[FileIdentity]) -> None:
        """A checkpoint is a version now: `scan` does not find it again."""
        self._published.add(relative, identity)
        self._rewrites.forget(relative)

    def mark_unread(self, published: Published) -> None:
        """What is known of the versions that are not among those marked as published."""
        self._published.newest_ns, self._published.unread_ns = published.newest_ns, published.unread_ns

    @property
    def newest_ns(self) -> int:
        """The modification time of the newest file of any version."""
        return self._published.newest_ns

    def file_times(self) -> list[FileTimes]:
        """When the files of every directory that may be a checkpoint were written."""
        found = []
        for directory in self._directories(self._root, 0):
            try:
                paths = [path for path in directory.iterdir() if path.name.endswith(_DATA_FILES)]
            except OSError:
                continue
            if times := [file.mtime_ns for path in paths if (file := identify(path))]:
                found.append(FileTimes(directory.relative_to(self._root).as_posix(), min(times), max(times)))
        return found

    @property
    def blind_spot(self) -> str:
        """Why it cannot be found out who writes to a file; empty while it can."""
        if not self._kernel.is_local:
            kind = self._kernel.file_system or "unknown"
            return f"{self._root} is on a file system ({kind}) that may have writers on other hosts"
        if self.files.unknown:
            return f"{self.files.unknown} belongs to another user"
        return ""

    def scan(self, layout: Layout, timed: bool) -> dict[str, CheckpointCandidate]:
        """All checkpoints that are no versions yet, by relative path.

        Args:
            timed: this scan counts for files that nobody was seen closing.
        """
        self.files.apply_events()
        scan, found = _Scan(layout, timed), dict[str, CheckpointCandidate]()
        self.unread = set()
        superseded: set[str] = set()
        for directory in self._directories(self._root, 0):
            scan.seen.add(directory)  # tables are remembered by their directory
            candidate = self._scan_directory(scan, directory)
            if directory.name == SHARDED and self._supersedes_parent(directory, candidate):
                superseded.add(directory.parent.relative_to(self._root).as_posix())
            if candidate:
                self._apply_history(candidate)
                found[candidate.relative] = candidate
        for name in superseded & found.keys():
            del found[name]  # the same weights, joined by the writer from pieces that are there already
        self.files_found = len(scan.seen)
        self._rewrites.forget_except(found)
        self._refused = {name: refused for name, refused in self._refused.items() if name in found}
        self._forget_except(scan.seen)
        return found

    def _apply_history(self, candidate: CheckpointCandidate) -> None:
        """What earlier scans know of a candidate: that it was refused."""
        refused = self._refused.get(candidate.relative)
        if refused and not candidate.unfinished and refused[0] == candidate.identity:
            candidate.refusal = refused[1]

    def _forget_except(self, seen: set[Path]) -> None:
        self._tables.forget_except(seen)
        self.files.forget_except(seen)
        for table in (self._headers, self._unwritten):
            for key in [key for key in table if key[0] not in seen]:
                del table[key]

    def _supersedes_parent(self, directory: Path, candidate: CheckpointCandidate | None) -> bool:
        """Whether pieces lie here, new or published, from which a writer makes the checkpoint one level up."""
        if candidate is None:
            published = self._published.newest_at(directory.relative_to(self._root).as_posix())
            return bool(published) and next(directory.glob("shard-*.safetensors"), None) is not None
        return candidate.in_pieces

    def _directories(self, directory: Path, depth: int) -> Iterator[Path]:
        """Directories in name order. Links are not followed: `latest` would be a second copy of a checkpoint."""
        try:
            with os.scandir(directory) as entries:
                names = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False) and e.name[0] != ".")
        except OSError:
            return  # vanished between two scans
        for name in names:
            path = directory / name
            if path.resolve() in self._exclude:
                continue
            yield path
            if depth + 1 < DEPTH:
                yield from self._directories(path, depth + 1)

    def _scan_directory(self, scan: _Scan, directory: Path) -> CheckpointCandidate | None:
        """The checkpoint in a directory; None if there is none, or it is a version."""
        relative = directory.relative_to(self._root).as_posix()
        if not self._paths.selects(relative):
            return None
        candidate = CheckpointCandidate(directory, _printable(relative), self._paths.step(relative), tied=self._tied)
        try:
            names = sorted(path.name for path in directory.iterdir())
        except PermissionError as error:  # it may hold what the trainer takes for published
            candidate.unfinished["directory"] = f"cannot be listed: {error.strerror}"
            return candidate
        except OSError:
            return None  # vanished between two scans
        paths = [directory / name for name in names if name.endswith(".safetensors") and name[0] != "."]
        is_distributed = METADATA in names or any(name.endswith(".distcp") for name in names)
        if not paths and not is_distributed:
            return None
        for name in (relative, *(path.name for path in paths)):
            if name != (printable := _printable(name)):
                candidate.unfinished["name"] = f"{printable} is not UTF-8, as a source's name must be: rename it"
                return candidate
        candidate.has_marker = self._marker is None or (directory / self._marker).exists()
        if not is_distributed:
            return self._scan_files(scan, candidate, paths)
        if paths:
            candidate.refusal = f"it holds {paths[0].name} and a distributed checkpoint: leave one of them"
            return candidate
        return self._scan_distributed(scan, candidate)

    def _scan_files(self, scan: _Scan, candidate: CheckpointCandidate, paths: list[Path]) -> CheckpointCandidate | None:
        """A directory of safetensors files: of whole tensors, or of a sharded writer."""
        beside = {path.name: identity for path in paths if (identity := identify(path))}
        present = self._choose_files(scan, candidate, beside)
        candidate.written_ns = max((file.mtime_ns for file in present.values()), default=0)
        if self._is_version(candidate.relative, present):
            return self._outlived(candidate, present, beside)
        for name, identity in present.items():
            if name not in candidate.files and name not in candidate.unfinished:
                self._scan_file(scan, candidate, path=candidate.path / name, identity=identity)
        if self._adds_nothing(candidate, present, layout=scan.layout):
            return None
        self._judge_rewrite(scan, candidate, present)
        if any(file.in_pieces for file in candidate.files.values()):
            self._judge_pieces(candidate, scan.layout)
        return candidate

    def _choose_files(
        self, scan: _Scan, candidate: CheckpointCandidate, present: Mapping[str, FileIdentity]
    ) -> dict[str, FileIdentity]:
        """Those of the safetensors files that are the checkpoint; notes what the index says, and what is not read."""
        name, index = "", None
        try:
            if path := find_index(candidate.path):
                name, index = path.name, read_index(path)
        except (Corrupt, Incompatible) as error:
            candidate.unfinished["index"] = error.message
        if index is not None and present and not present.keys() & set(index.values()):
            index, candidate.passed_by = None, [name]  # it has outlived its files
        single = SINGLE in present and (index is not None or len(present) > 1)
        if single:
            self._scan_file(scan, candidate, path=candidate.path / SINGLE, identity=present[SINGLE])
            file = candidate.files.get(SINGLE)
            if file is None and index is not None:  # the others may be needed, and are to be looked at as often
                for other in present.keys() - {SINGLE}:
                    scan.seen.add(candidate.path / other)
                    self.files.why_unstable(candidate.path / other, present[other], timed=scan.timed)
            single = self._holds_all(file, scan.layout) if file else index is not None
        chosen = choose_weight_files(present, index, index_name=name, single=single)
        if SINGLE not in chosen.names:
            candidate.files.pop(SINGLE, None)
            candidate.unfinished.pop(SINGLE, None)
        candidate.index = dict(index) if index is not None and chosen.by_index else None
        candidate.passed_by += chosen.passed_by
        candidate.unfinished |= {name: "not there yet" for name in chosen.names if name not in present}
        return {name: present[name] for name in chosen.names if name in present}

    def _holds_all(self, file: CompleteFile, layout: Layout) -> bool:
        held = set(file.names)
        return all(spec.name in held or self._tied.source(spec.name, held) for spec in layout)

    def _outlived(
        self, candidate: CheckpointCandidate, present: Mapping[str, FileIdentity], beside: Mapping[str, FileIdentity]
    ) -> CheckpointCandidate | None:
        """A version that hides newer files: a directory that was saved as one file, and then in shards."""
        hidden = [name for name in candidate.passed_by if name in beside]
        newer = shorten([name for name in hidden if beside[name].mtime_ns > candidate.written_ns])
        if present.keys() != {SINGLE} or len(hidden) == len(candidate.passed_by) or not newer:
            return None  # no index lists the others
        candidate.refusal = (
            f"{newer} are newer than {SINGLE}, a version that hides them from loaders: remove what is old"
        )
        return candidate

    def _is_version(self, relative: str, present: Mapping[str, FileIdentity]) -> bool:
        """Whether these files are a version, or what is left of the one that lay there."""
        if self._knows(relative, checkpoint_identity(present.values(), METADATA)):
            return True
        return self._published.contains_part(relative, present.values())

    def _knows(self, relative: str, identity: frozenset[FileIdentity]) -> bool:
        """Whether these files are a version, or may be one that was not read."""
        if self._published.contains(relative, identity):
            self._rewrites.forget(relative)
            return True
        if self._published.may_be_unread(identity):
            self.unread.add(relative)
            return True
        return False

    def _adds_nothing(
        self, candidate: CheckpointCandidate, present: Mapping[str, FileIdentity], *, layout: Layout
    ) -> bool:
        """Whether a version lies there, and beside it only files without a tensor of the layout."""
        version = self._published.newest_at(candidate.relative)
        added = present.keys() - {file.name for file in version}
        names = [candidate.files[name].names for name in added if name in candidate.files]
        held = len(names) == len(added) and version <= set(present.values())
        return bool(version) and held and not any(name in layout for file in names for name in file)

    def _scan_file(self, scan: _Scan, candidate: CheckpointCandidate, *, path: Path, identity: FileIdentity) -> None:
        scan.seen.add(path)
        if not self._is_stable(scan, candidate, path=path, identity=identity):
            return
        if (path, identity) not in self._headers:
            # Before the header is read: that reads ahead, and a hole that was read may look like written zeros.
            self._why_unwritten(path, identity)
            self._headers[path, identity] = _read_header(path)
        header = self._headers[path, identity]
        why = header if isinstance(header, str) else self._why_unwritten(path, identity)
        if isinstance(header, str) or why:
            candidate.unfinished[path.name] = why
        else:
            candidate.files[path.name] = CompleteFile(path, identity, header)

    def _is_stable(self, scan: _Scan, candidate: CheckpointCandidate, *, path: Path, identity: FileIdentity) -> bool:
        may_be_complete = self.files.may_be_complete(path, identity)
        if why := self.files.why_unstable(path, identity, timed=scan.timed):
            candidate.unfinished[path.name] = why
            candidate.undetermined |= may_be_complete and why == WRITTEN
        return not why

    def _why_unwritten(self, path: Path, identity: FileIdentity) -> str:
        """Why a file of full length is not complete; empty if it is. A marker file is believed instead."""
        if self._marker is not None:
            return ""
        if (path, identity) not in self._unwritten:
            first = self._kernel.first_unwritten(path)
            self._unwritten[path, identity] = "" if first is None else UNWRITTEN.format(first)
        return self._unwritten[path, identity]

    def _judge_rewrite(self, scan: _Scan, candidate: CheckpointCandidate, present: Mapping[str, FileIdentity]) -> None:
        """A directory that is being rewritten is not complete while it holds files of what it held before, or before
        what is written last was written."""
        complete = candidate.files
        generation = self._rewrites.update(candidate.relative, present, complete=complete, timed=scan.timed)
        if generation is None:
            return
        candidate.rewritten = True
        last = max((file.mtime_ns for file in present.values()), default=0)
        if self._marker is not None:
            candidate.has_marker = _is_newer(candidate.path / self._marker, last)
            if candidate.has_marker:
                generation.was_complete = True
                return
        for name in generation.left_over & complete.keys():
            del complete[name]
            candidate.unfinished[name] = LEFT_OVER
        if candidate.unfinished or not candidate.has_marker:
            return
        said = METADATA in present or len(present) == 1
        quiet = candidate.index is None and generation.unchanged_scans >= STABLE_SCANS_UNCLOSED
        if said or quiet or _has_newer_index(candidate.path, last):
            generation.was_complete = True
        else:
            candidate.unfinished[INDEX] = NOT_LAST

    def _judge_pieces(self, candidate: CheckpointCandidate, layout: Layout) -> None:
        """Files of a sharded writer, of which some are complete."""
        candidate.in_pieces = True
        whole = sorted(name for name, file in candidate.files.items() if not file.in_pieces)
        if whole:
            candidate.refusal = f"{shorten(whole)} hold whole tensors, its other files hold pieces"
        elif candidate.index is not None:
            candidate.refusal = "its files hold pieces, and its index names one file for each tensor"
        elif not candidate.unfinished and candidate.has_marker:
            headers = {name: file.header for name, file in candidate.files.items() if file.header}
            identities = {name: file.identity for name, file in candidate.files.items()}
            fit = self._tables.of_sharded_files(
                candidate.path, candidate.identity, headers=headers, layout=layout, complete=self._marker is not None
            )
            _set_pieces(candidate, PieceFiles(candidate.path, identities, archives=False), fit)

    def _scan_distributed(self, scan: _Scan, candidate: CheckpointCandidate) -> CheckpointCandidate | None:
        """A directory of torch's distributed checkpoint, written or being written."""
        candidate.in_pieces = True
        path = candidate.path / METADATA
        scan.seen.add(path)
        identity = identify(path)
        if identity is None:
            candidate.unfinished[METADATA] = "not there yet"
            return candidate
        candidate.written_ns = identity.mtime_ns
        if (version := self._published.with_table(identity)) is not None:
            now = frozenset(identify(candidate.path / file.name, file.name) for file in version)
            if now != version:
                candidate.unfinished[METADATA] = "that of a version, whose files are being rewritten or taken away"
                return candidate
            if self._knows(candidate.relative, version):
                return None
        if not self._is_stable(scan, candidate, path=path, identity=identity):
            return candidate
        table = self._tables.of_distributed(candidate.path, identity, layout=scan.layout)
        if table.fit.no_model:
            return None
        if table.fit.refusal:
            candidate.refusal = table.fit.refusal
            return candidate
        present, unfinished = self._tables.check_files(candidate.path, table, identity=identity, timed=scan.timed)
        present[METADATA] = identity
        candidate.written_ns = max(file.mtime_ns for file in present.values())
        candidate.files = {name: CompleteFile(candidate.path / name, file, None) for name, file in present.items()}
        if self._knows(candidate.relative, candidate.identity):
            return None
        candidate.unfinished |= unfinished
        if not unfinished:
            self._find_unwritten(scan, candidate)
            self._judge_rewrite(scan, candidate, present)
        _set_pieces(candidate, PieceFiles(candidate.path, present, archives=True), table.fit)
        return candidate

    def _find_unwritten(self, scan: _Scan, candidate: CheckpointCandidate) -> None:
        """Files of full length that somebody still writes."""
        for name, file in candidate.files.items():
            scan.seen.add(file.path)
            if self.files.is_open(file.path, file.identity):
                candidate.unfinished[name] = OPEN
            elif why := self._why_unwritten(file.path, file.identity):
                candidate.unfinished[name] = why


def _set_pieces(candidate: CheckpointCandidate, files: PieceFiles, fit: PieceFit) -> None:
    candidate.pieces, candidate.refusal = CompletePieces(files, fit), fit.refusal


def _has_newer_index(directory: Path, mtime_ns: int) -> bool:
    index = find_index(directory)
    return index is not None and _is_newer(index, mtime_ns)


def _is_newer(path: Path, mtime_ns: int) -> bool:
    """Whether the file is there, and was not written before that time."""
    identity = identify(path)
    return identity is not None and identity.mtime_ns >= mtime_ns


def _printable(name: str) -> str:
    """`name` with escapes for bytes of a file name that are not UTF-8: no record, log or terminal takes those."""
    return name.encode("utf-8", "backslashreplace").decode()


def _read_header(path: Path) -> Header | str:
    """The header, or what is wrong with the file."""
    try:
        return read_header(path)
    except DcrError as error:
        return error.message.replace(f"{path} ", "")
