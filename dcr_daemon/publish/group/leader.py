"""Rank 0's hold on a stream, from claim to release: what may happen when (musts P2-P7, L1, L4, L5).

    open: claim ─► read everything ─► baseline          (P5)
    begin ─► diff ... ─► seal      ─► baseline commits   only when the seal is known to be in the ledger
                └──────► abort     ─► baseline undone    only when it is known not to be

An attempt whose fate is open stays with the session; `settle` learns it from the ledger, and everything that could
depend on it settles first. No wait for the ledger is longer than the patience: the call ends, the record stays
undecided (must L1). Between updates `run_idle_checks` looks for a newer claim and for damage. A session is used by one
task at a time. Other ranks (`Member`) answer what it opens; it seals what all of them contributed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from dcr_daemon import runtime
from dcr_daemon.canonical.fingerprint import Vector, total
from dcr_daemon.checkpoint.directory import read_side_files
from dcr_daemon.errors import Corrupt, Fenced, StoreUnavailable, UpdateAborted
from dcr_daemon.events import Degraded, Emit, Opened, Retrying
from dcr_daemon.ledger import names
from dcr_daemon.ledger.ledger import Header
from dcr_daemon.ledger.records import Abort, Open, Seal, show_u64
from dcr_daemon.ledger.retention import RetentionPolicy
from dcr_daemon.publish.group.anchors import AnchorPolicy, SinceAnchor, join_anchor, write_anchor, write_share
from dcr_daemon.publish.group.collect import ObjectCollector, read_listed
from dcr_daemon.publish.group.context import RankContext
from dcr_daemon.publish.group.join import CONCURRENCY, Joined, join, solo
from dcr_daemon.publish.group.retention import Retention
from dcr_daemon.publish.options import PublishOptions
from dcr_daemon.publish.timeouts import with_timeout
from dcr_daemon.publish.version.attempt import Attempt, Contribution, put
from dcr_daemon.publish.version.versions import SealedVersion
from dcr_daemon.store.task_limiter import run_limited
from dcr_daemon.wording import shorten

T = TypeVar("T")

SETTLE_PAUSE = 2.0  #: seconds between two looks for the fate of a record
CLOSE_PATIENCE = 5.0  #: seconds that each step of an end waits for the ledger: supervisors kill after 30


class Leader:
    """Made by `open_leader`. `layout` is the stream's."""

    def __init__(self, options: PublishOptions, context: RankContext, emit: Emit) -> None:
        self.context, self.ledger, self.layout = context, context.ledger, context.layout
        self.workers, self.state = context.workers, context.state
        self._options, self._emit = options, emit
        policy = AnchorPolicy(options.anchor_every, options.anchor_share)
        self._since_anchor = SinceAnchor(self.ledger, policy, self.layout.nbytes)
        keep = RetentionPolicy.of(options.keep_versions, options.keep_hours)
        self.retention = Retention(self.ledger, keep, emit, anchors=policy.active)
        self._call = 0
        self._looking: asyncio.Future[object] | None = None
        self._spoilt: int | None = None
        self._contribution: Joined | None = None
        self._vector: tuple[int, Vector] | None = None
        self._mismatch = False  #: the ranks do not add up: they are to build their baselines anew
        self._pressed: float | None = None
        self._sharing: Seal | None = None

    @property
    def head(self) -> int:
        """The newest sealed version, as far as the ledger was read."""
        return self.ledger.state.seal.version

    @property
    def read(self) -> Callable[[int, int, int], Any]:
        """See `RankContext.read`."""
        return self.context.read

    async def begin(self, *, step: int | None = None, call: int | None = None) -> Attempt:
        """Open an attempt at the next version and begin to diff; an undecided one is settled first (must P7).

        Args:
            call: the number of this call of `publish` (must P2); one more than the last by default.

        Raises:
            Fenced: another publisher owns the stream.
            StoreUnavailable: the fate of the previous attempt cannot be learnt now.
        """
        return await self.start(await self.open(step=step, call=call))

    async def open(self, *, step: int | None = None, call: int | None = None) -> Open:
        """Open an attempt; `start` begins its diff. Arguments and errors as of `begin`."""
        await self.settle("the next update began")
        if self.context.holds:
            await self.context.restore()
        self._call = self._call + 1 if call is None else call
        self._pressed = None

        def make(header: Header) -> Open:
            base = header.state.seal.version
            group = self.context.rank.group
            return Open(**header.fields, version=base + 1, base=base, group=group, call=self._call, step=step)

        record = await self._with_timeout(self._options.patience, self.ledger.append(make), "room for the next version")
        runtime.failpoint("publish.open")
        return record

    async def start(self, record: Open) -> Attempt:
        """Begin to diff for what `open` opened, from exactly its base (must P3).

        Raises:
            Fenced: another publisher has claimed the stream meanwhile.
        """
        self.ledger.check_held()
        attempt = await self.context.start(record)
        self._emit(Opened(version=record.version, attempt=record.seq, step=record.step))
        return attempt

    async def agree(self, record: Open, round_: int, declared: bytes, judge: Callable[[list[bytes]], bytes]) -> bytes:
        """What all ranks declare that they hold, judged; the verdict, which every rank reads.

        Args:
            round_: agreeing takes several.
            declared: this rank's declaration.
            judge: declarations, by rank → verdict; called on a worker. What it raises ends the attempt.
        """
        if self.context.rank.world == 1:
            return await self.workers.run_uncancellable(judge, [declared])
        runtime.failpoint("publish.declared")
        keys = await self._muster(names.attempt(record.version, record.seq)).all(
            names.declared(round_), what=f"version {record.version}: the declaration"
        )
        store, limit = self.ledger.store, self._options.declaration_limit
        reads = (
            partial(read_listed, store, key, limit=limit, patience=self._options.patience)
            for _, key in sorted(keys.items())
        )
        others = await run_limited(reads, CONCURRENCY)
        verdict = await self.workers.run_uncancellable(judge, [declared, *others])
        await put(store, names.verdict(record.version, record.seq, round_), verdict, self._options.patience)
        runtime.failpoint("publish.verdict.put")
        return verdict

    def in_doubt(self, version: int) -> bool:
        """Whether nobody can tell here whether `version`, which was under way, exists."""
        return self.ledger.undecided or self.head >= version

    async def skip(self, *, call: int, reason: str) -> None:
        """Tell the other ranks that this call comes to nothing, so that none waits for it."""
        if self.context.rank.world > 1:
            await self.open(call=call)
            await self.settle(reason)

    def start_lag_timer(self) -> None:
        """The trainer goes on: from now on ranks that have fallen silent are given up."""
        self._pressed = self._pressed or runtime.monotonic()

    def _muster(self, prefix: str) -> ObjectCollector:
        return ObjectCollector(
            self.ledger.store, self.context.rank, prefix, lag=self._options.lag, pressed=lambda: self._pressed,
            check=self._still_held, emit=self._emit,
        )  # fmt: skip

    async def _still_held(self) -> None:
        """Other ranks fall silent when the stream is another publisher's: nothing is waited for then (must P6)."""
        with contextlib.suppress(StoreUnavailable):
            await self.ledger.read()
        self.ledger.check_held()

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
            UpdateAborted: a rank gave the update up, or is silent while the next one has begun.
            Corrupt: the ranks together do not hold what the stream says; each builds its baseline anew.
        """
        open_ = attempt.record
        own = await attempt.upload(self._options.patience)
        joined = self._contribution = await self._join(open_, own)
        after = joined.after.astype("<u8").tobytes()
        key = names.vector(open_.version, open_.seq)
        fingerprint = await put(self.ledger.store, key, after, self._options.patience)
        anchor = self.context.rank.world > 1 and (
            joined.anchor or self.context.owes_anchor or await self._since_anchor.due(joined)
        )
        runtime.failpoint("publish.uploaded")

        def make(header: Header) -> Seal:
            check()
            return Seal(
                **header.fields, version=open_.version, base=open_.base, attempt=attempt.id, parts=joined.parts,
                fingerprint=fingerprint, before=show_u64(total(joined.before)), after=show_u64(total(joined.after)),
                previous=header.state.seal.seq, changed=joined.changed,
                elements=sum(spec.elements for spec in self.layout), bytes=joined.bytes,
                dense_bytes=self.layout.nbytes, step=open_.step, source=source, metadata=metadata or {}, anchor=anchor,
            )  # fmt: skip

        seal = await self._append_seal(attempt, make)
        runtime.failpoint("publish.sealed")
        return self._commit(seal)

    async def _join(self, open_: Open, own: Contribution) -> Joined:
        """All ranks' contributions, which add up to the base, tensor by tensor (must P3)."""
        if self.context.rank.world == 1:
            return solo(own)
        prefix = names.attempt(open_.version, open_.seq)
        keys = await self._muster(prefix).all(".part.json", what=f"version {open_.version}: the part")
        joined = await join(
            own, keys, open_, self.ledger.store, self.context.objects, self.layout, self._options.patience
        )  # fmt: skip
        runtime.failpoint("publish.joined")
        if not self._vector or self._vector[0] != open_.base:
            self._vector = open_.base, await self.context.restorer.vector(open_.base)
        missed = joined.missed(self._vector[1], self.layout)
        if missed and not (joined.stray or self.context.baseline.unverified_base):
            self._mismatch = True
            raise Corrupt(
                f"what the ranks hold does not add up to version {open_.base} in {len(missed)} tensors: "
                f"{shorten(missed)}",
                hint="every rank builds its baseline anew; if it stays so, elements have no rank or several",
            )
        return joined

    async def _append_seal(self, attempt: Attempt, make: Callable[[Header], Seal]) -> Seal:
        """Append until the seal is known to be in the ledger; its slot alone decides that (must L1)."""
        deadline, what = runtime.monotonic() + self._options.patience, f"the fate of version {attempt.version}"

        async def append() -> Seal:
            await self.ledger.settle()
            return await self._seal_of(attempt) or await self.ledger.append(make)

        while True:
            try:
                return await self._with_timeout(max(deadline - runtime.monotonic(), SETTLE_PAUSE), append(), what)
            except StoreUnavailable as error:
                if runtime.monotonic() > deadline:
                    raise
                self._emit(Retrying(what=f"{what}: {error.message}"))
                await runtime.sleep(SETTLE_PAUSE)

    async def _with_timeout(self, seconds: float, work: Awaitable[T], what: str) -> T:
        return await with_timeout(seconds, work, what=f"the ledger of {self.ledger.store.url}: {what}", emit=self._emit)

    async def _seal_of(self, attempt: Attempt) -> Seal | None:
        """The seal of an attempt, if the ledger as read has it."""
        if self.head < attempt.version:
            return None
        seal = await self.ledger.history.seal(attempt.version)
        return seal if seal.attempt == attempt.id else None

    def _commit(self, seal: Seal) -> SealedVersion:
        joined, self._contribution = self._contribution, None
        assert joined is not None
        sealed = self.context.commit(seal)
        self._vector = seal.version, joined.after
        self._sharing = seal if seal.anchor else None
        self.retention.sealed()
        return sealed

    async def settle(self, reason: str, *, patience: float | None = None) -> SealedVersion | None:
        """Decide what is undecided: a sealed attempt is committed (and returned), any other aborted and undone.

        Args:
            reason: why an attempt that is not sealed ends here.
            patience: seconds that the ledger may take; by default those of every update.

        Raises:
            Fenced: another publisher owns the stream; the attempt is undone all the same.
            StoreUnavailable: its fate cannot be learnt now; nothing is changed.
        """
        attempt = self.context.attempt
        if attempt:
            await attempt.cancel()
        if attempt is None and not self.ledger.undecided and self.ledger.state.open is None:
            return None
        what = f"the fate of version {attempt.version}" if attempt else "the fate of a record"
        patience = self._options.patience if patience is None else patience
        try:
            seal = await self._with_timeout(patience, self._fate(attempt, reason[:500]), what)
        except Fenced:
            await self._undo("another publisher claimed the stream")
            raise
        if attempt and seal:
            return self._commit(seal)
        await self._undo(reason)
        return None

    async def _fate(self, attempt: Attempt | None, reason: str) -> Seal | None:
        """The seal of an attempt, or None once nothing in the ledger stands open that could become one."""
        await self.ledger.settle()
        if attempt and (seal := await self._seal_of(attempt)):
            return seal  # whatever stands after it, and whether or not that can be read now
        await self.ledger.read()
        self.ledger.check_held()
        if opened := self.ledger.state.open:
            seq, version, rebuild = opened.seq, opened.version, self._mismatch
            await self.ledger.append(
                lambda header: Abort(**header.fields, attempt=seq, version=version, reason=reason, rebuild=rebuild)
            )
        return None

    async def _undo(self, reason: str) -> None:
        self._contribution = None
        await self.context.undo(reason)
        if self._mismatch:
            self._mismatch = False
            self.context.mark_suspect()

    async def run_idle_checks(self) -> None:
        """Between updates, until cancelled: look for a newer claim, and for damage in the baseline.

        Returns once the baseline was found damaged; `repair`, or the next `begin`, builds it anew (must P4).

        Raises:
            Fenced: another publisher owns the stream.
        """
        await self.context.run_idle_checks(self._look, self.ledger.check_held)

    async def _look(self) -> None:
        """Read the ledger on. The read outlives a cancelled `run_idle_checks`: else none would end in a slow bucket."""
        self._looking = self._looking or asyncio.ensure_future(self.ledger.read())
        with contextlib.suppress(StoreUnavailable):
            await asyncio.shield(self._looking)
        self._looking = None

    async def repair(self) -> None:
        """Build a baseline that `run_idle_checks` found damaged anew, and write the anchor that is owed.

        Raises:
            Fenced, StoreUnavailable: as everything that reads or writes; the next `begin` tries again.
        """
        await self.context.restore()
        await self.anchor_if_due()

    async def anchor_if_due(self, *, at_once: bool = False) -> None:
        """Write an anchor of the head if the policy asks for one, or damage. No attempt may be under way.

        From many ranks that is decided by the seal, so that all of them write their shares of one version.

        Raises:
            Fenced: another publisher owns the stream.
        """
        if self.ledger.undecided:
            await self._with_timeout(self._options.patience, self.ledger.settle(), "the fate of a record")
            await self.ledger.read()
        newest = self.ledger.state.anchor
        if self.context.attempt or (newest and newest.version == self.head):
            return
        if self.context.rank.world > 1:
            await self._anchor_with_others()
            return
        if not (at_once or self.context.owes_anchor) and not await self._since_anchor.due():
            return
        if self.ledger.tip.seq == self._spoilt:
            return  # its names are taken by damaged bytes; after the next version it has others (must L0)
        await self.context.prove()
        if self.context.baseline.unverified_base:
            return  # the version that comes next is anchored instead
        runtime.failpoint("publish.anchor.proved")
        side_files = await self.side_files()
        try:
            await write_anchor(
                self.ledger, self.context.baseline, side_files, self.workers, self._options.patience, self._emit
            )
        except Corrupt as error:
            self._spoilt = self.ledger.tip.seq
            self.context.damaged(f"while its anchor was written: {error.message}")
            return
        self.context.owes_anchor = False
        self.retention.anchored()

    async def _anchor_with_others(self) -> None:
        seal, self._sharing = self._sharing, None
        if seal is None or seal.version != self.head:
            return
        await self.context.prove()
        try:
            own = await write_share(self.context, seal)
        except Corrupt as error:
            self.context.damaged(f"while its share of an anchor was written: {error.message}")
            return
        try:
            keys = await self._muster(names.anchor(seal.version, seal.seq)).all(
                ".share.json", what=f"the anchor of version {seal.version}: the share"
            )
            await join_anchor(self.context, seal, own, keys, await self.side_files(), self._emit)
        except (
            UpdateAborted,
            Corrupt,
        ) as error:  # no fault of this version, nor of the next one: that brings another anchor
            self.context.owes_anchor = True
            self._emit(
                Degraded(what=f"version {seal.version} has no anchor; a later version tries again: {error.message}")
            )
            return
        self.context.owes_anchor = False
        self.retention.anchored()

    async def side_files(self) -> dict[str, bytes]:
        """Side files for an anchor: the base's, else those of the anchor before."""
        base = self._options.base
        if base and base.is_dir():
            return read_side_files(base)
        return await self.context.restorer.side_files()

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
                    await self._with_timeout(patience, self.ledger.release(), "the release of the stream")
        finally:
            await self.context.close()
