"""A checkpoint directory kept current in place, as an engine.

For serving stacks that load from disk, for evaluation jobs, for `dcr materialize`. A kill at any instant is repaired
by the next `attach` (must E8); while weights are between versions `config.json` is out of the way, so that every
loader fails. Every tensor is `exact`. A directory that is neither empty nor at a version of the stream is refused; a
plain checkpoint that turns out to be one is adopted by `prove`.

Owners are told apart by a token in the directory; a later `attach` fences the earlier owner (must E3).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from dcr_daemon import runtime
from dcr_daemon.canonical.fingerprint import MASK, Vector
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.blocks import BlockSet, fingerprint, split_tensor
from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.disk import exhausted, starved
from dcr_daemon.engine.deltas import check_chain
from dcr_daemon.engine.directory.assemble import build_checkpoint, sum_mapped
from dcr_daemon.engine.directory.checkout import CONFIG, Checkout, Marker, open_checkpoint
from dcr_daemon.engine.directory.compose import compose, open_hop
from dcr_daemon.engine.directory.journal import Install, Journal, Patch, read_journal, write_journal
from dcr_daemon.engine.port import (
    Attached,
    Difference,
    EngineGone,
    EngineStatus,
    Prepared,
    Scrubbed,
    StreamFacts,
    Swapped,
    TensorClass,
    Transaction,
    Verdict,
    VersionDelta,
)
from dcr_daemon.engine.staged import read_layout, read_vector
from dcr_daemon.errors import Corrupt, DcrError, EngineRefused, Fenced, ResourceExhausted, UsageError
from dcr_daemon.wording import shorten

BUDGET = 2 << 30  #: encoded bytes of the hops in one transaction; one hop is always taken
LEG = 30.0  #: seconds of one scrub call, about
NAP = 0.25  #: seconds after which a resting scrub looks whether it is in the way
LOCK_PATIENCE = 120.0  #: seconds another process may hold the directory
SHARD_BYTES = 4 << 30

T = TypeVar("T")
Stamp = tuple[tuple[int, int, int], ...]


class DirectoryEngine:
    """The engine port over a directory.

    Args:
        path: the directory; it may be absent. Its file system must have `flock`, `rename` and shared maps.
        budget: bytes of chunks composed into one transaction at most.
        shard_bytes: size of the files that `load` writes.
    """

    def __init__(self, path: Path | str, *, budget: int = BUDGET, shard_bytes: int = SHARD_BYTES) -> None:
        self.path = Path(path)
        self._checkout = Checkout(self.path)
        self._budget, self._shard_bytes = budget, shard_bytes
        self._workers = runtime.Workers()
        self._turn = asyncio.Lock()
        self._calls = 0  #: of the owner, so far; a scrub sees by it that it is in the way
        self._nonce = runtime.nonce()
        self._token = 0
        self._facts: StreamFacts | None = None
        self._layout = Layout([])
        self._foreign = False  #: a checkpoint that nobody has proved to be of this stream
        self._checkpoint: Checkpoint | None = None
        self._vector: Vector = np.zeros(0, np.uint64)
        self._stamp: Stamp = ()
        self._version: int | None = None
        self._serving = False
        self._prepared: Patch | None = None
        self._after: Vector = self._vector
        self._ended: dict[str, Swapped] = {}

    async def attach(self, facts: StreamFacts) -> Attached:
        self._calls += 1
        async with self._turn:
            self._forget()
            try:
                self._layout = await self._thread(read_layout, facts.layout, facts.layout_digest)
                self.path.mkdir(parents=True, exist_ok=True)
                async with self._locked():
                    marker = await self._thread(self._take, facts)
                self._facts = facts
                self._vector = np.zeros(len(self._layout), np.uint64)
                if self._checkpoint is not None:
                    self._stamp = self._stamp_now()
                    self._vector = await self._sum(self._checkpoint)
            except OSError as error:
                if starved(error):
                    raise exhausted(error, self.path) from error
                raise EngineRefused(
                    f"{self.path} cannot be used: {error.strerror or error}", hint="check its path and permissions"
                ) from error
            if self._checkpoint is not None and marker is not None and marker.vector == _digest(self._vector):
                self._version = marker.version
                self._end(marker.txn)
            return Attached(
                token=self._token,
                incarnation=self._nonce,
                adopted=None,
                version=self._version,
                serving=False,
                vector=self._vector.astype("<u8").tobytes(),
                classes=[TensorClass.EXACT] * len(self._layout),
            )

    def _take(self, facts: StreamFacts) -> Marker | None:
        """Repair, look, claim. Nothing of a directory that does not fit is touched."""
        checkout = self._checkout
        marks = [mark for mark in (checkout.marker(), checkout.dirty()) if mark is not None]
        for mark in marks:
            if mark.stream != facts.stream:
                raise EngineRefused(
                    f"{self.path} follows stream {mark.stream}, not {facts.stream}",
                    hint="give each stream a directory of its own",
                )
        torn = checkout.recover(self._layout)
        self._foreign = not marks and not checkout.empty
        if not checkout.empty and not torn:
            try:
                self._checkpoint = open_checkpoint(self.path, self._layout)
            except ResourceExhausted:
                raise  # that says nothing about what is in it
            except DcrError as error:
                if self._foreign:
                    raise EngineRefused(
                        f"{self.path} is neither empty nor a checkpoint of this stream: {error.message}",
                        hint="name an empty directory, or one that holds a version of the stream",
                    ) from error
        self._token = checkout.claim(self._nonce)
        return None if torn else checkout.marker()

    async def prove(self, version: int, vector: str, label: str, loaded: str = "") -> None:
        async with self._owned():
            wanted = await self._thread(read_vector, vector, self._layout)
            if self._checkpoint is None:
                raise EngineRefused(f"{self.path} holds no whole checkpoint", hint="load an anchor first")
            self._check_stamp()
            if not np.array_equal(wanted, self._vector):
                names = self._differing(wanted, self._vector)
                raise EngineRefused(f"{self.path} is not version {version}: {names} differ")
            if self._version != version or self._foreign:
                await self._thread(self._checkout.finish, self._marker(version, label, self._vector))
            self._version, self._foreign = version, False

    async def serve(self) -> None:
        async with self._owned():
            if self._version is None or self._checkout.dirty() is not None:
                raise EngineRefused(f"{self.path} is not proved at a version", hint="prove or load one first")
            self._serving = True

    async def prepare(self, txn: Transaction) -> Prepared:
        async with self._owned(locked=False):
            if self._version is None or self._version != txn.base:
                raise EngineRefused(f"{self.path} is at version {self._version}, the change begins at {txn.base}")
            self._check_stamp()
            self._discard()
            hops = _within(txn.hops, self._budget)
            changed = await self._thread(self._draft_changes, txn, hops)
            self._check_owner()
            return Prepared(txn=txn.id, changed=changed, fits=len(hops))

    def _draft_changes(self, txn: Transaction, hops: list[VersionDelta]) -> int:
        """Compose the hops into a journal that waits under another name; how many elements it changes."""
        layout, facts = self._layout, self._stream
        opened = [open_hop(layout, facts.stream, hop) for hop in hops]
        check_chain(layout, [hop.summary for hop in opened], self._vector)
        head = Patch(
            txn=txn.id,
            stream=facts.stream,
            layout=facts.layout_digest,
            base=txn.base,
            version=hops[-1].version,
            label=txn.label,
            vector=_digest(opened[-1].summary.after),
        )
        changed = write_journal(self._draft, head, compose(layout, opened, self._open.bits))
        runtime.failpoint("engine.dir.prepared")
        self._prepared, self._after = head, opened[-1].summary.after
        return changed

    async def swap(self, txn: str) -> Swapped:
        async with self._owned():
            if txn in self._ended:
                return self._ended[txn]
            if self._prepared is None or self._prepared.txn != txn:
                raise EngineRefused(f"{self.path} has no prepared transaction {txn}", hint="prepare it again")
            self._check_stamp()
            began, head = runtime.monotonic(), self._prepared
            self._prepared = None
            tries, reason = await self._thread(self._apply, head)
            self._stamp = self._stamp_now()
            return self._end(txn, tries, reason, runtime.monotonic() - began)

    def _apply(self, head: Patch) -> tuple[int, str]:
        """Apply twice at most, else roll back (must E5). How often it was tried, and why it failed if it did.

        Raises:
            Corrupt, OSError: nothing could be begun, or not even the way back be written; then the mark stays.
        """
        checkout = self._checkout
        checkout.begin(self._draft, head.stream, head.txn)
        reasons = []
        with contextlib.closing(_good(read_journal(checkout.journal), checkout)) as journal:
            for tries in (1, 2):
                try:
                    checkout.redo(journal, self._layout)
                except (OSError, DcrError) as error:
                    reasons.append(str(error))
                    continue
                self._version, self._vector = head.version, self._after
                return tries, ""
            serving, version = self._serving, self._version
            self._serving, self._version = False, None
            checkout.write(journal, self._layout, back=True)
            checkout.clear()
            self._serving, self._version = serving, version
        return 2, "; ".join(reasons)

    async def outcome(self, txn: str) -> Swapped:
        if txn in self._ended:
            return self._ended[txn]
        reason = "never begun here, or ended in an earlier run"
        return Swapped(txn=txn, verdict=Verdict.UNKNOWN, version=self._version, serving=self._serving, reason=reason)

    async def finish_adopted(self, txn: str) -> Swapped:
        """As the port says. `attach` finishes whatever was begun, so nothing is ever left to settle."""
        async with self._owned():
            if txn not in self._ended:
                raise EngineRefused(f"{self.path} has not begun transaction {txn}", hint="ask for its outcome")
            return self._ended[txn]

    async def drop(self) -> None:
        async with self._owned():
            self._discard()

    async def load(self, version: int, files: list[str], vector: str, label: str) -> Swapped:
        """As the port says; side files (config, tokenizer) that lie beside the first of `files` are installed too.

        The new checkpoint is written whole and proved before anything of the old one is touched.
        """
        async with self._owned(locked=False):
            if self._foreign:
                raise EngineRefused(
                    f"{self.path} is neither empty nor at a version of this stream, and would be overwritten",
                    hint="name an empty directory, or empty this one",
                )
            self._discard()
            wanted = await self._thread(read_vector, vector, self._layout)
            fresh = self._fresh
            paths = [Path(file) for file in files]
            await self._thread(_build, fresh, self._layout, paths, self._shard_bytes)
            with Checkpoint(fresh) as built:
                found = await self._sum(built)
            if not np.array_equal(found, wanted):
                await self._thread(shutil.rmtree, fresh)
                names = self._differing(found, wanted)
                raise EngineRefused(f"the files given for version {version} are not that version: {names} differ")
            began, txn = runtime.monotonic(), f"load-{runtime.nonce()}"
            async with self._locked():
                self._check_owner()
                await self._thread(self._install, fresh, self._marker(version, label, found, txn))
            self._version, self._vector, self._stamp = version, found, self._stamp_now()
            return self._end(txn, pause=runtime.monotonic() - began)

    def _install(self, fresh: Path, marker: Marker) -> None:
        checkout = self._checkout
        serving, self._serving, self._version = self._serving, False, None
        if self._checkpoint is not None:
            self._checkpoint.close()
            self._checkpoint = None
        shutil.rmtree(checkout.incoming, ignore_errors=True)
        fresh.rename(checkout.incoming)
        runtime.failpoint("engine.dir.incoming")
        files = {path.name for path in checkout.incoming.iterdir()}
        here = {path.name for path in self.path.glob("*.safetensors*")}
        head = Install(
            txn=marker.txn,
            stream=marker.stream,
            layout=marker.layout,
            version=marker.version,
            label=marker.label,
            vector=marker.vector,
            files=sorted(files - {CONFIG}),
            stale=sorted(here - files),
        )
        write_journal(self._draft, head)
        checkout.begin(self._draft, marker.stream, marker.txn)
        with contextlib.closing(_good(read_journal(checkout.journal), checkout)) as journal:
            checkout.redo(journal, self._layout)
        checkout.sweep()
        self._checkpoint = open_checkpoint(self.path, self._layout)
        self._serving = serving

    async def scrub(self, rate: float, first: int = 0) -> Scrubbed:
        """As the port says. It reads what any reader of the files gets: from the page cache, where they lie in it."""
        if self._turn.locked():
            return Scrubbed(version=None, tensors=0, bytes=0, next=first)
        async with self._turn:
            version, call, began = self._scrubbable(), self._calls, runtime.monotonic()
        done, size, differing = 0, 0, list[Difference]()
        for tensor in range(first, len(self._layout)):
            late = done > 0 and runtime.monotonic() - began > LEG
            same = None if late else await self._same(tensor, rate, call)
            if same is None:
                return Scrubbed(version=version, tensors=done, bytes=size, next=tensor)
            done, size = done + 1, size + self._layout[tensor].nbytes
            if not same:
                differing.append(Difference(tensor=self._layout[tensor].name))
                break
        return Scrubbed(version=version, tensors=done, bytes=size, differing=differing)

    def _scrubbable(self) -> int:
        """The version that the files must have. Files that were replaced or cut are somebody's doing, not damage."""
        _ = self._stream
        self._check_owner()
        if self._version is None:
            raise EngineRefused(f"{self.path} is not proved at a version", hint="prove or load one first")
        if [seen[:2] for seen in self._stamp_now()] != [seen[:2] for seen in self._stamp]:
            self._check_stamp()
        return self._version

    async def _same(self, tensor: int, rate: float, call: int) -> bool | None:
        """Whether a tensor sums to what was accepted; None if another call came between. What differs is summed once
        more with every other process kept out: a new owner claims before it writes (must E3)."""
        total = 0
        blocks = split_tensor(tensor, self._layout[tensor])
        for block in blocks:
            if self._turn.locked() or self._calls != call:
                return None
            async with self._turn:
                self._scrubbable()
                total += await self._thread(sum_mapped, self._open, self._layout, block)
            await self._rest(block.box.elements * self._layout[tensor].width / rate if rate else 0, call)
        if total & MASK == int(self._vector[tensor]):
            return True
        if self._calls != call:
            return None
        async with self._turn, self._locked():
            self._scrubbable()
            sums = [await self._thread(sum_mapped, self._open, self._layout, block) for block in blocks]
            if sum(sums) & MASK == int(self._vector[tensor]):
                return True
            self._version, self._serving = None, False
            self._discard()
            return False

    async def _rest(self, seconds: float, call: int) -> None:
        """Sleep, but not on when another call has come."""
        while seconds > 0 and self._calls == call:
            nap = min(seconds, NAP)
            await runtime.sleep(nap)
            seconds -= nap

    async def status(self) -> EngineStatus:
        """As the port says; a directory that somebody else has changed is at no known version."""
        if self._facts is not None:
            self._check_owner()
        if not self._turn.locked() and self._version is not None:
            with contextlib.suppress(EngineRefused):
                self._check_stamp()
        prepared = self._prepared.txn if self._prepared else None
        return EngineStatus(incarnation=self._nonce, version=self._version, serving=self._serving, prepared=prepared)

    async def close(self) -> None:
        self._calls += 1
        async with self._turn:
            if self._facts is not None:
                self._tidy()
            self._forget()
            self._workers.close()

    def _tidy(self) -> None:
        """Leave nothing behind that nobody will use. Whoever was fenced in the middle of a prepare or a load has made
        a file, or a whole checkpoint, that bears its own token: no later owner's."""
        owner = self._checkout.owner()
        if owner.nonce == self._nonce or owner.token > self._token:
            self._discard()
            shutil.rmtree(self._fresh, ignore_errors=True)
        if owner.nonce == self._nonce and self._foreign:
            shutil.rmtree(self._checkout.marks, ignore_errors=True)

    def _differing(self, one: Vector, other: Vector) -> str:
        return shorten(self._layout[int(tensor)].name for tensor in np.flatnonzero(one != other))

    @property
    def _stream(self) -> StreamFacts:
        if self._facts is None:
            raise UsageError("this engine was not attached", hint="call attach() first")
        return self._facts

    @property
    def _open(self) -> Checkpoint:
        if self._checkpoint is None:
            raise EngineRefused(f"{self.path} holds no whole checkpoint", hint="load an anchor first")
        return self._checkpoint

    @property
    def _draft(self) -> Path:
        return self._checkout.marks / f"prepared-{self._token}"

    @property
    def _fresh(self) -> Path:
        return self._checkout.marks / f"incoming-{self._token}"

    def _marker(self, version: int, label: str, vector: Vector, txn: str = "") -> Marker:
        facts, digest = self._stream, _digest(vector)
        return Marker(
            stream=facts.stream, layout=facts.layout_digest, version=version, label=label, vector=digest, txn=txn
        )

    def _end(self, txn: str, tries: int = 1, reason: str = "", pause: float = 0.0) -> Swapped:
        """Remember how a transaction ended."""
        self._ended[txn] = Swapped(
            txn=txn,
            verdict=Verdict.ROLLED_BACK if reason else Verdict.COMMITTED,
            version=self._version,
            serving=self._serving,
            pause=pause,
            tries=tries,
            reason=reason,
        )
        return self._ended[txn]

    def _forget(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.close()
        self._checkpoint, self._version, self._serving, self._prepared = None, None, False, None

    def _discard(self) -> None:
        self._prepared = None
        self._draft.unlink(missing_ok=True)

    def _stamp_now(self) -> Stamp:
        stats = [file.path.stat() for file in self._open.files]
        return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)

    def _check_stamp(self) -> None:
        """A change by anybody else leaves the directory unproved until the next attach sums it (must F1)."""
        with contextlib.suppress(FileNotFoundError):
            if self._stamp_now() == self._stamp:
                return
        self._version, self._serving = None, False
        self._discard()
        raise EngineRefused(f"{self.path} was changed by somebody else", hint="attach again to sum it anew")

    def _is_owner(self) -> bool:
        return self._checkout.owner().nonce == self._nonce

    def _check_owner(self) -> None:
        if not self._checkout.marks.is_dir():
            raise EngineGone(f"{self.path} was removed", hint="attach again")
        if not self._is_owner():
            raise Fenced(f"another subscriber has attached to {self.path}", hint="run one subscriber per directory")

    @contextlib.asynccontextmanager
    async def _owned(self, *, locked: bool = True) -> AsyncIterator[None]:
        """One call at a time, and only by the owner; `locked` keeps other processes out meanwhile.

        Raises:
            ResourceExhausted: the disk does not take what is written, or there is no descriptor left to open it.
        """
        self._calls += 1
        async with self._turn:
            try:
                async with self._locked() if locked else contextlib.nullcontext():
                    _ = self._stream
                    self._check_owner()
                    yield
            except OSError as error:  # what was begun is found, and finished, by the next attach
                raise exhausted(error, self.path) from error

    @contextlib.asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        deadline = runtime.monotonic() + LOCK_PATIENCE
        while (lock := self._checkout.try_lock()) is None:
            if runtime.monotonic() > deadline:
                raise EngineGone(f"another process has held {self.path} for {LOCK_PATIENCE:.0f} s")
            await runtime.sleep(0.02)
        with lock:
            yield

    async def _thread(self, function: Callable[..., T], *args: object) -> T:
        """Run on the pool. A cancelled caller waits for it: what was begun is not left to run on unseen."""
        task = asyncio.ensure_future(self._workers.run(function, *args))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise

    async def _sum(self, checkpoint: Checkpoint) -> Vector:
        """The fingerprint vector of a checkpoint, its blocks in parallel."""
        blocks = BlockSet.whole(self._layout)
        return await fingerprint(blocks, partial(sum_mapped, checkpoint, self._layout), self._thread)


def _within(hops: list[VersionDelta], budget: int) -> list[VersionDelta]:
    """As many hops as fit the budget, one at least (must E6)."""
    taken, size = list[VersionDelta](), 0
    for hop in hops:
        size += sum(Path(chunk).stat().st_size for chunk in hop.chunks)
        if taken and size > budget:
            break
        taken.append(hop)
    return taken


def _build(fresh: Path, layout: Layout, files: list[Path], shard_bytes: int) -> None:
    try:
        build_checkpoint(fresh, layout, files, shard_bytes=shard_bytes)
    except OSError as error:
        raise exhausted(error, fresh) from error


def _good(journal: Journal | None, checkout: Checkout) -> Journal:
    if journal is None:
        raise Corrupt(f"{checkout.journal} does not read back as it was written", hint="check this disk")
    return journal


def _digest(vector: Vector) -> str:
    return hashlib.sha256(vector.astype("<u8").tobytes()).hexdigest()
