"""Where staged chunks lie: a directory of this user, by default in `/dev/shm`, whose owner holds a lock on it.

The lock is a `flock` on a file in the directory. It ends with the process, however that dies, and holds across PID
namespaces that share `/dev/shm`. So the next subscriber on the host can tell the directory of a process that was killed
from that of one that runs, and removes it: nobody else would return that memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from dcr_daemon import runtime
from dcr_daemon.disk import is_at, try_lock
from dcr_daemon.errors import Incompatible, ResourceExhausted

SHARED = Path("/dev/shm")  #: Linux's tmpfs for everybody
LOCK = "owner.lock"
_REMOVED = "dcr-_removed-"  #: begins the name of a directory that is being removed; no replica's id begins with _


def open_staging(path: Path) -> Path:
    """Make the staging directory, for this user only.

    Raises:
        Incompatible: it is a link, or belongs to somebody else (`/dev/shm` is everybody's).
        ResourceExhausted: it cannot be written.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise ResourceExhausted(
            f"staging directory {path} cannot be made: {error.strerror}", hint="name one with --staging"
        ) from error
    if not _is_own(found):
        raise Incompatible(f"staging directory {path} belongs to somebody else", hint="name another with --staging")
    return path


def staging_root(state: Path) -> Path:
    """Where staging directories lie by default: in tmpfs if there is one, since staged bytes need not be durable."""
    return SHARED if os.access(SHARED, os.W_OK) else state


@contextlib.contextmanager
def default_staging(state: Path) -> Iterator[Path]:
    """The directory of the subscriber whose state is at `state`. What killed subscribers of this user have left in
    `/dev/shm` is removed.
    """
    if staging_root(state) != SHARED:
        yield state / "staging"
        return
    name = f"dcr-{state.name}-{hashlib.sha256(str(state.absolute()).encode()).hexdigest()[:12]}"
    with contextlib.ExitStack() as held:
        # Two containers that share /dev/shm may have the same path of state and the same replica id.
        while (lock := _lock(open_staging(SHARED / name), create=True)) is None:
            name = f"{name[:200]}-{runtime.nonce(4)}"
        held.callback(os.close, lock)
        remove_abandoned()
        yield SHARED / name


def remove_abandoned() -> None:
    """Remove the staging directories of processes that no longer run.

    A directory without a lock file is left alone: an older version of DCR may work in it, or it is just being made.
    """
    for path in SHARED.glob("dcr-*"):
        with contextlib.suppress(OSError):  # somebody else removes it too
            if not _is_own(path.lstat()):
                continue
            if path.name.startswith(_REMOVED):
                shutil.rmtree(path, ignore_errors=True)
            elif (lock := _lock(path)) is not None:
                try:  # renamed first: its owner may start again while the files go
                    removed = path.rename(SHARED / f"{_REMOVED}{runtime.nonce(8)}")
                    shutil.rmtree(removed, ignore_errors=True)
                finally:
                    os.close(lock)


def _lock(path: Path, *, create: bool = False) -> int | None:
    """The descriptor that holds the lock on a staging directory; None if another process holds it, or has just removed
    the directory."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    try:
        descriptor = os.open(path / LOCK, flags, 0o600)
    except FileNotFoundError:  # nobody ever locked it, or it is gone
        return None
    try:
        locked = try_lock(descriptor, path / LOCK) and is_at(descriptor, path / LOCK)
    except BaseException:
        os.close(descriptor)
        raise
    if locked:
        return descriptor
    os.close(descriptor)
    return None


def _is_own(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
