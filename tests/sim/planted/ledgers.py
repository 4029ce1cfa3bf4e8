"""Bugs of whoever appends to a ledger, or reads one (musts L0 to L3, P6, T1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from sim.planted.bug import Put, bug

from dcr_daemon import runtime
from dcr_daemon.events import discard
from dcr_daemon.ledger import fold, names, records, slot
from dcr_daemon.ledger import ledger as ledgers
from dcr_daemon.ledger.holes import HoleSearch
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.records import Epoch
from dcr_daemon.publish.baseline.restore import Restorer
from dcr_daemon.publish.group.leader import Leader
from dcr_daemon.store.port import Outcome


@bug("L0", "take_over", "answer_is_lost")
def occupied_slot_is_taken_for_mine(put: Put) -> None:
    """Whatever stands in the slot after a lost race, a writer believes that its own record is there."""

    async def occupy(store: Any, seq: int, body: bytes, **_: Any) -> bytes:
        if await store.create(names.record(seq), body) is not Outcome.UNKNOWN:
            return body
        return await slot.occupy(store, seq, body, emit=discard)

    put(ledgers, "occupy", occupy)


@bug("L0", "take_over", "answer_is_lost", "anything")
def writer_appends_without_reading(put: Put) -> None:
    """A writer that lost a slot tries the next one, without folding what stands in the one it lost."""
    right = Ledger._take

    def take(self: Ledger, step: Any, body: bytes | None = None) -> None:
        sent = self._sent
        if sent and sent.seq == step.tip.seq and sent.body != body:
            step = fold.Step(replace(step.tip, state=self.tip.state), None, "not read", step.foreign)
        right(self, step, body)

    put(Ledger, "_take", take)


@bug("L1", "late_seal", "answer_is_lost")
def no_answer_is_taken_for_a_failure(put: Put) -> None:
    """A seal whose answer is lost is given up and its update undone, though it may still arrive; and the baseline is
    then believed to be whatever the ledger says."""
    right = Leader.abort_unless_sealed

    async def abort_unless_sealed(self: Leader, cause: Any, **options: Any) -> Any:
        if self.ledger.undecided and self.context.attempt:
            attempt, self.ledger._sent = self.context.attempt, None
            await attempt.cancel()
            await self._undo(cause)
            return None
        return await right(self, cause, **options)

    async def restore(self: Restorer) -> None:
        head = self._ledger.state.seal.version
        if self._baseline.version is None:
            await right_restore(self)
        elif self._baseline.version != head:
            self._baseline.version, self._baseline._vector = head, await self.vector(head)

    right_restore = Restorer.restore
    put(ledgers, "TRIES", 1)
    put(Leader, "abort_unless_sealed", abort_unless_sealed)
    put(Restorer, "restore", restore)


@bug("L2", "take_over", "anything")
def fenced_writer_goes_on(put: Put) -> None:
    """A writer does not look whether a newer epoch owns the stream before it appends."""

    def checked(self: Ledger, record: Any) -> bytes:
        return records.encode(record)

    put(Ledger, "_checked", checked)


@bug("L2", "take_over", "anything")
def stale_epochs_count(put: Put) -> None:
    """The fold lets records of an older epoch count, and their writer is not stopped."""
    right = fold.judge

    def judge(state: Any, record: Any) -> str:
        if state.epoch is not None and not isinstance(record, Epoch):
            record = msgspec.structs.replace(record, epoch=state.epoch.seq)
        return right(state, record)

    def checked(self: Ledger, record: Any) -> bytes:
        return records.encode(record)

    put(fold, "judge", judge)
    put(ledgers, "judge", judge)
    put(Ledger, "_checked", checked)


@bug("L2 (elsewhere: a second history was begun over the first)", "lost_records")
def hole_is_taken_for_the_tail(put: Put) -> None:
    """Nobody looks above a free slot, nor lists the ledger before a claim."""
    put(ledgers, "find_above", _nothing_above)
    put(HoleSearch, "find", _no_holes)


@bug("L2", "lost_records")
def claim_over_a_hole(put: Put) -> None:
    """A publisher claims at the tail although a record below it is missing."""
    put(HoleSearch, "find", _no_holes)


@bug("L2", "lost_records")
def replica_at_the_edge_of_a_hole(put: Put) -> None:
    """A reader that does not claim believes the edge of a hole to be the tail, and serves what is below it."""
    put(ledgers, "find_above", _nothing_above)


async def _nothing_above(store: Any, tail: int, **_: Any) -> int | None:
    return None


async def _no_holes(self: HoleSearch, tail: int) -> list[int]:
    return []


@bug("L2", "zombie_at_a_hole")
def append_into_a_hole(put: Put) -> None:
    """A writer that has slept for long takes a free slot after its tip for the tail, without a look above it."""

    async def look_above(self: Ledger) -> None:
        return None

    put(Ledger, "_look_above", look_above)


@bug("P6", "intruder")
def anybody_may_claim(put: Put) -> None:
    """A claim by another name counts without a release and without take-over."""
    put(fold, "_judge_claim", lambda state, record: "")


@bug("T1", "misread_mark")
def one_look_at_the_mark(put: Put) -> None:
    """A remembered record that is not there, or another, at the first look counts as gone or replaced."""

    async def read_remembered(self: Ledger, seq: int, digest: str = "") -> bytes | None:
        return await slot.read_slot(self.store, seq)

    put(Ledger, "_read_remembered", read_remembered)


@bug("T1", "rolled_back_bucket")
def nothing_is_remembered(put: Put) -> None:
    """No high-water mark is kept: a bucket that was rolled back is believed."""
    from dcr_daemon.ledger.high_water_mark import HighWaterMark

    put(HighWaterMark, "_load", lambda self: None)


@bug("L8", "intruder")
def silence_is_taken_for_death(put: Put) -> None:
    """A claim over a publisher that has not written for a while counts as if somebody had asked for it."""
    right = Ledger.claim

    async def claim(self: Ledger, name: str, *, take_over: bool = False) -> int:
        await self.read()
        before = self.tip.seq
        await runtime.sleep(5.0)
        await self.read()
        return await right(self, name, take_over=take_over or self.tip.seq == before)

    put(Ledger, "claim", claim)


@bug("L2", "misread_records")
def digests_are_not_compared(put: Put) -> None:
    """A record is believed whatever its digest: one that was misread and still parses counts, or is void."""
    put(records, "proves_itself", lambda body: True)


@bug("L2", "misread_records")
def damaged_records_are_void(put: Put) -> None:
    """Bytes that do not prove themselves are void at once, for this reader alone."""

    put(fold, "_may_be_damaged", lambda *tips: False)
