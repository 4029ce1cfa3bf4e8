"""Two-phase commit of one change of the live weights over all ranks (musts E4, E5, E6).

    prepare ─► HELD ─[all ranks verified: approve]─► PREPARED ─ swap ─► BEGUN ─ apply ─► verified ─► COMMITTED
                 └─────────────── drop ◄─────────────────┘                │  └─ again ─┘    │
                                                                          └── rollback ◄────┘ ─► verified ─► ROLLED BACK
    BEGUN at attach: finish_adopted (continues as swap does; a load is repeated from its files), or a dense load, which
    goes forward only; if loads fail as well, the process ends.

Runs in the EngineCore process, called by `Core` with the subscriber's calls; the methods return steps of an
`Operation`. The coordinator asks all ranks, verifies their answers jointly and decides. The workers keep the old values
until every rank is verified; after the first rank has committed, the transaction only goes forward.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import msgspec

from dcr_daemon.engine import deltas, messages
from dcr_daemon.engine.port import Prepared, Swapped, Transaction, Verdict, VersionDelta
from dcr_daemon.engine.staged import read_vector
from dcr_daemon.errors import DcrError, EngineRefused
from dcr_daemon.vllm_plugin import calls
from dcr_daemon.vllm_plugin.calls import (
    Begin,
    ComparedRank,
    JobKind,
    Op,
    PreparedRank,
    Reply,
    Start,
    Status,
    Sums,
    TxnRef,
    TxnState,
)
from dcr_daemon.vllm_plugin.core import staged_summary, verify_sums
from dcr_daemon.vllm_plugin.core.operations import JobSteps, Steps
from dcr_daemon.vllm_plugin.core.phases import PhaseTimer, longest
from dcr_daemon.vllm_plugin.core.state import DeltaTransaction, EngineState, LoadTransaction
from dcr_daemon.wording import shorten

log = logging.getLogger("vllm.dcr")
AWAITING_VERDICT = "written and verified; waiting for the other engines"  #: why a held transaction is still begun
PEER_FAILED = "another engine could not go forward"  #: reason of a rollback that a joint decision asked for
TRIES = 2  #: applies before a rollback, and complete dense loads before the engine process ends


class TransactionCoordinator:
    """At most one prepared and one begun transaction of one engine."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._reader = staged_summary.SummaryReader()
        self._verified_after = 0  #: tries after which the begun transaction was verified, 0 if it was not
        self._pause_state_before: Any = None  #: the scheduler's pause state before the begun transaction
        self._failed_loads = 0
        self._phases = PhaseTimer()

    def drop(self) -> None:
        self._state.prepared = None
        self._state.workers.ask(Op.DROP, Status)

    # -- prove ----------------------------------------------------------------------------------------------------

    def prove(self, call: messages.Prove) -> Steps:
        """Prove that the live weights are a version: exact tensors by their sums, loader-computed ones by comparing the
        parameters with what the loader computes from the given bytes. If those differ, they are loaded once, as a load
        of these tensors alone. An engine at no known version is paused and its caches are handled, as for a change."""
        state = self._state
        placement, live = state.require_live()
        if wrong := verify_sums.differing(placement, live.vector, read_vector(call.vector, placement.layout)):
            raise EngineRefused(
                f"the live weights are not version {call.version}: {shorten(wrong)}",
                hint="serve the checkpoint the stream was made from, or let an anchor repair this engine",
            )
        if placement.computed:
            if not call.loaded:
                names = shorten(placement.computed)
                raise EngineRefused(f"the loader computes with {names}: a proof needs their bytes", hint="attach again")
            start = Start(id=call.id, kind=JobKind.COMPARE, loaded=call.loaded, vector=call.vector)
            ranks = yield from state.job(start, ComparedRank)
            state.require_live()
            if differ := sorted({name for rank in ranks for name in rank.differ}):
                log.warning("dcr: loading version %s into %s, which held other values", call.version, shorten(differ))
                start = Start(id=f"{call.id}-computed", kind=JobKind.LOAD, loaded=call.loaded, vector=call.vector)
                ended: Swapped = yield from self._load(
                    LoadTransaction(f"load-{call.id}", start, call.version, call.label)
                )
                if ended.verdict is not Verdict.COMMITTED:
                    raise EngineRefused(f"version {call.version} was not proved: {ended.reason}", hint="load an anchor")
                return
        if state.proved is None:
            # The caches belong to the weights from before: an external writer may have changed the weights since.
            with self._paused("proof") as (_, resting):
                if resting is not None:
                    yield resting
                state.require_live()
            state.paused_for = ""
        state.proved = call.version
        state.host.label(call.label)

    # -- prepare --------------------------------------------------------------------------------------------------

    def prepare(self, call: messages.Prepare) -> Steps:
        """Decode and sum on all ranks while generation goes on, then verify jointly; nothing is written (must E4)."""
        state, txn = self._state, call.txn
        placement, live = state.require_live()
        self._require_chain(txn)
        self._state.prepared = None
        reading = self._reader.start(txn.hops, placement.layout)
        try:
            ranks, hops = yield from self._prepare_on_all(txn)
            while not reading.done():
                yield None
            fits = len(hops)
            staged = reading.result()[:fits]
            state.require_live()
            deltas.check_chain(placement.layout, staged, live.vector, exact=placement.exact)
            for number, summary in enumerate(staged):
                verify_sums.verify_hop(placement, summary, [rank.hops[number] for rank in ranks])
            changed = verify_sums.verify_composed(placement, staged, ranks)
            state.workers.ask(Op.APPROVE, Status, arg=TxnRef(txn=txn.id))
        except DcrError:
            self._forget_everywhere()
            raise
        label = txn.label if fits == len(txn.hops) else str(hops[-1].version)
        reached = live.after(placement, ranks, staged[-1].after)
        empty = not changed and not any(hop.loaded for hop in hops)
        self._state.prepared = DeltaTransaction(txn.id, txn.base, hops[-1].version, label, ranks, reached, empty)
        return Prepared(txn=txn.id, changed=changed, fits=fits, spent=longest(rank.spent for rank in ranks))

    def _prepare_on_all(self, txn: Transaction) -> JobSteps[tuple[list[PreparedRank], list[VersionDelta]]]:
        """Prepare the same number of hops on every rank: as many as fit on the rank with the least room."""
        state, hops = self._state, list(txn.hops)
        while True:
            start = Start(id=txn.id, kind=JobKind.PREPARE, hops=[_files(hop) for hop in hops])
            ranks = yield from state.job(start, PreparedRank)
            fits = min(rank.fits for rank in ranks)
            if all(rank.fits == fits and len(rank.hops) == fits for rank in ranks):
                return ranks, hops[:fits]
            self._forget_everywhere()
            hops = hops[:fits]

    def _require_chain(self, txn: Transaction) -> None:
        state = self._state
        if not txn.hops:
            raise EngineRefused(f"transaction {txn.id} has no versions")
        if state.proved is None:
            raise EngineRefused("the engine is at no known version", hint="prove it, or load an anchor")
        for hop, base in zip(txn.hops, [state.proved, *(hop.version for hop in txn.hops)], strict=False):
            if hop.base != base:
                raise EngineRefused(
                    f"version {hop.version} is made from {hop.base}, not from {base}", hint="plan again"
                )

    def _forget_everywhere(self) -> None:
        """Ask every rank to drop what is prepared. A rank that has begun refuses, and says so at the next attach."""
        self._state.prepared = None
        self._state.workers.replies(Op.DROP)

    # -- swap -----------------------------------------------------------------------------------------------------

    def swap(self, txn: str, *, hold: bool = False) -> Steps:
        """Pause, write, verify, commit, resume. With `hold`, stop before the commit and wait for the joint decision.
        An empty transaction is committed at once. A second call for a transaction that ended gets its outcome."""
        state = self._state
        if txn in state.outcomes:
            return state.outcomes[txn]
        change = self._state.prepared
        if change is None or change.txn != txn:
            raise EngineRefused(f"transaction {txn} is not prepared", hint="prepare it again")
        state.require_live()
        state.workers.ask(Op.CHECK, Status, arg=TxnRef(txn=txn))
        if change.empty:
            return self._commit_empty(change)
        started, self._phases = time.monotonic(), PhaseTimer()
        with self._paused("swap") as (was, resting):
            if resting is not None:
                yield resting
            state.require_live()  # other calls ran while the engine came to rest
            state.workers.ask(Op.CHECK, Status, arg=TxnRef(txn=txn))
        self._phases.ended("rest")
        state.prepared, state.begun_record, self._pause_state_before, self._verified_after = None, change, was, 0
        state.begun, state.proved = txn, None
        if fault := _failures(state.workers.replies(Op.BEGIN, Begin(txn=txn))):
            # Not every rank is dirty, so none has written and none may.
            return self._roll_back(change, f"begin: {fault}", tries=0, started=started)
        self._phases.ended("begin")
        return self._apply_or_roll_back(change, started=started, hold=hold)

    @contextlib.contextmanager
    def _paused(self, purpose: str) -> Iterator[tuple[Any, Future[Any] | None]]:
        """Pause; if the body fails before the change begins, return to the pause state from before."""
        state = self._state
        was = state.host.state()
        state.paused_for = purpose
        try:
            yield was, state.host.pause()
        except BaseException:
            state.paused_for = ""
            if state.proved is not None and state.begun is None:
                state.host.restore(was)
            else:
                state.host.halt()
            raise

    def finish_adopted(self, call: messages.FinishAdopted) -> Steps:
        """Finish a transaction that an earlier owner left begun, as swap would: forward, else back (must E6)."""
        state, change, txn = self._state, self._state.begun_record, call.txn
        if txn in state.outcomes:
            return state.outcomes[txn]
        if state.begun != txn:
            raise EngineRefused(f"transaction {txn} is not begun", hint="ask for its outcome")
        started, self._phases = time.monotonic(), PhaseTimer()
        if isinstance(change, LoadTransaction):
            start = msgspec.structs.replace(change.start, id=call.id)
            try:
                return (yield from self._load(replace(change, start=start)))
            except DcrError as error:
                reason = f"a load was interrupted, and its files cannot be used any more: {error}"
                return self._still_begun(txn, reason, tries=0, started=started)
        if change is None or change.txn != txn:
            return self._still_begun(
                txn, "it can go neither forward nor back: load an anchor", tries=0, started=started
            )
        statuses = state.workers.ask(Op.STATUS, Status)
        state.note_external_writes()
        committed = any(status.outcomes.get(txn) == Verdict.COMMITTED for status in statuses)
        if state.live is None:
            # Only the changed elements are verified, and an external writer may have changed any other.
            reason = "an external writer wrote the weights while it was begun"
            if committed:
                return self._still_begun(txn, f"{reason}: load an anchor", tries=0, started=started)
            return self._roll_back(change, reason, tries=0, started=started)
        if committed:
            return self._commit(change, tries=self._verified_after, started=started)
        if call.back:
            return self._roll_back(change, PEER_FAILED, tries=self._verified_after, started=started)
        if self._verified_after and not call.hold:
            return self._commit(change, tries=self._verified_after, started=started)
        return self._apply_or_roll_back(change, started=started, hold=call.hold)

    def _apply_or_roll_back(self, change: DeltaTransaction, *, started: float, hold: bool = False) -> Swapped:
        """Apply and verify, at most `TRIES` times; then commit (or hold), or roll back."""
        fault = ""
        for tries in range(1, TRIES + 1):
            fault = self._apply_and_verify(change)
            if not fault and hold:
                self._verified_after = tries
                return self._still_begun(change.txn, AWAITING_VERDICT, tries=tries, started=started)
            if not fault:
                return self._commit(change, tries=tries, started=started)
            log.warning("dcr: transaction %s, apply %d: %s", change.txn, tries, fault)
        return self._roll_back(change, fault, tries=TRIES, started=started)

    def _apply_and_verify(self, change: DeltaTransaction) -> str:
        """Write on all ranks and verify what the weights sum to now. Returns the fault, "" if there is none."""
        state = self._state
        replies = state.workers.replies(Op.APPLY, TxnRef(txn=change.txn))
        self._phases.ended("apply")
        if fault := _failures(replies):
            return fault
        found = [calls.parse(reply.result, Sums) for reply in replies]
        fault = verify_sums.compare_written(state.placed, [rank.after for rank in change.ranks], found)
        self._phases.ended("sums")
        return fault

    def _commit(self, change: DeltaTransaction, *, tries: int, started: float) -> Swapped:
        """All ranks are verified. From the first commit on only forward, so a rank that fails is asked again."""
        state = self._state
        fault = ""
        for _ in range(TRIES):
            fault = _failures(state.workers.replies(Op.COMMIT, TxnRef(txn=change.txn)))
            if not fault:
                state.accept(change.version, change.after)
                state.host.label(change.label)
                self._phases.ended("commit")
                return self._finish(change.txn, Verdict.COMMITTED, tries=tries, started=started)
        return self._still_begun(change.txn, f"commit: {fault}", tries=tries, started=started)

    def _commit_empty(self, change: DeltaTransaction) -> Swapped:
        """Nothing is written, so generation goes on and the caches stay: their values are those of the new version."""
        state = self._state
        self._forget_everywhere()
        state.require_live()
        state.accept(change.version, change.after)
        state.host.label(change.label)
        log.info("dcr: transaction %s changes nothing here; version %s", change.txn, change.version)
        return state.remember(
            Swapped(txn=change.txn, verdict=Verdict.COMMITTED, version=change.version, serving=state.host.running)
        )

    def _roll_back(self, change: DeltaTransaction, reason: str, *, tries: int, started: float) -> Swapped:
        """Write the old values back on every rank that began, and verify them by the sums from before."""
        state = self._state
        fault = ""
        for _ in range(TRIES):
            fault = self._restore_and_verify(change)
            if not fault:
                break
            log.warning("dcr: transaction %s, rollback: %s", change.txn, fault)
        if not fault:
            state.workers.replies(Op.CLOSE, TxnRef(txn=change.txn))
            dirty = [status.rank for status in state.workers.ask(Op.STATUS, Status) if status.dirty]
            fault = f"ranks {dirty} stay dirty" if dirty else ""
        if fault:
            return self._still_begun(change.txn, f"{reason}; rollback: {fault}", tries=tries, started=started)
        self._phases.ended("rollback")
        state.proved = change.base if state.live is not None else None  # None: an external writer has written since
        return self._finish(change.txn, Verdict.ROLLED_BACK, tries=tries, started=started, reason=reason)

    def _restore_and_verify(self, change: DeltaTransaction) -> str:
        """Roll back and verify; returns the fault. A rank that never began has no old values and may refuse."""
        state = self._state
        replies = state.workers.replies(Op.ROLLBACK, TxnRef(txn=change.txn))
        statuses = state.workers.ask(Op.STATUS, Status)
        found = []
        for reply, status, rank in zip(replies, statuses, change.ranks, strict=True):
            untouched = not status.dirty and status.state not in (TxnState.BEGUN, TxnState.ROLLED_BACK)
            if not reply.ok and not untouched:
                return _failures([reply])
            found.append(calls.parse(reply.result, Sums) if reply.ok else rank.before)
        return verify_sums.compare_written(state.placed, [rank.before for rank in change.ranks], found)

    def _finish(self, txn: str, verdict: Verdict, *, tries: int, started: float, reason: str = "") -> Swapped:
        """All ranks are clean: return to the pause state from before, and keep the outcome."""
        state = self._state
        self._state.begun_record, state.begun, self._failed_loads = None, None, 0
        state.paused_for = ""
        state.note_external_writes()  # a write while it was begun makes the live weights unknown
        if state.proved is None:
            state.host.halt()
        else:
            state.host.restore(self._pause_state_before)
        self._phases.ended("resume")
        log.info("dcr: transaction %s %s; version %s", txn, verdict, state.proved)
        return state.remember(
            Swapped(
                txn=txn,
                verdict=verdict,
                version=state.proved,
                serving=state.host.running,
                pause=time.monotonic() - started,
                tries=tries,
                reason=reason,
                phases=self._phases.seconds,
            )
        )

    def _still_begun(self, txn: str, reason: str, *, tries: int, started: float) -> Swapped:
        """The transaction can go neither forward nor back now: the engine stays paused until an owner finishes it or
        loads (must E1)."""
        log.log(
            logging.DEBUG if reason == AWAITING_VERDICT else logging.ERROR,
            "dcr: transaction %s is still begun, the engine stays paused: %s",
            txn,
            reason,
        )
        return Swapped(
            txn=txn,
            verdict=Verdict.BEGUN,
            version=None,
            serving=False,
            pause=time.monotonic() - started,
            tries=tries,
            reason=reason,
            phases=self._phases.seconds,
        )

    # -- dense repair ---------------------------------------------------------------------------------------------

    def load(self, call: messages.Load) -> Steps:
        """Write all tensors from the files of an anchor, as `_load` does."""
        start = Start(id=call.id, kind=JobKind.LOAD, files=call.files, vector=call.vector)
        return self._load(LoadTransaction(f"load-{call.id}", start, call.version, call.label))

    def _load(self, load: LoadTransaction) -> Steps:
        """Write from files, sum all weights, commit. Replaces a begun transaction; goes forward only.

        Files that are damaged, or that this engine cannot hold, are refused before anything is paused or written. Two
        things end the engine process when they happen the second time, because nothing is left to try (must E5):
        weights that do not sum to the version after a complete load, and ranks between versions that cannot begin a
        load.
        """
        state, placement, start = self._state, self._state.placed, load.start
        vector = read_vector(start.vector, placement.layout)
        if start.files:
            check = msgspec.structs.replace(start, id=f"{start.id}-check", kind=JobKind.CHECK)
            yield from state.job(check, calls.JobStatus)
        txn, version, started = load.txn, load.version, time.monotonic()
        self._phases = PhaseTimer()
        between = state.begun is not None
        with self._paused("load") as (was, resting):
            if resting is not None:
                yield resting
            self._forget_everywhere()
        self._pause_state_before = self._pause_state_before if between else was
        self._state.begun_record, state.begun, state.proved, state.live = load, txn, None, None
        if fault := _failures(state.workers.replies(Op.BEGIN, Begin(txn=txn, kind="load"))):
            self._count_failed_load(f"a load of version {version} cannot begin: {fault}", give_up=between)
            raise EngineRefused(f"begin: {fault}", hint="attach again")
        yield from state.job(start, calls.JobStatus)
        live = yield from state.fingerprint(f"{start.id}-sums", placement)
        if wrong := verify_sums.differing(placement, live.vector, vector):
            reason = f"the loaded weights are not version {version}: {shorten(wrong)}"
            self._state.begun_record = None  # these files cannot be used again
            self._count_failed_load(reason)
            return self._still_begun(txn, reason, tries=1, started=started)
        if fault := _failures(state.workers.replies(Op.COMMIT, TxnRef(txn=txn))):
            return self._still_begun(txn, f"commit: {fault}", tries=1, started=started)
        state.accept(version, live)
        state.host.label(load.label)
        self._phases.ended("load")
        return self._finish(txn, Verdict.COMMITTED, tries=1, started=started)

    def _count_failed_load(self, reason: str, *, give_up: bool = True) -> None:
        """Count failures that only a new process can cure, and end this one after `TRIES` of them (must E5)."""
        self._failed_loads += give_up
        if self._failed_loads >= TRIES:
            self._state.host.end(f"{reason}, {self._failed_loads} times")


def _files(hop: VersionDelta) -> calls.HopFiles:
    return calls.HopFiles(
        version=hop.version, base=hop.base, attempt=hop.attempt, chunks=hop.chunks, loaded=hop.loaded, after=hop.after
    )


def _failures(replies: list[Reply]) -> str:
    """The errors of the ranks that were not ok; empty if all were."""
    return "; ".join(f"rank {reply.rank}: {reply.error}" for reply in replies if not reply.ok)
