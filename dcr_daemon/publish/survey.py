"""What lies below a watched directory, and what of it is complete. Reads headers, never weights.

A *checkpoint* is a directory, 1 to 4 levels down, that directly holds `*.safetensors`. A *file is complete* when its
writer closed it (or moved it in), or when two timed looks in a row found it unchanged and nobody was seen writing to
it; and its header parses and its length is exactly what the header says. A *checkpoint is complete* when its complete
files hold every tensor of the layout once, its index, if it has one, agrees, and the marker, if one is asked for, is
there.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.directory import find_index, read_index
from dcr_daemon.checkpoint.safetensors import Header, read_header
from dcr_daemon.errors import Corrupt, DcrError, Incompatible

DEPTH = 4  #: levels below the watched directory at which checkpoints are looked for
LOOKS = 2  #: timed looks that must find a file unchanged, if nobody was seen writing to it
LOOKS_AT_WRITTEN = 30  #: the same for one that was written to and never closed: a stalled writer, or a lost notice
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")


class FileIdentity(msgspec.Struct, frozen=True, order=True):
    """What must not change between reading a file and sealing what was read. Recorded in the seal."""

    name: str
    size: int
    mtime_ns: int
    inode: int


def identify(path: Path) -> FileIdentity | None:
    """Identity of a file by its name; None if it is gone."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return FileIdentity(path.name, stat.st_size, stat.st_mtime_ns, stat.st_ino)


def number_in(relative: str) -> int | None:
    """The last integer in a path: `checkpoint-40`, `global_step_7/actor/huggingface`."""
    digits = re.findall(r"\d+", relative)
    return int(digits[-1]) if digits else None


@dataclass(frozen=True, slots=True)
class CompleteFile:
    path: Path
    identity: FileIdentity
    header: Header


@dataclass(slots=True, eq=False)
class Found:
    """One checkpoint directory as the last look saw it.

    `files` are the complete ones by name, `waiting` says by name what the others lack. `index` is the weight map of
    its index file, `marked` whether the marker is there, `completion` its place among those that became complete.
    `fresh` means that a file is here that may well be complete, and was not looked at often enough to tell.
    """

    path: Path
    relative: str
    files: dict[str, CompleteFile] = field(default_factory=dict)
    waiting: dict[str, str] = field(default_factory=dict)
    index: dict[str, str] | None = None
    marked: bool = True
    completion: int = 0
    fresh: bool = False

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
        return frozenset(file.identity for file in self.files.values())

    def lacks(self, layout: Layout) -> str:
        """What this checkpoint still waits for; empty if it is complete."""
        if self.waiting:
            return "; ".join(f"{name}: {why}" for name, why in sorted(self.waiting.items()))
        if not self.marked:
            return "its marker file"
        if missing := self.missing(layout):
            return f"tensors {', '.join(missing[:5])}" + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        return ""

    def missing(self, layout: Layout) -> list[str]:
        """Layout tensors that no complete file holds."""
        held = {name for file in self.files.values() for name in file.header.spans}
        return [spec.name for spec in layout if spec.name not in held]

    def ended(self, *, marker: bool) -> bool:
        """Whether no more files are to come, as far as anything says so: then what is missing is an error."""
        if self.waiting or not self.files or not self.marked:
            return False
        numbered = [match for name in self.files if (match := _SHARD.search(name))]
        all_shards = bool(numbered) and len({m[1] for m in numbered}) == int(numbered[0][2])
        # A marker may be left over from what this directory held before: shards that count themselves know better.
        marked = marker and not numbered
        return marked or self.index is not None or all_shards or "model.safetensors" in self.files

    def check_index(self) -> None:
        """Raise `Incompatible` if the index and the (complete) files disagree."""
        if self.index is None:
            return
        homes = {name: file.path.name for file in self.files.values() for name in file.header.spans}
        if wrong := sorted(n for n in self.index.keys() | homes.keys() if self.index.get(n) != homes.get(n)):
            raise Incompatible(
                f"the index of {self.path} disagrees with its files about {', '.join(wrong[:20])}",
                hint="nothing of it is published; write the checkpoint again, or remove it",
            )


