"""The shards of a checkpoint directory as files that may be written in place, without an effect on anything else.

A checkpoint that an operator names may consist of links: symbolic links into a download cache, hard links to a base.
`own_files` replaces each such file by a copy before the first write (must E8). A complete copy takes the place of its
link by a rename, so a kill leaves every file with its content, and the next call continues.

`Shards` are the open files. They are written by `pwrite` and not through a map, since a full disk must be an error and
not a SIGBUS: a hole needs space at its first write, and an extent that is shared with a reflink copy does too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Self

from dcr_daemon import runtime
from dcr_daemon.checkpoint.directory import tensor_files
from dcr_daemon.checkpoint.safetensors import SafetensorsFile
from dcr_daemon.disk import disk_error, reserve, sync_directory, sync_file
from dcr_daemon.errors import Corrupt, EngineRefused, ResourceExhausted
from dcr_daemon.events import Emit, Waiting

REPORT = 5.0  #: seconds between two reports of a long copy
_FICLONE = 0x40049409  #: ioctl of Linux: share the extents of another file
_BLOCK = 16 << 20


class Shards:
    """Every shard of a checkpoint, open for writing; a context manager."""

    def __init__(self, path: Path) -> None:
        self._home: dict[str, SafetensorsFile] = {}
        self._files: list[SafetensorsFile] = []
        with contextlib.ExitStack() as opened:
            for shard in tensor_files(path):
                file = opened.enter_context(SafetensorsFile(shard, writable=True))
                self._files.append(file)
                self._home.update({spec.name: file for spec in file.specs})
            self._opened = opened.pop_all()

    def home(self, name: str) -> SafetensorsFile:
        """The file that holds a tensor."""
        if name not in self._home:
            raise Corrupt(f"tensor {name} is no longer in the directory", hint="empty it, then start again")
        return self._home[name]

    def sync(self) -> None:
        for file in self._files:
            file.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


def own_files(files: Sequence[Path], scratch: Path, *, emit: Emit) -> bool:
    """Make files that only this directory names, and reserve the disk space of all of them.

    Args:
        files: plain files, or links to some.
        scratch: a directory on their file system; incomplete copies are `.*.partial` in it.

    Returns:
        Whether one was replaced by a copy.

    Raises:
        ResourceExhausted: the disk has no room. Every file has the content that it had.
        EngineRefused: a file was changed by somebody else while it was copied.
    """
    shared = [path for path in files if path.is_symlink() or path.stat().st_nlink > 1]
    try:
        if shared:
            _Copying(shared, scratch, emit).run()
        for path in files:
            with path.open("r+b") as file:
                reserve(file.fileno())
    except OSError as error:
        raise disk_error(error, scratch.parent) from error
    return bool(shared)


class _Copying:
    """One replacement of links by copies: `total` bytes, of which `done` are copied."""

    def __init__(self, files: Sequence[Path], scratch: Path, emit: Emit) -> None:
        self._files, self._scratch, self._emit = files, scratch, emit
        self._total = sum(path.stat().st_size for path in files)
        self._done = 0
        self._reported = runtime.monotonic()

    def run(self) -> None:
        for path in self._files:
            copy = self._scratch / f".{path.name}.partial"
            with path.open("rb") as source, copy.open("wb") as out:
                before = os.fstat(source.fileno())
                if not _reflink(source, out):
                    self._check_space()
                    self._copy(source, out)
                after = os.fstat(source.fileno())
                if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                    raise EngineRefused(f"{path} was changed while it was copied", hint="attach again to sum it anew")
                os.fchmod(out.fileno(), before.st_mode & 0o777 | 0o600)
                sync_file(out.fileno(), copy, site="shards")
            self._done += before.st_size
            runtime.failpoint("engine.dir.copied")
            copy.replace(path)
            runtime.failpoint("engine.dir.owned")
        sync_directory(self._files[0].parent, site="shards")

    def _check_space(self) -> None:
        """Before a long copy: is there room for what remains?"""
        there, needed = os.statvfs(self._scratch), self._total - self._done
        if there.f_bavail * there.f_frsize < needed:
            raise ResourceExhausted(
                f"{self._scratch.parent} holds links to files of others; copies of them need {needed} bytes, and "
                f"{there.f_bavail * there.f_frsize} are free",
                hint="free space there, or name a directory on another disk",
            )

    def _copy(self, source: BinaryIO, out: BinaryIO) -> None:
        size, place = os.fstat(source.fileno()).st_size, 0
        reserve(out.fileno(), size)
        while place < size and (block := os.pread(source.fileno(), _BLOCK, place)):
            runtime.failpoint("disk.shards.write")
            out.write(block)
            place += len(block)
            if runtime.monotonic() - self._reported >= REPORT:
                self._reported = runtime.monotonic()
                what = f"copies of the files that {self._scratch.parent} links to"
                self._emit(Waiting(what=f"{what}: {self._done + place} of {self._total} bytes"))
        out.flush()


def _reflink(source: BinaryIO, out: BinaryIO) -> bool:
    """Make `out` a copy that shares its extents with `source`; False where the file system cannot."""
    try:
        fcntl.ioctl(out.fileno(), _FICLONE, source.fileno())
    except OSError:
        return False
    return True
