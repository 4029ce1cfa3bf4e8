"""Every rank but the first: it answers what rank 0 opens, and the ledger tells what became of it (musts P1-P3, P7).

    open of my group and call ─► diff ... ─► part ─► seal   ─► baseline commits
                                   └─► fail           abort  ─► baseline undone

A member writes no record. It answers only opens of its own group and of its own call of `publish`; it takes no
part in what another group claims, or what rank 0 skips. A member does not stop after a fixed time. It stops when the
ledger decides, or when neither the ledger nor the attempt's objects have changed for `patience` seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from dcr_daemon import runtime
from dcr_daemon.errors import Corrupt, DcrError, Fenced, KeyNotFound, StoreUnavailable, UpdateAborted, UsageError
from dcr_daemon.events import Emit, Opened, Retrying, Waiting
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.listed import read_listed
from dcr_daemon.ledger.records import Abort, AnyRecord, Epoch, Fail, Open, Release, Seal
from dcr_daemon.publish.group.anchors import write_share
from dcr_daemon.publish.group.context import RankContext
from dcr_daemon.publish.group.coordinator import CLOSE_PATIENCE, Coordinator, Judge
from dcr_daemon.publish.timeouts import with_timeout
from dcr_daemon.publish.version.attempt import Attempt, put
from dcr_daemon.publish.version.fate import Cause, reason_of
from dcr_daemon.publish.version.versions import SealedVersion
from dcr_daemon.store.poller import Poller

T = TypeVar("T")

FAIL_PATIENCE = 30.0  #: seconds that a rank tries to say that it fails
LONG_START = 6  #: patiences that rank 0 may take to its first open: it claims, and may create the stream
CATCH_UP = 64  #: records read back at the start
_FIRST, _LAST = 0.05, 1.0  #: seconds between two looks at the ledger


class Member(Coordinator):
    """Made by `opening.open_member`."""

    def __init__(self, context: RankContext, emit: Emit) -> None:
        self.context, self.ledger, self.layout = context, context.ledger, context.layout
        self._options, self._emit = context.options, emit
        self._records = context.ledger.follow()
        self._call = 0
        self._epoch: int | None = None  #: of rank 0 of this group, known from its first open
        self._later_claim: Epoch | None = None  #: the newest one since this rank listens, while `_epoch` is not known
        self._later_group = ""  #: name of the publisher that claimed so, and opened for another group
        self._ousted = ""
        self._released = False
        self._newest_open: Open | None = None
        self._joined_open: Open | None = None
        self._fates: dict[int, Seal | Abort] = {}  #: of what is answered, and of what was opened last
        self._failed = 0  #: the newest attempt that was told to fail; the reason told first stands
        self._seal_to_anchor: Seal | None = None

    async def _until(
        self, found: Callable[[], T | None], what: str, look: Callable[[], Awaitable[None]] | None = None
    ) -> T:
        """Read the ledger on until `found` answers, or raises; see the module for when it ends otherwise."""
        poller, stalled = Poller(first=_FIRST, longest=_LAST, factor=1.5), _Stalled(self._options.patience)
        start = LONG_START * self._options.patience
        while True:
            try:
                if await self._read():
                    poller.reset()
                    stalled.moved()
                if look:
                    await look()
                if (answer := found()) is not None:
                    return answer
                if self._epoch is None and poller.waited > start:
                    self._ousted = self._later_group
                    self._check_ours()
                    raise UpdateAborted(
                        f"{what}: rank 0 of this group has opened nothing in {start:g} s",
                        hint="is it alive, or is this process left over from an earlier start? End and start all ranks",
                    )
                if stalled.long and self._epoch is not None and stalled.at(await self._progress()):
                    raise UpdateAborted(
                        f"{what}: nothing moved for {self._options.patience:g} s; is rank 0 alive?",
                        hint="start the group anew; nothing that was sealed is lost",
                    )
            except StoreUnavailable as error:
                self._emit(Retrying(what=f"the store of {self.ledger.store.url}: {error.message}"))
            if poller.report_due():
                self._emit(Waiting(what=what))
            await poller.pause()

    async def _progress(self) -> int:
        """How many objects the attempt under way has in the bucket."""
        if self._joined_open is None:
            return 0
        prefix = names.attempt(self._joined_open.version, self._joined_open.seq)
        return len([entry async for entry in self.ledger.store.list(prefix)])

    async def _read(self) -> bool:
        """Read the ledger to its tail; whether there was anything new."""
        await self.ledger.read()
        fresh = self._records.taken()
        for record in fresh:
            self._take(record)
        return bool(fresh)

    def _take(self, record: AnyRecord, *, earlier: bool = False) -> None:
        """`earlier`: the record was there before this rank listened."""
        match record:
            case Epoch():
                if self._epoch is None:
                    self._later_claim = None if earlier else record
                elif record.seq > self._epoch:
                    self._ousted = record.name
            case Release():
                self._released |= record.epoch == self._epoch
            case Open():
                if record.group == self.context.rank.group:
                    self._newest_open, self._epoch = record, record.epoch
                elif self._later_claim and record.epoch == self._later_claim.seq:
                    self._later_group = self._later_claim.name  # unless our rank 0 is still to claim
            case Seal() | Abort():
                live = {one.seq for one in (self._joined_open, self._newest_open) if one}
                self._fates = {
                    seq: fate for seq, fate in {**self._fates, record.attempt: record}.items() if seq in live
                }
            case _:
                pass

    async def open(self, *, step: int | None = None, call: int | None = None) -> Open:
        await self.abort_unless_sealed("the next update began")
        self._call = self._call + 1 if call is None else call
        if self.context.holds:
            with contextlib.suppress(DcrError):  # `start` meets it again, when rank 0 can be told
                await self.context.restore()
        record = await self._until(self._open_of_this_call, f"update {self._call} of rank 0", self._refuse_missed)
        self._joined_open = record
        runtime.failpoint("publish.member.open")
        if record.step != step:
            raise UsageError(
                f"rank 0 publishes step {record.step} and {self.context.rank} step {step}",
                hint="every rank has to call publish for the same steps",
            )
        return record

    def _open_of_this_call(self) -> Open | None:
        opened = self._newest_open
        if opened is None or opened.call < self._call:
            self._check_ours()
            return None
        if opened.call > self._call:
            self._check_ours()
            raise UpdateAborted(f"rank 0 skipped update {self._call} and is in update {opened.call}")
        self._check_open(opened)
        return opened

    async def start(self, record: Open) -> Attempt:
        self._check_open(record)
        attempt = await self.context.start(record)
        self._emit(Opened(version=record.version, attempt=record.seq, step=record.step))
        return attempt

    async def agree(self, record: Open, round_: int, *, declared: bytes, judge: Judge) -> bytes:
        rank, store, limit = self.context.rank, self.ledger.store, self._options.declaration_limit
        key = names.declaration(record.version, record.seq, record.group, rank.number, rank.nonce, round_)
        await put(store, key, declared, self._options.patience)
        runtime.failpoint("publish.declared")
        judged, verdict = names.verdict(record.version, record.seq, round_), list[bytes]()

        async def look() -> None:
            with contextlib.suppress(KeyNotFound):
                seen = await store.get(judged, limit=limit)
                patience = self._options.patience
                verdict.append(await read_listed(store, judged, limit=limit, patience=patience, last=seen))

        def found() -> bytes | None:
            # With a verdict and no abort, rank 0 has already gone on to the collective calls and waits for this rank.
            if not verdict or isinstance(self._fates.get(record.seq), Abort):
                self._check_open(record)
            return verdict[0] if verdict else None

        return await self._until(found, f"version {record.version}: rank 0's verdict", look)

    def _check_open(self, record: Open) -> None:
        """Raise if the attempt has ended; with rank 0's reason, even if it has closed its publisher since."""
        if isinstance(fate := self._fates.get(record.seq), Abort) and not self._ousted:
            raise UpdateAborted(f"rank 0 gave the update up: {fate.reason}")
        self._check_ours()

    async def seal(
        self,
        attempt: Attempt,
        *,
        source: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> SealedVersion:
        check()
        own = await attempt.contribution(anchor=self.context.owes_anchor)
        await attempt.upload(own, self._options.patience)
        runtime.failpoint("publish.uploaded")
        fate = await self._fate(attempt.record)
        if isinstance(fate, Seal):
            return await self._commit(attempt, fate)
        reason = fate.reason if fate else "rank 0 ended"
        error: DcrError = UpdateAborted(f"version {attempt.version} was given up: {reason}")
        if fate is None or self._ousted:
            error = self._why_not_ours() or error
        await self._undo(fate, error)
        raise error

    async def _fate(self, record: Open) -> Seal | Abort | None:
        """What became of an attempt; None if a newer claim or a release voided it."""

        def decided() -> tuple[Seal | Abort | None] | None:
            if fate := self._fates.get(record.seq):
                return (fate,)
            return (None,) if self._ousted or self._released else None

        fate = (await self._until(decided, f"the fate of version {record.version}"))[0]
        runtime.failpoint("publish.member.fate")
        return fate

    async def _commit(self, attempt: Attempt, seal: Seal) -> SealedVersion:
        """The attempt was sealed. If it was with the part of another process that believes to be this rank, what this
        one diffed is no version of anybody's (must P1)."""
        rank = self.context.rank
        part = names.part(seal.version, seal.attempt, rank.group, rank.number, rank.nonce)
        if all(ref.key != part for ref in seal.parts):
            error = Corrupt(
                f"version {seal.version} was sealed with the part of another process that is {rank}",
                hint="end all processes of the group and start it anew",
            )
            await self._undo(None, error)
            self.context.baseline.invalidate()
            raise error
        self._joined_open = None
        self._seal_to_anchor = seal if seal.anchor else None
        if seal.anchor:
            self.context.owes_anchor = False
        return self.context.commit(seal)

    async def _undo(self, fate: Abort | None, cause: Cause) -> None:
        self._joined_open = None
        await self.context.undo(cause, reason=fate.reason if fate else "rank 0 ended, or was fenced")
        if fate and fate.rebuild and self.context.holds:
            self.context.mark_suspect()

    async def abort_unless_sealed(self, cause: Cause, *, patience: float | None = None) -> SealedVersion | None:
        """See `Coordinator.abort_unless_sealed`: a member tells rank 0 that it fails, and waits (must P7)."""
        record, attempt = self._joined_open, self.context.attempt
        if record is None:
            return None
        if attempt:
            await attempt.cancel()
        try:
            await self._read()
            if record.seq not in self._fates and not self._ousted and not self._released:
                await self._fail(record, reason_of(cause)[:500])
            if patience is None:
                fate = await self._fate(record)
            else:
                what = f"rank 0's abort of version {record.version}"
                fate = await with_timeout(patience, self._fate(record), what=what, emit=self._emit)
        except DcrError:
            if attempt:
                attempt.fate.set_unknown(cause)
            raise
        if isinstance(fate, Seal) and attempt:
            return await self._commit(attempt, fate)
        await self._undo(fate if isinstance(fate, Abort) else None, cause)
        return None

    async def _refuse_missed(self) -> None:
        """An open of a call that this rank has passed without answering comes to nothing, and rank 0 must know (P2)."""
        opened = self._newest_open
        missed = opened and opened.call < self._call and opened is not self._joined_open
        if opened and missed and opened.seq not in self._fates:
            await self._fail(opened, f"it has passed update {opened.call} without taking part in it")

    async def skip(self, *, call: int, reason: str) -> None:
        """See `Coordinator.skip`: what rank 0 opens for this call is refused when it is seen."""
        self._call = call + 1

    async def _fail(self, record: Open, reason: str, patience: float = FAIL_PATIENCE) -> None:
        """Tell rank 0; it aborts. What cannot be told is found out by the next call (must P7)."""
        rank = self.context.rank
        if record.seq == self._failed:
            return
        fail = Fail(
            stream=record.stream, group=record.group, call=record.call, attempt=record.seq, rank=rank.number,
            nonce=rank.nonce, reason=reason,
        )  # fmt: skip
        key = names.fail(record.version, record.seq, record.group, rank.number, rank.nonce)
        with contextlib.suppress(StoreUnavailable):
            await put(self.ledger.store, key, records.encode(fail), patience)
            self._failed = record.seq
        runtime.failpoint("publish.failed")

    async def catch_up(self) -> None:
        """Take what rank 0 may have written before this rank looked: everything since the newest claim, if it is not
        long ago."""
        claim, tip = self.ledger.state.epoch, self.ledger.tip.seq
        if claim is None:
            return
        for seq in range(max(claim.seq, tip - CATCH_UP), tip + 1):
            record = await self._read_earlier(seq)
            if record and record.epoch == claim.seq:  # any other one here is void
                self._take(record, earlier=True)

    async def _read_earlier(self, seq: int) -> AnyRecord | None:
        """A record that was read before this rank listened; None for one that says nothing, whoever reads it."""
        for _ in range(2):
            with contextlib.suppress(Corrupt):
                return await self.ledger.history.record(seq)
        return None

    def _check_ours(self) -> None:
        """Raise if rank 0 of this group does not hold the stream any more."""
        if error := self._why_not_ours():
            raise error

    def _why_not_ours(self) -> DcrError | None:
        if self._ousted:
            return Fenced(
                f"publisher {self._ousted} has claimed {self.ledger.store.url} since this group began",
                hint="this group must stay down; only one publishes to a stream",
            )
        if self._released:
            return UpdateAborted("rank 0 has closed its publisher", hint="close it on every rank, or on none")
        return None

    async def run_idle_checks(self) -> None:
        await self.context.run_idle_checks(self._look, lambda: self._check_ours() if self._ousted else None)

    async def _look(self) -> None:
        with contextlib.suppress(StoreUnavailable):
            await self._read()
            await self._refuse_missed()

    async def repair(self) -> None:
        """See `Coordinator.repair`: the next part asks for the anchor (must P4)."""
        await self.context.restore()

    async def anchor_if_due(self, *, at_once: bool = False) -> None:
        """See `Coordinator.anchor_if_due`: a member writes its share of the anchor that the newest seal announces."""
        seal, self._seal_to_anchor = self._seal_to_anchor, None
        if seal is not None and seal.version == self.context.baseline.version:
            await self.context.prove()
            try:
                await write_share(self.context, seal)
            except Corrupt as error:
                self.context.damaged(f"while its share of an anchor was written: {error.message}")

    def start_lag_timer(self) -> None:
        """Rank 0 alone gives other ranks up."""

    async def close(self) -> None:
        """See `Coordinator.close`."""
        try:
            if self._joined_open:
                await self._read()
                if self._joined_open.seq not in self._fates:
                    await self._fail(self._joined_open, "the rank closed its publisher", CLOSE_PATIENCE)
        except DcrError:
            pass  # rank 0 finds out by its next call
        finally:
            await self.context.close()


class _Stalled:
    """Whether nothing has moved for `patience` seconds: neither the ledger (`moved`) nor a number that is looked at."""

    def __init__(self, patience: float) -> None:
        self._patience, self._since, self._last = patience, runtime.monotonic(), -1

    def moved(self) -> None:
        self._since = runtime.monotonic()

    @property
    def long(self) -> bool:
        return runtime.monotonic() - self._since > self._patience

    def at(self, number: int) -> bool:
        """Whether the number is what it was when last looked at; a new one is a move."""
        same, self._last = number == self._last, number
        if not same:
            self.moved()
        return same