class Survey:
    """Remembers what earlier looks saw. `look` is blocking and cheap when little has changed.

    Args:
        root: the watched directory.
        exclude: directories that are never checkpoints, nor anything in them.
        marker: name of the file that a complete checkpoint must hold.
    """

    def __init__(self, root: Path, exclude: list[Path], marker: str | None) -> None:
        self._root, self._marker = root, marker
        self._exclude = {path.resolve() for path in exclude}
        self._notices: deque[tuple[Path, str]] = deque()
        self._versions: dict[frozenset[FileIdentity], set[str]] = {}
        self._places: dict[str, frozenset[FileIdentity]] = {}
        self._closed: dict[Path, FileIdentity] = {}
        self._looked: dict[Path, tuple[FileIdentity, int]] = {}
        self._written: dict[Path, None] = {}
        self._settled: dict[Path, FileIdentity] = {}
        self._headers: dict[tuple[Path, FileIdentity], Header | str] = {}
        self._completions: dict[tuple[str, frozenset[FileIdentity]], int] = {}

    def published(self, relative: str, identity: frozenset[FileIdentity]) -> None:
        """A checkpoint is a version now, and is not to be found again."""
        self._versions.setdefault(identity, set()).add(relative)
        self._places[relative] = _elsewhere(identity)

    def _is_version(self, relative: str, identity: frozenset[FileIdentity]) -> bool:
        """Whether the very files at `relative` are a version. A directory that was renamed since is that version still,
        and nothing new; one that holds links to the files of another, which is still there, is a checkpoint of its own:
        somebody may be waiting for its number."""
        places = self._versions.get(identity)
        if not places:
            # Moved to another disk with their times, as `rsync -a` does, files have other inodes and are the same.
            return bool(identity) and self._places.get(relative) == _elsewhere(identity)
        if relative not in places and any((self._root / place).is_dir() for place in places):
            return False
        places.add(relative)
        return True

    def closed(self, path: Path) -> None:
        """A writer closed the file, or it was moved in. From any thread."""
        self._notices.append((path, "closed"))

    def created(self, path: Path) -> None:
        """There is a new file; it may have been closed before anybody watched its directory. From any thread."""
        self._notices.append((path, "created"))

    def touched(self, path: Path) -> None:
        """The file was written to, so its writer will be seen closing it. From any thread."""
        self._notices.append((path, "written"))

    def _take_notices(self) -> None:
        while self._notices:
            path, what = self._notices.popleft()
            identity, known = identify(path), self._closed.get(path)
            if what == "written" and known and identity and _only_attributes(known, identity):
                self._closed[path] = identity
                continue
            for table in (self._closed, self._looked, self._settled, self._written):
                table.pop(path, None)
            if what == "closed" and identity:
                self._closed[path] = identity
            elif what == "written":
                self._written[path] = None

    def look(self, layout: Layout, timed: bool) -> dict[str, Found]:
        """All checkpoints that are no versions yet, by relative path.

        A `timed` look counts for files that nobody was seen closing.
        """
        self._take_notices()
        found = {}
        seen: set[Path] = set()
        for directory in self._directories(self._root, 0):
            checkpoint = self._look_at(directory, timed, seen)
            if checkpoint:
                found[checkpoint.relative] = checkpoint
                if not checkpoint.lacks(layout):
                    key = (checkpoint.relative, checkpoint.identity)
                    checkpoint.completion = self._completions.setdefault(key, len(self._completions))
        for table in (self._closed, self._looked, self._settled, self._written):
            for path in table.keys() - seen:
                del table[path]
        self._headers = {key: header for key, header in self._headers.items() if key[0] in seen}
        return found

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

    def _look_at(self, directory: Path, timed: bool, seen: set[Path]) -> Found | None:
        relative = directory.relative_to(self._root).as_posix()
        found = Found(directory, _printable(relative))
        try:
            paths = sorted(
                path for path in directory.iterdir() if path.suffix == ".safetensors" and path.name[0] != "."
            )
        except PermissionError as error:  # it may hold what the trainer takes for published
            found.waiting["directory"] = f"cannot be listed: {error.strerror}"
            return found
        except OSError:
            return None  # vanished between two looks
        if not paths:
            return None
        for name in (relative, *(path.name for path in paths)):
            if name != _printable(name):
                found.waiting["name"] = f"{_printable(name)} is not UTF-8, as the name of a source must be: rename it"
                return found
        found.marked = self._marker is None or (directory / self._marker).exists()
        try:
            index = find_index(directory)
            found.index = read_index(index) if index else None
        except (Corrupt, Incompatible) as error:
            found.waiting["index"] = error.message
        if found.index is not None:
            named = set(found.index.values())
            paths = [path for path in paths if path.name in named]
            found.waiting |= dict.fromkeys(named - {path.name for path in paths}, "not there yet")
        if self._is_version(found.relative, frozenset(filter(None, map(identify, paths)))):
            return None
        for path in paths:
            seen.add(path)
            self._look_at_file(path, timed, found)
        return found

    def _look_at_file(self, path: Path, timed: bool, found: Found) -> None:
        identity = identify(path)
        if identity is None:
            return
        if identity not in (self._closed.get(path), self._settled.get(path)):
            before, looks = self._looked.get(path, (None, 0))
            looks = timed + (looks if before == identity else 0)
            self._looked[path] = (identity, looks)
            if looks < (LOOKS_AT_WRITTEN if path in self._written else LOOKS):
                found.waiting[path.name] = "still being written"
                found.fresh |= before in (None, identity) and path not in self._written
                return
        self._settled[path] = identity
        key = (path, identity)
        if key not in self._headers:
            self._headers[key] = _header(path)
        header = self._headers[key]
        if isinstance(header, str):
            found.waiting[path.name] = header
        else:
            found.files[path.name] = CompleteFile(path, identity, header)


def _elsewhere(identity: frozenset[FileIdentity]) -> frozenset[FileIdentity]:
    """What is left of it on another file system."""
    return frozenset(msgspec.structs.replace(file, inode=0) for file in identity)


def _only_attributes(known: FileIdentity, now: FileIdentity) -> bool:
    """Whether a closed file got another mode or an older time, as copying does last: the same notice as for a write."""
    return (known.inode, known.size) == (now.inode, now.size) and now.mtime_ns <= known.mtime_ns


def _printable(name: str) -> str:
    """`name` with escapes for bytes of a file name that are no UTF-8: no record, no log and no terminal takes those."""
    return name.encode("utf-8", "backslashreplace").decode()


def _header(path: Path) -> Header | str:
    """The header, or what is wrong with the file."""
    try:
        return read_header(path)
    except DcrError as error:
        return error.message.replace(f"{path} ", "")
