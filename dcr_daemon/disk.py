"""The one door to durable files: whole or not at all, and durable when it says so.

Every step passes a failpoint, `disk.<site>.<step>`, so that a crash and a full disk can be tried at each, and tells
the runtime what has become durable. Nothing here decides what a failed write means: callers raise `disk_error`.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from dcr_daemon import runtime
from dcr_daemon.errors import ResourceExhausted

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
_STARVED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


def write_atomically(path: Path, body: bytes | memoryview, *, site: str, durable: bool = True) -> None:
    """Put a file under its name when all of it is there; what stood there before is replaced at that instant.

    Args:
        path: in an existing directory.
        body: all of it.
        site: one word for the failpoints: write, sync, rename, synced.
        durable: fsync the file before it gets its name, and the name afterwards. Without, a crash of the machine may
            leave the old file, none, or bytes that are not these: only for what is judged again whenever it is used.

    Raises:
        OSError: it was not written, or is perhaps not durable; the file under `path` is the old or the new one.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        runtime.failpoint(f"disk.{site}.write")
        with temporary.open("wb") as file:
            file.write(body)
            if durable:
                file.flush()
                sync_file(file.fileno(), temporary, site=site)
        runtime.failpoint(f"disk.{site}.rename")
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent, site=site)


def sync_file(descriptor: int, path: Path, *, site: str) -> None:
    """Make what was written to a file durable; its name may not be yet."""
    runtime.failpoint(f"disk.{site}.sync")
    os.fsync(descriptor)
    runtime.synced(path)


def sync_directory(path: Path, *, site: str) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    runtime.synced(path)
    runtime.failpoint(f"disk.{site}.synced")


def disk_full(error: OSError) -> bool:
    """Whether a write failed for want of room, and not of a disk or of permission."""
    return error.errno in _DISK_FULL


def out_of_handles(error: OSError) -> bool:
    """Whether a file was not opened for want of descriptors or memory: that says nothing about the file."""
    return error.errno in _STARVED


def disk_error(error: OSError, path: Path) -> ResourceExhausted:
    """The error to raise for a failed write, whatever was in its way: a disk that is full, read-only or broken."""
    if disk_full(error):
        return ResourceExhausted(f"no space left to write {path}", hint="free space there or point it elsewhere")
    reason = error.strerror or str(error)
    if out_of_handles(error):
        return ResourceExhausted(
            f"cannot open {path}: {reason}", hint="raise this process's limits on open files and memory"
        )
    return ResourceExhausted(f"cannot write {path}: {reason}", hint="look at that disk and its permissions")
