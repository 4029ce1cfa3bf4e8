"""What must not change between finding a file, reading it, and sealing what was read."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

MAX_FILES_LISTED = 4096  #: files of one checkpoint that are recorded one by one; a seal has room for some thousands
_MANY_FILES = re.compile(r"\d+ files$")
_MODEL_INDEX = re.compile(r"/pytorch_model_fsdp_\d+$")


class FileIdentity(msgspec.Struct, frozen=True, order=True):
    """What must not change between reading a file and sealing what was read. Recorded in the seal.

    `name` is relative to the checkpoint's directory.
    """

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


def checkpoint_identity(files: Iterable[FileIdentity], apart: str = "") -> frozenset[FileIdentity]:
    """The identity of a checkpoint: its files', or of too many one that stands for all but the file called `apart`."""
    known = sorted(files)
    if len(known) <= MAX_FILES_LISTED:
        return frozenset(known)
    alone, rest = [file for file in known if file.name == apart], [file for file in known if file.name != apart]
    times = max(file.mtime_ns for file in rest)
    sizes = _digest([[file.name, file.size, file.mtime_ns] for file in rest])
    return frozenset([*alone, FileIdentity(f"{len(rest)} files", sizes, times, _digest([f.inode for f in rest]))])


def is_digest(file: FileIdentity) -> bool:
    """Whether it is no file, but what `checkpoint_identity` makes of many."""
    return bool(_MANY_FILES.match(file.name))


def _digest(table: list[Any]) -> int:
    """63 bits: what a seal's numbers hold."""
    return int.from_bytes(hashlib.sha256(msgspec.json.encode(table)).digest()[:8], "little") >> 1


def without_inodes(identity: frozenset[FileIdentity]) -> frozenset[FileIdentity]:
    """What is left of it on another file system."""
    return frozenset(msgspec.structs.replace(file, inode=0) for file in identity)


def only_attributes_changed(known: FileIdentity, now: FileIdentity) -> bool:
    """Whether a closed file got another mode or an older time, as copying does last: the same notice as for a write."""
    return (known.inode, known.size) == (now.inode, now.size) and now.mtime_ns <= known.mtime_ns


def number_in(relative: str) -> int | None:
    """The last integer in a path: `checkpoint-40`, `global_step_7/actor/huggingface`, and
    `checkpoint-40/pytorch_model_fsdp_0`, as accelerate numbers its models."""
    digits = re.findall(r"\d+", _MODEL_INDEX.sub("", relative))
    return int(digits[-1]) if digits else None
