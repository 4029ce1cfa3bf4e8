"""One publisher's hold on a stream, from claim to release: what may happen when (musts P3-P7, L1, L4, L5).

    open: claim ─► read everything ─► baseline          (P5)
    begin ─► diff ... ─► seal      ─► baseline commits   only when the seal is known to be in the ledger
                └──────► abort     ─► baseline undone    only when it is known not to be

An attempt whose fate is open stays with the session; `settle` learns it from the ledger, and everything that could
depend on it settles first. No wait for the ledger is longer than the patience: the call ends, the record stays
undecided (must L1). Between updates `tend` looks for a newer claim and for damage. A session is used by one task at a
time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from dcr_daemon import runtime
from dcr_daemon.canonical.fingerprint import Bits, total
from dcr_daemon.checkpoint.directory import read_extras
from dcr_daemon.errors import Corrupt, Fenced, StoreUnavailable
from dcr_daemon.events import Aborted, Alarm, Emit, Opened, Sealed, Waiting
from dcr_daemon.ledger.ledger import Header, Ledger
from dcr_daemon.ledger.records import Abort, Open, Seal, show_u64
from dcr_daemon.ledger.retention import RetentionPolicy
from dcr_daemon.publish.anchors import AnchorPolicy, SinceAnchor, write_anchor
from dcr_daemon.publish.attempt import Attempt, Contribution
from dcr_daemon.publish.baseline import Baseline
from dcr_daemon.publish.options import PublishOptions
from dcr_daemon.publish.restore import Restorer
from dcr_daemon.publish.retention import Retention
from dcr_daemon.publish.scrub import Scrub
from dcr_daemon.publish.spool import Spool
from dcr_daemon.publish.state import StateDirectory
from dcr_daemon.publish.uploads import Uploads
from dcr_daemon.publish.versions import SealedVersion
from dcr_daemon.publish.waits import within
from dcr_daemon.runtime import Workers

T = TypeVar("T")

SETTLE_PAUSE = 2.0  #: seconds between two looks for the fate of a record
CLOSE_PATIENCE = 5.0  #: seconds that each step of an end waits for the ledger: supervisors kill after 30


class Session:
    """Made by `open_session`. `layout` is the stream's."""

    def __init__(
        self,
        options: PublishOptions,
        ledger: Ledger,
        baseline: Baseline,
        restorer: Restorer,
        state: StateDirectory,
        workers: Workers,
        emit: Emit,
    ) -> None:
        self.ledger, self.layout = ledger, baseline.layout
        self._options, self._baseline, self._restorer = options, baseline, restorer
        self.workers, self.state, self._emit = workers, state, emit
        self._spool = Spool(state.spool, options.spool_memory, workers)
        policy = AnchorPolicy(options.anchor_every, options.anchor_share)
        self._since_anchor = SinceAnchor(ledger, policy, self.layout.nbytes)
        keep = RetentionPolicy.of(options.keep_versions, options.keep_hours)
        self.retention = Retention(ledger, keep, emit, anchors=policy.active)
        # One value for this incarnation of the process group; a leftover of another one answers to nobody (must P1).
        self._group, self._nonce = runtime.nonce(), runtime.nonce()
        self._call = 0
        self._scrub = Scrub(baseline, options.scrub_rate)
        self._look_at = runtime.monotonic() + options.look
        self._looking: asyncio.Future[object] | None = None
        self._owes_anchor = False
        self._spoilt: int | None = None
        self._attempt: Attempt | None = None
        self._contribution: Contribution | None = None

    @property
    def head(self) -> int:
        """The newest sealed version, as far as the ledger was read."""
        return self.ledger.state.seal.version

    def read(self, tensor: int, start: int, count: int) -> Bits:
        """The bits of a layout tensor as the attempt under way has left them."""
        return self._baseline.read(tensor, start, count)

    async def begin(self, *, step: int | None = None) -> Attempt:
        """Open an attempt at the next version; an undecided one is settled first (must P7).

        Raises:
            Fenced: another publisher owns the stream.
            StoreUnavailable: the fate of the previous attempt cannot be learnt now.
        """
        await self.settle("the next update began")
        if self._baseline.version != self.head:
            await self._restorer.restore()
        self._call += 1

        def make(header: Header) -> Open:
            base = header.state.seal.version
            return Open(**header.fields, version=base + 1, base=base, group=self._group, call=self._call, step=step)

        record = await self._within(self._options.patience, self.ledger.append(make), "room for the next version")
        assert record.base == self._baseline.version  # only this epoch could have sealed meanwhile
        runtime.failpoint("publish.open")
        uploads = Uploads(
            self.ledger.store,
            version=record.version,
            attempt=record.seq,
            backlog=self._options.upload_backlog,
            concurrency=self._options.uploads,
            patience=self._options.patience,
            emit=self._emit,
        )
        self._attempt = Attempt(
            record,
            self._nonce,
            self._baseline,
            self._spool,
            uploads,
            self.workers,
            self._options.codec,
            self._options.chunk_bytes,
        )
        self._emit(Opened(version=record.version, attempt=record.seq, step=step))
        return self._attempt

    async def seal(
        self,
        attempt: Attempt,
        *,
        source: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> SealedVersion:
        """Wait for the uploads of a finished attempt, seal it, and move the baseline.

        Args:
            attempt: the one that `begin` returned.
            source: where the weights came from.
            metadata: the user's, JSON-like.
            check: called at the last moment before the record is made; what it raises ends the attempt.

        Raises:
            Fenced: another publisher owns the stream; the attempt is not a version and never will be.
            StoreUnavailable: the bucket did not answer within the patience. `settle` tells the fate.
        """
        open_ = attempt.record
        contribution = await attempt.upload(self._options.patience)
        self._contribution = contribution
        before = show_u64(total(self._baseline.vector))
        runtime.failpoint("publish.uploaded")

        def make(header: Header) -> Seal:
            check()
            return Seal(
                **header.fields, version=open_.version, base=open_.base, attempt=attempt.id,
                parts=[contribution.part], fingerprint=contribution.fingerprint, before=before,
                after=show_u64(total(contribution.vector)), previous=header.state.seal.seq,
                changed=contribution.changed, elements=sum(spec.elements for spec in self.layout),
                bytes=contribution.bytes, dense_bytes=self.layout.nbytes, step=open_.step, source=source,
                metadata=metadata or {},
            )  # fmt: skip

        seal = await self._append_seal(attempt, make)
        runtime.failpoint("publish.sealed")
        return self._commit(attempt, seal)

    async def _append_seal(self, attempt: Attempt, make: Callable[[Header], Seal]) -> Seal:
        """Append until the seal is known to be in the ledger; its slot alone decides that (must L1)."""
        deadline, what = runtime.monotonic() + self._options.patience, f"the fate of version {attempt.version}"

        async def append() -> Seal:
            await self.ledger.settle()
            return await self._seal_of(attempt) or await self.ledger.append(make)

        while True:
            try:
                return await self._within(max(deadline - runtime.monotonic(), SETTLE_PAUSE), append(), what)
            except StoreUnavailable as error:
                if runtime.monotonic() > deadline:
                    raise
                self._emit(Waiting(what=f"{what}: {error.message}"))
                await runtime.sleep(SETTLE_PAUSE)

    async def _within(self, seconds: float, work: Awaitable[T], what: str) -> T:
        return await within(seconds, work, what=f"the ledger of {self.ledger.store.url}: {what}", emit=self._emit)

    async def _seal_of(self, attempt: Attempt) -> Seal | None:
        """The seal of an attempt, if the ledger as read has it."""
        if self.head < attempt.version:
            return None
        seal = await self.ledger.history.seal(attempt.version)
        return seal if seal.attempt == attempt.id else None

    def _commit(self, attempt: Attempt, seal: Seal) -> SealedVersion:
        """Version and baseline move together: the seal is in the ledger."""
        assert self._contribution is not None
        self._owes_anchor |= self._baseline.stray
        self._baseline.commit(attempt.version, attempt.segments)
        runtime.failpoint("publish.baseline.committed")
        attempt.forget()
        self._attempt = self._contribution = None
        self.retention.sealed()
        self._emit(
            Sealed(
                version=seal.version, attempt=seal.attempt, step=seal.step, seq=seal.seq, changed=seal.changed,
                elements=seal.elements, bytes=seal.bytes, dense_bytes=seal.dense_bytes,
                seconds=runtime.monotonic() - attempt.started,
            )
        )  # fmt: skip
        return SealedVersion.of(seal)

    async def settle(self, reason: str, *, patience: float | None = None) -> SealedVersion | None:
        """Decide what is undecided: a sealed attempt is committed (and returned), any other aborted and undone.

        Args:
            reason: why an attempt that is not sealed ends here.
            patience: seconds that the ledger may take; by default those of every update.

        Raises:
            Fenced: another publisher owns the stream; the attempt is undone all the same.
            StoreUnavailable: its fate cannot be learnt now; nothing is changed.
        """
        attempt = self._attempt
        if attempt:
            await attempt.cancel()
        if attempt is None and not self.ledger.undecided and self.ledger.state.open is None:
            return None
        what = f"the fate of version {attempt.version}" if attempt else "the fate of a record"
        patience = self._options.patience if patience is None else patience
        try:
            seal = await self._within(patience, self._fate(attempt, reason[:500]), what)
        except Fenced:
            await self._undo(attempt, "another publisher claimed the stream")
            raise
        if attempt and seal:
            return self._commit(attempt, seal)
        await self._undo(attempt, reason)
        return None

    async def _fate(self, attempt: Attempt | None, reason: str) -> Seal | None:
        """The seal of an attempt, or None once nothing in the ledger stands open that could become one."""
        await self.ledger.settle()
        if attempt and (seal := await self._seal_of(attempt)):
            return seal  # whatever stands after it, and whether or not that can be read now
        await self.ledger.read()
        self.ledger.check_held()
        if opened := self.ledger.state.open:
            seq, version = opened.seq, opened.version
            await self.ledger.append(lambda header: Abort(**header.fields, attempt=seq, version=version, reason=reason))
        return None

    async def _undo(self, attempt: Attempt | None, reason: str) -> None:
        """The attempt is known not to be a version, and never to become one."""
        self._attempt = self._contribution = None
        if attempt:
            if not await attempt.undo():
                self._emit(
                    Alarm(must="P7", what=f"the undo of version {attempt.version} failed: the baseline is rebuilt")
                )
            runtime.failpoint("publish.baseline.undone")
            self._emit(Aborted(version=attempt.version, attempt=attempt.id, reason=reason))

    async def tend(self) -> None:
        """Between updates, until cancelled: look for a newer claim, and for damage in the baseline.

        Returns once the baseline was found damaged; `repair`, or the next `begin`, builds it anew (must P4).

        Raises:
            Fenced: another publisher owns the stream.
        """
        while True:
            if runtime.monotonic() >= self._look_at:
                await self._look()
                self._look_at = runtime.monotonic() + self._options.look * (0.75 + runtime.jitter() / 2)
                self.ledger.check_held()
            # While the fate of an attempt is open the map is ahead of its version, and has sums for none.
            scrub_at = float("inf") if self._attempt else self._scrub.due
            if runtime.monotonic() >= scrub_at and (tensor := await self._scrub.step()):
                self._found_damage(f"in {tensor}")
                return
            await runtime.sleep(max(0.0, min(self._look_at, scrub_at) - runtime.monotonic()))

    async def _look(self) -> None:
        """Read the ledger on. A look goes on when `tend` is cancelled, or none would ever end in a slow bucket."""
        self._looking = self._looking or asyncio.ensure_future(self.ledger.read())
        with contextlib.suppress(StoreUnavailable):
            await asyncio.shield(self._looking)
        self._looking = None

    def _found_damage(self, where: str) -> None:
        """The baseline is not what it should be: rebuilt before anything is diffed from it, and anchored (must P4)."""
        self._emit(Alarm(must="P4", what=f"the baseline of version {self.head} is damaged {where}; rebuilding"))
        self._baseline.lose()
        self._owes_anchor = True

    async def repair(self) -> None:
        """Build a baseline that `tend` found damaged anew, and write the anchor that is owed.

        Raises:
            Fenced, StoreUnavailable: as everything that reads or writes; the next `begin` tries again.
        """
        await self._restorer.restore()
        await self.anchor_if_due()

    async def anchor_if_due(self, *, at_once: bool = False) -> None:
        """Write an anchor of the head if the policy asks for one, or damage. No attempt may be under way.

        Raises:
            Fenced: another publisher owns the stream.
        """
        if self.ledger.undecided:
            await self._within(self._options.patience, self.ledger.settle(), "the fate of a record")
            await self.ledger.read()
        newest = self.ledger.state.anchor
        if self._attempt or (newest and newest.version == self.head):
            return
        if not (at_once or self._owes_anchor) and not await self._since_anchor.due():
            return
        if self.ledger.tip.seq == self._spoilt:
            return  # its names are taken by damaged bytes; after the next version it has others (must L0)
        await self._prove_baseline()
        if self._baseline.stray:
            return  # the version that comes next is anchored instead
        runtime.failpoint("publish.anchor.proved")
        extras = await self._extras()
        try:
            await write_anchor(self.ledger, self._baseline, extras, self.workers, self._options.patience, self._emit)
        except Corrupt as error:
            self._spoilt = self.ledger.tip.seq
            self._found_damage(f"while its anchor was written: {error.message}")
            return
        self._owes_anchor = False
        self.retention.anchored()

    async def _prove_baseline(self) -> None:
        """Recompute the baseline's fingerprint; damage is an alarm and a rebuild, never an anchor (must P4)."""
        if self._baseline.version == self.head:
            if bool((await self._baseline.fingerprint() == self._baseline.vector).all()):
                return
            self._found_damage("before an anchor")
        await self._restorer.restore()

    async def _extras(self) -> dict[str, bytes]:
        """Side files for an anchor: the base's, else those of the anchor before."""
        base = self._options.base
        if base and base.is_dir():
            return read_extras(base)
        return await self._restorer.extras()

    async def close(self) -> None:
        """Settle, release the claim, give the state directory back. Safe to call after any error, and soon over: what
        the ledger does not answer in `CLOSE_PATIENCE` seconds is left to the next claim, which voids it."""
        patience = min(self._options.patience, CLOSE_PATIENCE)
        try:
            if self._looking:
                self._looking.cancel()
                await asyncio.wait((self._looking,))
            await self.retention.close()
            with contextlib.suppress(StoreUnavailable, Fenced):
                await self.settle("the publisher closed", patience=patience)
                if self.ledger.epoch is not None:
                    await self._within(patience, self.ledger.release(), "the release of the stream")
        finally:
            try:
                if self._attempt:
                    await self._attempt.cancel()
                    self._baseline.lose()
            finally:
                self._baseline.close()
                self.state.close()
                self.workers.close()
