"""A stream in a directory: `file:///absolute/directory`.

Promises: an object appears under its name whole or not at all, whatever is killed when (must L4): its bytes are
written and fsynced under a temporary name, `link()` gives the final one and fails if it is taken, and every directory
on the way is fsynced before `create` answers. Needs a file system with hard links and working fsync; over NFS,
`link()` is the one operation that is atomic. Temporaries live in a hidden directory and never show in a listing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from dcr_daemon import runtime
from dcr_daemon.disk import sync_directory, sync_file
from dcr_daemon.errors import (
    Corrupt,
    DcrError,
    Incompatible,
    KeyNotFound,
    ResourceExhausted,
    StoreUnavailable,
    UsageError,
)
from dcr_daemon.events import Emit, discard
from dcr_daemon.store.instrumented import instrumented
from dcr_daemon.store.keys import check_key, check_prefix, is_key
from dcr_daemon.store.partial import PartialFile
from dcr_daemon.store.port import Entry, Outcome, raise_refused
from dcr_daemon.store.retry import RetryPolicy, Transient, retry

T = TypeVar("T")

TEMPORARIES = ".dcr-tmp"
THREADS = 8
LIST_BATCH = 1000

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_LINKS = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_PASSING = {errno.EAGAIN, errno.EBUSY, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ETIMEDOUT}


class FileStore:
    """A `Store` in a directory, which need not exist before the first `create`."""

    def __init__(self, root: Path, *, emit: Emit = discard, patience: RetryPolicy | None = None) -> None:
        self.root = root
        self.url = root.as_uri()
        self._emit = emit
        self._patience = patience or RetryPolicy(seconds=10.0)
        self._workers = runtime.Workers(THREADS)
        self._swept = False

    async def get(self, key: str, *, limit: int, keep: PartialFile | None = None) -> bytes:
        path = self._path(key)
        with instrumented(self._emit, "get") as request:
            data = await self._retry("read", path, function=partial(self._read, key, path, limit))
            request.bytes = len(data)
            return data

    async def create(self, key: str, body: bytes | memoryview) -> Outcome:
        path = self._path(key)
        with instrumented(self._emit, "create") as request:
            request.bytes = memoryview(body).nbytes
            outcome = await self._workers.run(self._create, path, body)
            request.outcome = outcome.value
            return outcome

    async def overwrite(self, key: str, body: bytes) -> None:
        path = self._path(key)
        with instrumented(self._emit, "overwrite") as request:
            request.bytes = len(body)
            await self._retry("replace", path, function=partial(self._replace, path, body))

    async def list(self, prefix: str) -> AsyncIterator[Entry]:
        parent, slash, begins = check_prefix(prefix).rpartition("/")
        entries = self._walk(parent + slash, begins)
        while True:
            with instrumented(self._emit, "list"):
                batch = await self._retry(
                    "list",
                    self.root / parent,
                    function=lambda: list(islice(entries, LIST_BATCH)),
                    # A generator that raised is spent: asked again, it would pass for a complete listing.
                    patience=RetryPolicy(seconds=0),
                )
            for entry in batch:
                yield entry
            if len(batch) < LIST_BATCH:
                return

    async def delete(self, keys: Iterable[str]) -> None:
        refused: dict[str, Incompatible] = {}
        for key in keys:
            path = self._path(key)
            try:
                with instrumented(self._emit, "delete"):
                    await self._retry("delete", path, function=partial(self._unlink, path))
            except Incompatible as error:
                refused[key] = error
        raise_refused(refused)

    async def close(self) -> None:
        self._workers.close()

    async def _retry(
        self, verb: str, path: Path, *, function: Callable[[], T], patience: RetryPolicy | None = None
    ) -> T:
        """Run `function` on a thread; errors of the file system that may pass are retried."""

        def once() -> T:
            try:
                return function()
            except OSError as error:
                if error.errno in _PASSING:
                    raise Transient(str(error)) from error
                raise _refusal(error, verb, path) from error

        return await retry(
            lambda _: self._workers.run(once),
            what=f"{verb} {path}",
            patience=patience or self._patience,
            gate=nullcontext(),
            emit=self._emit,
        )

    # Below here: blocking, on a thread.

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _read(self, key: str, path: Path, limit: int) -> bytes:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            raise KeyNotFound(key) from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _strange(path) from error
            raise
        try:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                raise KeyNotFound(key)
            if not stat.S_ISREG(status.st_mode):
                raise _strange(path)
            if status.st_size > limit:
                raise Corrupt(
                    f"{path} has {status.st_size} bytes, at most {limit} were expected",
                    hint="the object was damaged or is not what its name says",
                )
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read(status.st_size)
        finally:
            os.close(descriptor)

    def _create(self, path: Path, body: bytes | memoryview) -> Outcome:
        try:
            with self._temporary(body) as temporary:
                runtime.failpoint("store.file.written")
                return self._link(temporary, path)
        except OSError as error:
            # Nothing exists under the final name: `_link` lets no error escape after it may have made it.
            if error.errno in _FULL | _DENIED | _NO_LINKS | {errno.ENAMETOOLONG, errno.ENOTDIR}:
                raise _refusal(error, "create", path) from error
            return Outcome.UNKNOWN

    def _link(self, temporary: Path, path: Path) -> Outcome:
        """Give `temporary` its final name if that is free, durably.

        Retention prunes empty directories, so a parent may vanish between making it and linking into it: a few
        tries, each of which either links or changes nothing.
        """
        for _ in range(8):
            try:
                os.link(temporary, path, follow_symlinks=False)
            except FileNotFoundError:
                with suppress(FileNotFoundError):
                    path.parent.mkdir(parents=True, exist_ok=True)
                continue
            except FileExistsError:
                if path.is_dir():
                    raise UsageError(f"{path} is a directory: no key is the beginning of another") from None
                outcome = Outcome.LOST
            else:
                outcome = Outcome.WON
            runtime.failpoint("store.file.linked")
            # The loser syncs too: it is about to act on the winner's object, which must then survive a power cut.
            return outcome if self._sync_directories(path) else Outcome.UNKNOWN
        return Outcome.UNKNOWN

    def _replace(self, path: Path, body: bytes) -> None:
        with self._temporary(body) as temporary:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.replace(path)

    @contextmanager
    def _temporary(self, body: bytes | memoryview) -> Iterator[Path]:
        """A file with `body`, fsynced, that is gone afterwards.

        Its writer holds a lock on it as long as it lives; a temporary that can be locked by somebody else was left
        by a dead process. That, and no clock (must L8), tells which ones to sweep.
        """
        directory = self.root / TEMPORARIES
        self._prepare(directory)
        while True:
            path = directory / runtime.nonce(16)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                locked = _lock(descriptor, wait=True)
                if locked and os.fstat(descriptor).st_nlink == 0:
                    continue  # swept between its creation and the lock
                try:
                    runtime.failpoint("disk.object.write")
                    view = memoryview(body).cast("B")
                    while view:
                        view = view[file.write(view) :]
                    sync_file(descriptor, path, site="object")
                    yield path
                finally:
                    # One that cannot be removed is swept later. An error here would belie a name that was given.
                    with suppress(OSError):
                        path.unlink()
            return

    def _prepare(self, directory: Path) -> None:
        if not directory.is_dir():
            missing = [parent for parent in self.root.parents if not parent.exists()]
            directory.mkdir(parents=True, exist_ok=True)
            for parent in (*missing, *self.root.parents[len(missing) : len(missing) + 1]):
                sync_directory(parent, site="object")
        if not self._swept:
            self._swept = True
            for path in directory.iterdir():
                with suppress(OSError), path.open("r+b") as file:  # hygiene only: what cannot be opened may stay
                    if _lock(file.fileno(), wait=False):
                        path.unlink()

    def _sync_directories(self, path: Path) -> bool:
        """Make the name of `path` durable, up to the root: another process may have made any of the directories."""
        directory = path.parent
        try:
            while True:
                sync_directory(directory, site="object")
                if directory == self.root:
                    return True
                directory = directory.parent
        except OSError:
            return False

    def _walk(self, parent: str, begins: str) -> Iterator[Entry]:
        """Objects below `parent` whose next name begins with `begins`, in key order, one directory in memory."""
        try:
            with os.scandir(self.root / parent) as entries:
                # A directory sorts where its keys do: "a-b" before "a/b", as a bucket lists them.
                found = [
                    (entry.name + "/" * entry.is_dir(follow_symlinks=False), entry)
                    for entry in entries
                    if entry.name.startswith(begins) and is_key(parent + entry.name)
                ]
        except (FileNotFoundError, NotADirectoryError):
            return
        for name, entry in sorted(found, key=lambda pair: pair[0]):
            if name.endswith("/"):
                yield from self._walk(parent + name, "")
            elif entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    yield Entry(parent + name, entry.stat(follow_symlinks=False).st_size)

    def _unlink(self, path: Path) -> None:
        with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            path.unlink()
        with suppress(OSError):  # the first directory that is not empty ends the pruning
            for parent in path.relative_to(self.root).parents:
                if parent != Path():
                    (self.root / parent).rmdir()


def _strange(path: Path) -> Corrupt:
    return Corrupt(f"{path} is not a regular file", hint="something else than DCR wrote into the stream")


def _lock(descriptor: int, *, wait: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # held by its writer, or a file system without locks: then nothing is ever swept
        return False
    return True


def _refusal(error: OSError, verb: str, path: Path) -> DcrError:
    """The error of DCR that an error of the operating system means."""
    what = f"cannot {verb} {path}: {error.strerror or error}"
    if error.errno in _FULL:
        return ResourceExhausted(what, hint="free space or raise the quota; nothing was lost, trying again is safe")
    if error.errno in _DENIED:
        access = "give the daemon's user read and write access to the stream's directory"
        links = ", on a file system that has hard links" if error.errno == errno.EPERM else ""
        return Incompatible(what, hint=access + links)
    if error.errno in _NO_LINKS:
        return Incompatible(what, hint="use a file system with hard links: link() is what makes a create atomic")
    if error.errno in (errno.ENAMETOOLONG, errno.ENOTDIR):
        return UsageError(what, hint="use a shorter path, whose parents are directories")
    return StoreUnavailable(what, hint="check the disk and the system log; a restart continues where this stopped")
