"""`Leader`: rank 0's `Coordinator`. It claims the stream, opens attempts, and seals what all ranks contributed
(musts P2-P7, L1, L4, L5).

    open_leader: read ─► (create) ─► claim ─► baseline (group of one only)    (P5)
    open ─► diff ... ─► seal      ─► baseline commits     only when the seal is known to be in the ledger
               └──────► abort     ─► baseline undone      only when it is known not to be

An attempt whose fate is not known stays with the leader: `abort_unless_sealed` learns it from the ledger, and every
call that depends on the fate calls `abort_unless_sealed` first. No wait for the ledger is longer than the patience: the
call ends, the record stays undecided (must L1). The other ranks of the group are reached through `Peers`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from dcr_daemon import runtime
from dcr_daemon.canonical.fingerprint import total
from dcr_daemon.errors import DcrError, Fenced, StoreUnavailable
from dcr_daemon.events import Emit, Opened, Retrying
from dcr_daemon.ledger import names
from dcr_daemon.ledger.ledger import Header
from dcr_daemon.ledger.records import Abort, ObjectRef, Open, Seal, show_u64
from dcr_daemon.ledger.retention.plan import RetentionPolicy
from dcr_daemon.publish.group.context import RankContext
from dcr_daemon.publish.group.coordinator import CLOSE_PATIENCE, Coordinator, Judge
from dcr_daemon.publish.group.join import Joined
from dcr_daemon.publish.group.peers import SumsMismatch, peers_of
from dcr_daemon.publish.group.retention import Retention
from dcr_daemon.publish.group.since_anchor import AnchorPolicy, SinceAnchor
from dcr_daemon.publish.timeouts import with_timeout
from dcr_daemon.publish.version.attempt import Attempt, Contribution, put
from dcr_daemon.publish.version.fate import Cause, reason_of
from dcr_daemon.publish.version.versions import SealedVersion
from dcr_daemon.task_limiter import TaskLimiter

T = TypeVar("T")

RESOLVE_PAUSE = 2.0  #: seconds between two tries to learn the fate of a record


class Leader(Coordinator):
    """Made by `opening.open_leader`, after which the ledger is claimed.

    Attributes:
        retention: deletes what is not kept, behind the updates.
    """

    def __init__(self, context: RankContext, emit: Emit) -> None:
        self.context, self.ledger, self.layout = context, context.ledger, context.layout
        self._options, self._emit = context.options, emit
        policy = AnchorPolicy(self._options.anchor_every, self._options.anchor_share)
        keep = RetentionPolicy.of(self._options.keep_versions, self._options.keep_hours)
        self.retention = Retention(self.ledger, keep, emit=emit, anchors=policy.active)
        kept = context.state.chain
        since_anchor = SinceAnchor(self.ledger, policy, dense_bytes=self.layout.nbytes, kept=kept)
        self._peers = peers_of(context, since_anchor, emit=emit)
        self._call = 0
        self._update_began = 0.0
        self._reading: asyncio.Future[object] | None = None
        self._joined: Joined | None = None  #: what the attempt under way is to be sealed from
        self._rebuild = False  #: the ranks do not add up: the abort tells them to build their baselines anew

    async def open(self, *, step: int | None = None, call: int | None = None) -> Open:
        self._update_began = runtime.monotonic()
        await self.abort_unless_sealed("the next update began")
        if self.context.holds:
            await self.context.restore()
        self._call = self._call + 1 if call is None else call
        self._peers.opened()

        def make(header: Header) -> Open:
            base = header.state.seal.version
            group = self.context.rank.group
            return Open(**header.fields, version=base + 1, base=base, group=group, call=self._call, step=step)

        record = await self._with_timeout(self._options.patience, self.ledger.append(make), "room for the next version")
        runtime.failpoint("publish.open")
        return record

    async def start(self, record: Open) -> Attempt:
        self.ledger.check_held()
        attempt = await self.context.start(record)
        seconds = runtime.monotonic() - self._update_began
        self._emit(Opened(version=record.version, attempt=record.seq, step=record.step, seconds=seconds))
        return attempt

    async def agree(self, record: Open, round_: int, *, declared: bytes, judge: Judge) -> bytes:
        return await self._peers.agree(record, round_, declared=declared, judge=judge)

    async def skip(self, *, call: int, reason: str) -> None:
        if self._peers.exist:
            await self.open(call=call)
            await self.abort_unless_sealed(reason)

    def start_lag_timer(self) -> None:
        self._peers.start_lag_timer()

    async def seal(
        self,
        attempt: Attempt,
        *,
        source: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> SealedVersion:
        open_, own = attempt.record, await attempt.contribution()
        async with TaskLimiter(None) as uploads:  # what the seal names is durable when this block is left (must L4)
            await uploads.start(partial(attempt.upload, own, self._options.patience))
            await uploads.start(self._look_above)
            joining = await uploads.start(partial(self._join, open_, own))
        joined, fingerprint = joining.result()
        self._joined = joined
        anchor = await self._peers.anchor_is_due(joined)
        runtime.failpoint("publish.uploaded")

        def make(header: Header) -> Seal:
            check()
            return Seal(
                **header.fields, version=open_.version, base=open_.base, attempt=attempt.id, parts=joined.parts,
                fingerprint=fingerprint, before=show_u64(total(joined.before)), after=show_u64(total(joined.after)),
                previous=header.state.seal.seq, changed=joined.changed,
                elements=self.layout.elements, bytes=joined.bytes,
                dense_bytes=self.layout.nbytes, step=open_.step, source=source, metadata=metadata or {}, anchor=anchor,
            )  # fmt: skip

        seal = await self._append_seal(attempt, make)
        runtime.failpoint("publish.sealed")
        return self._commit(seal)

    async def _join(self, open_: Open, own: Contribution) -> tuple[Joined, ObjectRef]:
        """What all ranks contribute, and the version's vector, which is durable."""
        try:
            joined = await self._peers.join(open_, own)
        except SumsMismatch:
            self._rebuild = True
            raise
        after, key = joined.after.astype("<u8").tobytes(), names.vector(open_.version, open_.seq)
        return joined, await put(self.ledger.store, key, after, self._options.patience)

    async def _append_seal(self, attempt: Attempt, make: Callable[[Header], Seal]) -> Seal:
        """Append until the seal is known to be in the ledger; its slot alone decides that (must L1)."""
        deadline, what = runtime.monotonic() + self._options.patience, f"the fate of version {attempt.version}"

        async def append() -> Seal:
            return await self._resolve(attempt) or await self.ledger.append(make)

        while True:
            try:
                return await self._with_timeout(max(deadline - runtime.monotonic(), RESOLVE_PAUSE), append(), what)
            except StoreUnavailable as error:
                if runtime.monotonic() > deadline:
                    raise
                self._emit(Retrying(what=f"{what}: {error.message}"))
                await runtime.sleep(RESOLVE_PAUSE)

    async def _with_timeout(self, seconds: float, work: Awaitable[T], what: str) -> T:
        return await with_timeout(seconds, work, what=f"the ledger of {self.ledger.store.url}: {what}", emit=self._emit)

    async def _resolve(self, attempt: Attempt | None) -> Seal | None:
        """Decide what was sent to the ledger; the seal of `attempt`, if the ledger has it. Nothing is appended."""
        await self.ledger.resolve()
        if attempt is None or self.head < attempt.version:
            return None
        seal = await self.ledger.history.seal(attempt.version)
        return seal if seal.attempt == attempt.id else None

    def _commit(self, seal: Seal) -> SealedVersion:
        joined, self._joined = self._joined, None
        assert joined is not None
        sealed = self.context.commit(seal)
        self._peers.sealed(seal, joined)
        self.retention.sealed()
        return sealed

    async def abort_unless_sealed(self, cause: Cause, *, patience: float | None = None) -> SealedVersion | None:
        attempt = self.context.attempt
        if attempt:
            await attempt.cancel()
        if attempt is None and not self.ledger.undecided and self.ledger.state.open is None:
            return None
        what = f"the fate of version {attempt.version}" if attempt else "the fate of a record"
        patience = self._options.patience if patience is None else patience
        try:
            seal = await self._with_timeout(patience, self._resolve_or_abort(attempt, reason_of(cause)[:500]), what)
        except Fenced as fenced:
            await self._undo(fenced, reason="another publisher claimed the stream")
            raise
        except DcrError:
            if attempt and (self.ledger.undecided or self.head >= attempt.version):
                attempt.fate.set_unknown(cause)
            elif attempt:
                attempt.fate.set_aborted(cause)  # no seal was sent, and none will be
            raise
        if attempt and seal:
            return self._commit(seal)
        await self._undo(cause)
        return None

    async def _resolve_or_abort(self, attempt: Attempt | None, reason: str) -> Seal | None:
        """The seal of an attempt, or None once nothing in the ledger stands open that could become one."""
        if seal := await self._resolve(attempt):
            return seal  # whatever stands after it, and whether or not that can be read now
        await self.ledger.read()
        self.ledger.check_held()
        if opened := self.ledger.state.open:
            seq, version, rebuild = opened.seq, opened.version, self._rebuild
            await self.ledger.append(
                lambda header: Abort(**header.fields, attempt=seq, version=version, reason=reason, rebuild=rebuild)
            )
        return None

    async def _undo(self, cause: Cause, *, reason: str = "") -> None:
        self._joined = None
        await self.context.undo(cause, reason=reason)
        if self._rebuild:
            self._rebuild = False
            self.context.mark_suspect()

    async def run_idle_checks(self) -> None:
        await self.context.run_idle_checks(self._read_ledger, self.ledger.check_held)

    async def _read_ledger(self) -> None:
        """Read the ledger on. The read outlives a cancelled `run_idle_checks`: otherwise a slow bucket would never let
        a read finish."""
        self._reading = self._reading or asyncio.ensure_future(self._look())
        try:
            with contextlib.suppress(StoreUnavailable):
                await asyncio.shield(self._reading)
        finally:
            if self._reading.done():
                self._reading = None

    async def _look(self) -> None:
        await self.ledger.read()
        await self.ledger.look_above()  # so that the next append need not

    async def _look_above(self) -> None:
        """Look for a hole at the tail beside something else; if the bucket does not answer, `append` does it again."""
        with contextlib.suppress(StoreUnavailable):
            await self.ledger.look_above()

    async def repair(self) -> None:
        await self.context.restore()
        await self.anchor_if_due()

    async def anchor_if_due(self, *, at_once: bool = False) -> None:
        if self.ledger.undecided:
            await self._with_timeout(self._options.patience, self.ledger.resolve(), "the fate of a record")
            await self.ledger.read()
        newest = self.ledger.state.anchor
        if self.context.attempt or (newest and newest.version == self.head):
            return
        if await self._peers.write_anchor(at_once=at_once):
            self.context.owes_anchor = False
            self.retention.anchored()

    async def close(self) -> None:
        """See `Coordinator.close`. What the ledger does not answer in `CLOSE_PATIENCE` seconds is left to the next
        claim, which voids it."""
        patience = min(self._options.patience, CLOSE_PATIENCE)
        try:
            if self._reading:
                self._reading.cancel()
                await asyncio.wait((self._reading,))
            await self.retention.close()
            with contextlib.suppress(StoreUnavailable, Fenced):
                await self.abort_unless_sealed("the publisher closed", patience=patience)
                if self.ledger.epoch is not None:
                    await self._with_timeout(patience, self.ledger.release(), "the release of the stream")
        finally:
            await self.context.close()
