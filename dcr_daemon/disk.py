"""Single access point for writing durable files: atomically, with fsync of the file and of its directory.

Every step passes a failpoint, `disk.<site>.<step>`, at which tests crash the process or fill the disk, and reports to
the runtime what is durable. The functions raise `OSError`; a caller for which that is final raises `disk_error`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from dcr_daemon import runtime
from dcr_daemon.errors import ResourceExhausted

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
_STARVED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


def write_atomically(path: Path, body: bytes | memoryview, *, site: str, durable: bool = True) -> None:
    """Write a file under a temporary name and rename it; the rename replaces an older file in one step.

    Args:
        path: in an existing directory.
        body: the whole content.
        site: one word for the failpoints: write, sync, rename, synced.
        durable: fsync the file before the rename, and the directory afterwards. With False, a crash of the machine may
            leave the old file, no file, or other bytes: only for files that are verified whenever they are read.

    Raises:
        OSError: the write failed, or it may not be durable; `path` holds the old or the new file, complete.
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


def reserve(descriptor: int, size: int | None = None) -> None:
    """Reserve the disk space of a file's first `size` bytes (default: all), so that no later write of them lacks it.

    A file without holes is left alone: where a file system cannot reserve, the C library writes to every block instead.

    Raises:
        OSError: the disk is full, or cannot reserve.
    """
    have = os.fstat(descriptor).st_size
    size = have if size is None else size
    if size and (have < size or os.lseek(descriptor, 0, os.SEEK_HOLE) < size):
        os.posix_fallocate(descriptor, 0, size)


def sync_file(descriptor: int, path: Path, *, site: str) -> None:
    """Make the content of a file durable (fsync). Its name may not be durable yet."""
    runtime.failpoint(f"disk.{site}.sync")
    os.fsync(descriptor)
    runtime.synced(path)


def sync_directory(path: Path, *, site: str) -> None:
    """Make the names in a directory durable (fsync)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    runtime.synced(path)
    runtime.failpoint(f"disk.{site}.synced")


def try_lock(descriptor: int, path: Path) -> bool:
    """Lock the open file or directory `path` (`flock`) until its descriptor is closed; False if another process has it
    locked.

    Raises:
        ResourceExhausted: its file system cannot lock, or not now.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ResourceExhausted(
            f"{path} cannot be locked: {error.strerror}",
            hint="use a directory on a file system that has locks: a local one, or NFS with its lock service running",
        ) from error
    return True


def is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one at `path` now. One that was removed meanwhile can be locked too."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def disk_full(error: OSError) -> bool:
    """Whether a write failed because the disk or the quota is full."""
    return error.errno in _DISK_FULL


def out_of_handles(error: OSError) -> bool:
    """Whether a file could not be opened because descriptors or memory ran out. That says nothing about the file."""
    return error.errno in _STARVED


def disk_error(error: OSError, path: Path) -> ResourceExhausted:
    """The error for a failed write: the disk is full, read-only or broken, or the process is out of descriptors."""
    if disk_full(error):
        return ResourceExhausted(
            f"no space left to write {path}", hint="free space there, or configure another directory"
        )
    reason = error.strerror or str(error)
    if out_of_handles(error):
        return ResourceExhausted(
            f"cannot open {path}: {reason}", hint="raise this process's limits on open files and memory"
        )
    return ResourceExhausted(f"cannot write {path}: {reason}", hint="check that disk and its permissions")
