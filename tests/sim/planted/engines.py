"""Bugs inside vLLM's half (musts E1 to E7, F1), and those that other systems were seen to have."""

from __future__ import annotations

from typing import Any

import numpy as np
from sim.planted.bug import Put, bug

from dcr_daemon.engine import deltas
from dcr_daemon.engine.directory import transactions
from dcr_daemon.engine.port import Verdict
from dcr_daemon.subscribe import driver
from dcr_daemon.vllm_plugin.calls import Op, TxnRef, TxnState
from dcr_daemon.vllm_plugin.core import coordinator, engine_core, verify_sums
from dcr_daemon.vllm_plugin.core.coordinator import TransactionCoordinator
from dcr_daemon.vllm_plugin.core.engine_core import Core
from dcr_daemon.vllm_plugin.core.state import EngineState
from dcr_daemon.vllm_plugin.weights.memory import Reading, ValueSet
from dcr_daemon.vllm_plugin.worker.session import WorkerSession
from dcr_daemon.vllm_plugin.worker.transaction import Transaction


@bug("E1", "rank_fails_again")
def anybody_may_resume(put: Put) -> None:
    """A change that is neither written nor taken back is left, and generation goes on."""
    right = TransactionCoordinator._still_begun

    def still_begun(self: TransactionCoordinator, *arguments: Any, **options: Any) -> Any:
        self._state.paused_for = ""
        self._state.host.paused = "no"  # type: ignore[attr-defined]
        return right(self, *arguments, **options)

    put(TransactionCoordinator, "_still_begun", still_begun)


@bug("E2 (elsewhere: a recovered engine served what it had booted with)", "first", "engine_dies")
def born_running(put: Put) -> None:
    """An engine takes requests before anybody has looked at its weights."""

    def start_paused(self: Core) -> None:
        self.state.workers.ask(engine_core.Op.HELLO, engine_core.calls.Status)

    put(Core, "start_paused", start_paused)


@bug("E2", "rank_fails_again")
def rollback_resumes(put: Put) -> None:
    """What is rolled back is resumed, also where it had never been ready."""
    right = TransactionCoordinator._finish

    def end(self: TransactionCoordinator, txn: str, verdict: Verdict, **options: Any) -> Any:
        if verdict is Verdict.ROLLED_BACK:
            self._pause_state_before = "no"
        return right(self, txn, verdict, **options)

    put(TransactionCoordinator, "_finish", end)


@bug("E3", "second_owner")
def every_subscriber_is_the_owner(put: Put) -> None:
    """Calls are carried out whatever owner's token they carry."""
    put(Core, "_require_owner", lambda self, call: None)
    put(WorkerSession, "require_token", lambda self, token: None)


@bug("E4 (elsewhere: the checksum of the delta passed, the weights were wrong)", "flipped_bits")
def every_rank_judges_for_itself(put: Put) -> None:
    """Nobody adds up what the ranks found before, and nobody looks after the write either."""
    put(deltas, "check_chain", lambda *_, **__: None)
    put(transactions, "check_chain", lambda *_, **__: None)
    put(verify_sums, "verify_hop", lambda *_: None)
    put(verify_sums, "verify_composed", lambda *_: 0)
    put(verify_sums, "compare_written", lambda *_: "")


@bug("E5", "rank_fails_again", "rank_fails")
def nobody_looks_after_the_write(put: Put) -> None:
    """A rank that did not write is believed to have written."""
    put(coordinator, "_failures", lambda replies: "")
    put(verify_sums, "compare_written", lambda *_: "")
    put(
        TransactionCoordinator,
        "_apply_and_verify",
        lambda self, change: self._state.workers.replies(Op.APPLY, TxnRef(txn=change.txn)) and "",
    )


@bug("E5 (elsewhere: version raised although the apply failed)", "rank_fails_again")
def failed_change_raises_the_version(put: Put) -> None:
    """After a rollback the engine says that it is at the new version."""
    right = TransactionCoordinator._roll_back

    def roll_back(self: TransactionCoordinator, change: Any, *arguments: Any, **options: Any) -> Any:
        ended = right(self, change, *arguments, **options)
        if ended.verdict is Verdict.ROLLED_BACK:
            self._state.proved = change.version
        return ended

    put(TransactionCoordinator, "_roll_back", roll_back)


@bug("E6", "rank_fails_again")
def old_values_are_not_kept(put: Put) -> None:
    """A rollback leaves what was written, and says that all is as it was."""

    def rollback(self: Transaction, memory: Any, placement: Any) -> Any:
        return self.answer.before

    put(Transaction, "rollback", rollback)


@bug(
    "E6 (elsewhere: a failed transfer left the server in the middle of an update)",
    "rank_fails_again",
    "subscriber_dies",
)
def begun_is_forgotten_at_attach(put: Put) -> None:
    """The next owner finds a change that was begun, and goes on as if the weights were what they summed to before."""
    right_attach, right_sum = WorkerSession.attach, EngineState.fingerprint

    def attach(self: WorkerSession, token: int, arg: Any) -> Any:
        self._state, self.dirty, self._txn, self._txn_id = TxnState.NONE, False, None, None
        return right_attach(self, token, arg)

    def fingerprint(self: EngineState, job_id: str, placement: Any) -> Any:
        live = self.live
        if live is None:
            live = yield from right_sum(self, job_id, placement)
        return live

    put(WorkerSession, "attach", attach)
    put(EngineState, "fingerprint", fingerprint)


@bug("E6", "two_subscribers", "subscriber_dies")
def prepared_outlives_its_base(put: Put) -> None:
    """What was prepared once may be swapped in later, whatever the weights are by then."""
    put(EngineState, "forget_prepared", lambda self: None)
    put(WorkerSession, "_forget", lambda self: None)


@bug("E7 (elsewhere: a killed XOR apply toggled the finished tensors at each retry)", "rank_fails_again", "rank_fails")
def change_is_applied_as_a_difference(put: Put) -> None:
    """The change is added to what is there: a second try adds it twice, and nobody looks."""

    def apply(self: Transaction, memory: Any, placement: Any) -> Any:
        for group in self.groups:
            lanes = np.empty_like(group.new)
            memory.gather([Reading(group.row, group.element, group.target, lanes)])
            keep = group.new.copy()
            group.new[:] = lanes + (keep - group.old)
            memory.set_groups(self.groups)
            memory.write(ValueSet.NEW)
            group.new[:] = keep
        return self.answer.after

    put(Transaction, "apply", apply)


@bug("F1 (elsewhere: a reload brought back cached weights)", "foreign_write")
def foreign_writes_are_not_noticed(put: Put) -> None:
    """Somebody reloads other weights, and the engine goes on as if they were its own."""
    put(EngineState, "note_external_writes", lambda self: None)
    put(WorkerSession, "note_external_write", lambda self, name: None)


@bug("F1 (elsewhere: the label moved, the weights did not)", "engine_dies", "late_replica")
def weights_are_taken_for_the_newest(put: Put) -> None:
    """An engine that comes up is believed to hold the newest version, and nobody sums."""

    async def locate(*_: Any, highest: int, **__: Any) -> int:
        return highest

    put(driver, "locate", locate)
    put(verify_sums, "differing", lambda *_: [])
