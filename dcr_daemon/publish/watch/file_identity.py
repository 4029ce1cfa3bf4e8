"""Identities of files and checkpoints: what must not change between finding a file, reading it, and sealing it."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

MAX_FILES_LISTED = 4096  #: files of one checkpoint that are recorded one by one; a seal has room for some thousands
MAX_NAME_BYTES = (
    256 << 10
)  #: of all their names, as they are recorded: a seal of at most 1 MiB holds more than the source
_MANY_FILES = re.compile(r"\d+ files$")


class FileIdentity(msgspec.Struct, frozen=True, order=True):
    """One file as it was read. Recorded in the seal. `name` is relative to the checkpoint's directory."""

    name: str
    size: int
    mtime_ns: int
    inode: int


def identify(path: Path, name: str = "") -> FileIdentity | None:
    """Identity of a file by its name (or the one given); None if it is gone."""
    try:
        return identity_of(name or path.name, path.stat())
    except OSError:
        return None


def identity_of(name: str, stat: os.stat_result) -> FileIdentity:
    return FileIdentity(name, stat.st_size, stat.st_mtime_ns, stat.st_ino)


def checkpoint_identity(files: Iterable[FileIdentity], listed: str = "") -> frozenset[FileIdentity]:
    """The identity of a checkpoint: those of its files. Of too many, a digest stands for all but the file `listed`."""
    known = sorted(files)
    if len(known) <= MAX_FILES_LISTED and sum(len(msgspec.json.encode(file.name)) for file in known) <= MAX_NAME_BYTES:
        return frozenset(known)
    alone, rest = [file for file in known if file.name == listed], [file for file in known if file.name != listed]
    times = max(file.mtime_ns for file in rest)
    sizes = _digest([[file.name, file.size, file.mtime_ns] for file in rest])
    return frozenset([*alone, FileIdentity(f"{len(rest)} files", sizes, times, _digest([f.inode for f in rest]))])


def newest_time(files: Iterable[FileIdentity]) -> int:
    """The latest modification time (ns) of some files; 0 of none."""
    return max((file.mtime_ns for file in files), default=0)


def is_digest(file: FileIdentity) -> bool:
    """Whether this stands for many files, as `checkpoint_identity` makes it."""
    return bool(_MANY_FILES.match(file.name))


def _digest(table: list[Any]) -> int:
    """63 bits: what a seal's numbers hold."""
    return int.from_bytes(hashlib.sha256(msgspec.json.encode(table)).digest()[:8], "little") >> 1


def without_inodes(identity: frozenset[FileIdentity]) -> frozenset[FileIdentity]:
    """What stays the same when the files are copied to another file system with their times."""
    return frozenset(msgspec.structs.replace(file, inode=0) for file in identity)


def only_attributes_changed(known: FileIdentity, now: FileIdentity) -> bool:
    """Whether a closed file only got another mode or an older time, as copying does last. inotify reports a write."""
    return (known.inode, known.size) == (now.inode, now.size) and now.mtime_ns <= known.mtime_ns


def is_same_content(known: FileIdentity | None, now: FileIdentity | None) -> bool:
    """Whether nobody wrote to a file between two looks at its name: moved to another disk, it has another inode.

    An older time is no proof of that: tools that copy over a file set the time of the source.
    """
    return known is not None and now is not None and (known.size, known.mtime_ns) == (now.size, now.mtime_ns)
