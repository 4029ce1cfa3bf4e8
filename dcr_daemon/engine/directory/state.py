"""What one attached `DirectoryEngine` knows of its directory, and the only way to touch it.

`DirectoryState` owns the mutable values of the engine; `engine`, `transactions`, `install` and `scrub` work on it. It
lets one call of this process at a time through (`turn`), and checks before each that this engine still owns the
directory (must E3), and that nobody else has changed the files (must F1).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from dcr_daemon import runtime
from dcr_daemon.canonical.fingerprint import Vector
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.blocks import BlockSet, fingerprint
from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.disk import disk_error
from dcr_daemon.engine.directory.assemble import sum_read
from dcr_daemon.engine.directory.checkout import Checkout, Marker, open_checkpoint
from dcr_daemon.engine.directory.journal import Patch
from dcr_daemon.engine.port import EngineGone, StreamFacts, Swapped, Verdict
from dcr_daemon.errors import DcrError, EngineRefused, Fenced, UsageError
from dcr_daemon.events import Emit, discard
from dcr_daemon.wording import shorten

LOCK_TIMEOUT = 120.0  #: seconds that another process may hold the directory

T = TypeVar("T")
Stamp = tuple[tuple[int, int, int], ...]  #: of each shard file: inode, size in bytes, modification time in nanoseconds


class DirectoryState:
    """The state of one engine over `path`. Attributes are set by the modules named above.

    `calls` counts the owner's calls, so that a scrub notices a newer one. `version` is None unless the files are proved
    to be that version; `vector` is then their fingerprint vector, and `stamp` tells whether they were touched since.
    `unverified`: the directory holds a checkpoint that nobody has proved to be of this stream.
    """

    def __init__(self, path: Path, emit: Emit = discard) -> None:
        self.path = path
        self.emit = emit
        self.checkout = Checkout(path)
        self.workers = runtime.Workers()
        self.turn = asyncio.Lock()
        self.calls = 0
        self.nonce = runtime.nonce()
        self.token = 0
        self.facts: StreamFacts | None = None
        self.layout = Layout([])
        self.unverified = False
        self.checkpoint: Checkpoint | None = None
        self.vector: Vector = np.zeros(0, np.uint64)
        self.stamp: Stamp = ()
        self.version: int | None = None
        self.serving = False
        self.prepared: Patch | None = None
        self.after: Vector = self.vector  #: the vector that the prepared transaction leads to
        self.ended: dict[str, Swapped] = {}

    # -- what is attached and open ----------------------------------------------------------------------------------

    @property
    def stream(self) -> StreamFacts:
        if self.facts is None:
            raise UsageError("this engine was not attached", hint="call attach() first")
        return self.facts

    @property
    def open(self) -> Checkpoint:
        if self.checkpoint is None:
            raise EngineRefused(f"{self.path} holds no whole checkpoint", hint="load an anchor first")
        return self.checkpoint

    @property
    def draft(self) -> Path:
        """The journal of the prepared transaction, before it begins."""
        return self.checkout.marks / f"prepared-{self.token}"

    @property
    def fresh(self) -> Path:
        """The checkpoint that a load builds, before it is installed."""
        return self.checkout.marks / f"incoming-{self.token}"

    def marker(self, version: int, label: str, vector: Vector, txn: str = "") -> Marker:
        facts = self.stream
        return Marker(
            stream=facts.stream,
            layout=facts.layout_digest,
            version=version,
            label=label,
            vector=vector_digest(vector),
            txn=txn,
        )

    def own_files(self) -> None:
        """As `Checkout.own_files`; what is open is then the copies. Hold the lock, and check the stamp before."""
        if self.checkout.own_files(self.emit):
            self.open.close()
            self.checkpoint = open_checkpoint(self.path, self.layout)
        self.stamp = self.stamp_now()

    def names_differing(self, one: Vector, other: Vector) -> str:
        return shorten(self.layout[int(tensor)].name for tensor in np.flatnonzero(one != other))

    def end(self, txn: str, *, tries: int = 1, reason: str = "", pause: float = 0.0) -> Swapped:
        """Remember how a transaction ended: rolled back if there is a `reason`."""
        self.ended[txn] = Swapped(
            txn=txn,
            verdict=Verdict.ROLLED_BACK if reason else Verdict.COMMITTED,
            version=self.version,
            serving=self.serving,
            pause=pause,
            tries=tries,
            reason=reason,
        )
        return self.ended[txn]

    def forget(self) -> None:
        """Close the checkpoint; nothing is known of the files any more."""
        if self.checkpoint is not None:
            self.checkpoint.close()
        self.checkpoint, self.version, self.serving, self.prepared = None, None, False, None

    def discard(self) -> None:
        """Drop the prepared transaction."""
        self.prepared = None
        self.draft.unlink(missing_ok=True)

    def clean_up(self) -> None:
        """Remove the files that only this engine would have used. If it was fenced during a prepare or a load, it has
        left a journal or a checkpoint under its own token, which no later owner uses."""
        owner = self.checkout.owner()
        if owner.nonce == self.nonce or owner.token > self.token:
            self.discard()
            shutil.rmtree(self.fresh, ignore_errors=True)
        if self.unverified:
            self._remove_marks()

    def _remove_marks(self) -> None:
        """Leave a directory without `.dcr`, unless it has another owner or is just being attached to by one."""
        with contextlib.suppress(EngineGone):
            lock = self.checkout.try_lock()
            if lock is None:
                return
            with lock:
                if self.checkout.owner().nonce == self.nonce:
                    shutil.rmtree(self.checkout.marks, ignore_errors=True)

    # -- who may do what --------------------------------------------------------------------------------------------

    def check_owner(self) -> None:
        """Raises `EngineGone` if the directory was removed, `Fenced` if another engine has attached since."""
        if not self.checkout.marks.is_dir():
            raise EngineGone(f"{self.path} was removed", hint="attach again")
        if self.checkout.owner().nonce != self.nonce:
            raise self._fenced()

    def check_not_overtaken(self) -> None:
        """Raises `Fenced` if this engine has attached and another one since. Unlike `check_owner` it accepts a
        directory that has no owner: one that was never attached to, or was removed and made anew."""
        if self.facts is not None and self.checkout.owner().nonce not in ("", self.nonce):
            raise self._fenced()

    @contextlib.contextmanager
    def fenced_first(self) -> Iterator[None]:
        """Any error inside becomes `Fenced` if another engine has attached meanwhile (must E3).

        Work that does not hold the lock reads files which the next owner changes, so its errors (sums that differ,
        files that are gone) say nothing about them. A caller that took such an error for a reason to attach again
        would fence the owner that has fenced it.
        """
        try:
            yield
        except Fenced:
            raise
        except Exception as error:
            try:
                self.check_not_overtaken()
            except Fenced as fenced:
                raise fenced from error
            except DcrError:  # the owner cannot be read: `error` says more
                pass
            raise

    def _fenced(self) -> Fenced:
        return Fenced(f"another subscriber has attached to {self.path}", hint="run one subscriber per directory")

    def stamp_now(self) -> Stamp:
        stats = [file.path.stat() for file in self.open.files]
        return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)

    def check_stamp(self) -> None:
        """A change by anybody else leaves the directory unproved until the next attach sums it (must F1)."""
        with contextlib.suppress(FileNotFoundError):
            if self.stamp_now() == self.stamp:
                return
        self.version, self.serving = None, False
        self.discard()
        raise EngineRefused(f"{self.path} was changed by somebody else", hint="attach again to sum it anew")

    def require_proved(self) -> int:
        """The proved version. Raises `EngineRefused` without one."""
        if self.version is None:
            raise EngineRefused(f"{self.path} is not proved at a version", hint="prove or load one first")
        return self.version

    @contextlib.asynccontextmanager
    async def owned(self, *, locked: bool = True) -> AsyncIterator[None]:
        """One call at a time, and only by the owner; `locked` keeps other processes out meanwhile.

        Without the lock another engine may attach at any instant. An error inside then counts as `Fenced`; a call
        that succeeds must end with `check_owner`, and take the lock before it writes what others read.

        Raises:
            Fenced: another engine has attached, before this call or during it.
            ResourceExhausted: the disk is full, or no file descriptor is left.
        """
        self.calls += 1
        async with self.turn:
            try:
                with self.fenced_first():
                    async with self.locked() if locked else contextlib.nullcontext():
                        _ = self.stream
                        self.check_owner()
                        yield
            except OSError as error:  # the next attach finds what was begun, and finishes it
                raise disk_error(error, self.path) from error

    @contextlib.asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Hold the directory's lock. Raises `EngineGone` if another process keeps it for `LOCK_TIMEOUT` seconds."""
        deadline = runtime.monotonic() + LOCK_TIMEOUT
        while (lock := self.checkout.try_lock()) is None:
            if runtime.monotonic() > deadline:
                raise EngineGone(f"another process has held {self.path} for {LOCK_TIMEOUT:.0f} s")
            await runtime.sleep(0.02)
        with lock:
            yield

    # -- work on threads --------------------------------------------------------------------------------------------

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Run on the pool. A cancelled caller waits until it has ended: nothing that was begun runs on unseen."""
        task = asyncio.ensure_future(self.workers.run(function, *args))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise

    async def sum(self, checkpoint: Checkpoint) -> Vector:
        """The fingerprint vector of a checkpoint, its blocks in parallel."""
        blocks = BlockSet.whole(self.layout)
        return await fingerprint(blocks, partial(sum_read, checkpoint, self.layout), self.run)


def vector_digest(vector: Vector) -> str:
    """SHA-256, in hex, of a vector as it is stored."""
    return hashlib.sha256(vector.astype("<u8").tobytes()).hexdigest()
