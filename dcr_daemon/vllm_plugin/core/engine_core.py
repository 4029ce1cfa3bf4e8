"""Entry point of the EngineCore half: who owns the engine, and which operation a call starts.

Runs in the EngineCore process, on its one thread, between two steps of the model, so nothing can come between a check
and what follows from it (must E5). Input: the socket's calls (`engine.messages`), which the endpoint passes on as
utility calls (`hooks.dcr_core`). Output: answers. Promises: the engine starts paused and nobody resumes it unless it is
proved at a version, no transaction is begun and no rank is dirty (musts E1, E2); every change comes from the present
owner (must E3). The state is in `state.py`, the work in `attach.py`, `coordinator.py` and `scrub.py`.
"""

from __future__ import annotations

import secrets
from concurrent.futures import Future

from dcr_daemon.engine import messages
from dcr_daemon.engine.messages import Answer, AnyCall, RankChecksums, Report, TensorReport
from dcr_daemon.engine.port import EngineGone, EngineStatus, Swapped, TensorClass, Verdict
from dcr_daemon.errors import DcrError, EngineRefused, Fenced
from dcr_daemon.vllm_plugin import calls
from dcr_daemon.vllm_plugin.calls import Op
from dcr_daemon.vllm_plugin.core import verify_sums
from dcr_daemon.vllm_plugin.core.attach import attach_steps
from dcr_daemon.vllm_plugin.core.coordinator import TransactionCoordinator
from dcr_daemon.vllm_plugin.core.operations import Operation, Steps
from dcr_daemon.vllm_plugin.core.scrub import ScrubPass
from dcr_daemon.vllm_plugin.core.state import EngineState, Host
from dcr_daemon.vllm_plugin.core.worker_group import WorkerGroup
from dcr_daemon.vllm_plugin.settings import Settings
from dcr_daemon.wording import shorten


class Core:
    """One engine: its owner, its state, and at most one operation under way."""

    def __init__(self, host: Host, workers: WorkerGroup, settings: Settings) -> None:
        self.settings = settings
        self.state = EngineState(host, workers, secrets.token_hex(8))
        self.coordinator = TransactionCoordinator(self.state)
        self._operation: Operation | None = None
        self._preempted: Operation | None = None

    def start_paused(self) -> None:
        """First thing in the engine's life: pause, and guard every worker. Raises if a worker lacks our extension."""
        self.state.host.halt()
        self.state.workers.greet()

    def handle(self, call: AnyCall) -> Answer | Future[Answer]:
        """Carry out one call. Every `DcrError` becomes an answer."""
        try:
            match call:
                case messages.Status():
                    if call.incarnation:
                        self._require_owner(call)
                        self.state.poll_external_writes()
                    return messages.done(call.id, self.status())
                case messages.Outcome():
                    return messages.done(call.id, self.outcome(call.txn))
                case messages.Checksums():
                    return messages.done(call.id, self._checksums())
                case messages.Attach():
                    return self._attach(call)
                case messages.Poll():
                    return self._poll(call)
            self._require_owner(call)
            return self._owned(call)
        except DcrError as error:
            return messages.refused(call.id, error)

    def _owned(self, call: AnyCall) -> Answer | Future[Answer]:
        """A call of the present owner."""
        coordinator = self.coordinator
        if isinstance(call, messages.Scrub):
            return self._scrub(call)
        self._preempt()
        if isinstance(call, messages.Drop):
            self._supersede("the owner dropped it", only="prepare")
            coordinator.drop()
            return messages.done(call.id, None)
        if self._operation is not None and self._operation.live:
            raise EngineRefused(
                f"the engine is busy with {self._operation.kind}", hint="wait for its answer, or attach again"
            )
        match call:
            case messages.Prove():
                return self._begin(call, coordinator.prove(call))
            case messages.Serve():
                self._serve()
                return messages.done(call.id, None)
            case messages.Prepare():
                return self._begin(call, coordinator.prepare(call))
            case messages.Swap():
                return self._begin(call, coordinator.swap(call.txn, hold=call.hold))
            case messages.FinishAdopted():
                return self._begin(call, coordinator.finish_adopted(call))
            case messages.Load():
                return self._begin(call, coordinator.load(call))
            case messages.Inspect():
                return self._begin(call, self._inspect(call))
        raise EngineRefused(f"{messages.name_of(call)} is not a call of this engine")

    def _owned_this_incarnation(self, call: messages.Owned | messages.Status | messages.Attach) -> bool:
        return self.state.incarnation in call.incarnation.split("+")

    def _require_owner(self, call: messages.Owned | messages.Status | messages.Attach) -> None:
        if not self._owned_this_incarnation(call):
            raise EngineGone("the engine was restarted since attach", hint="attach again")
        if call.token != self.state.workers.token:
            raise Fenced(
                f"owner token {call.token} is no longer the engine's: "
                f"another subscriber attached ({self.state.workers.token})",
                hint="one subscriber per engine: stop this one or the other",
            )

    # -- operations -----------------------------------------------------------------------------------------------

    def _begin(self, call: AnyCall, steps: Steps) -> Answer | Future[Answer]:
        self._operation = Operation(call.id, messages.name_of(call), steps)
        return self._operation.advance()

    def _attach(self, call: messages.Attach) -> Answer | Future[Answer]:
        """Raise the token first: that fences the operation under way, at whatever step it is. An earlier owner that
        was fenced in this incarnation is refused (must E3)."""
        if self._owned_this_incarnation(call):
            self._require_owner(call)
        self.state.workers.token = max(self.state.workers.token + 1, call.at_least)
        self._preempt()
        self._supersede("a newer owner attached")
        return self._begin(call, attach_steps(self.state, call, settings=self.settings))

    def _scrub(self, call: messages.Scrub) -> Answer | Future[Answer]:
        """A scrub never delays another call: if an operation is under way, it answers at once that it did nothing."""
        scrub = ScrubPass(self.state, call)
        if self._operation is not None and self._operation.live:
            return messages.done(call.id, scrub.so_far())
        self._operation = Operation(call.id, messages.name_of(call), scrub.steps(), scrub.so_far)
        return self._operation.advance()

    def _preempt(self) -> None:
        """End a scrub because another call has come; whoever polls it still gets its answer."""
        if self._operation is not None and self._operation.preemptible:
            self._operation.preempt()
            self._preempted = self._operation

    def _supersede(self, reason: str, *, only: str | None = None) -> None:
        """End the operation under way; with `only`, an operation of that kind alone."""
        operation = self._operation
        if operation is None or not operation.live or only not in (None, operation.kind):
            return
        if only is None:
            operation.end(Fenced(f"{operation.kind} was ended: {reason}"))
        else:
            operation.end(EngineRefused(f"ended: {reason}"))

    def _poll(self, call: messages.Poll) -> Answer | Future[Answer]:
        for operation in (self._operation, self._preempted):
            if operation is not None and operation.id == call.id:
                return operation.advance()
        raise Fenced("this call was superseded", hint="attach again")

    # -- calls that are answered here -----------------------------------------------------------------------------

    def _serve(self) -> None:
        if reason := self.state.why_not_resume():
            raise EngineRefused(f"serving refused: {reason}", hint="prove the engine first")
        if not self.state.host.running:
            self.state.host.resume()

    def _inspect(self, call: messages.Inspect) -> Steps:
        """Sum all live weights again and report them by tensor; a difference ends the proof (must F1)."""
        placement, known = self.state.require_live()
        live = yield from self.state.fingerprint(call.id, placement)
        if wrong := verify_sums.differing(placement, live.vector, known.vector):
            self.state.live = live
            self.state.unprove(f"the live weights changed: {shorten(wrong)}")
        held = [placement.held_elements(rank) for rank in range(len(placement.local))]
        reports = [
            TensorReport(
                name=spec.name,
                kind=placement.classes[i],
                held=[int(count[i]) for count in held],
                sum=f"{int(live.vector[i]):016x}" if placement.classes[i] is TensorClass.EXACT else "",
            )
            for i, spec in enumerate(placement.layout)
        ]
        return Report(
            incarnation=self.state.incarnation,
            version=self.state.proved,
            serving=self.state.host.running,
            tensors=reports,
        )

    def _checksums(self) -> list[RankChecksums]:
        ranks = self.state.workers.ask(Op.CHECKSUMS, calls.Checksums)
        return [
            RankChecksums(rank=rank, parameters=sums.parameters, buffers=sums.buffers)
            for rank, sums in enumerate(ranks)
        ]

    def status(self) -> EngineStatus:
        state = self.state
        return EngineStatus(
            incarnation=self.state.incarnation,
            version=state.proved,
            serving=self.state.host.running,
            prepared=state.prepared.txn if state.prepared else None,
            begun=state.begun,
        )

    def outcome(self, txn: str) -> Swapped:
        state = self.state
        if txn in state.outcomes:
            return state.outcomes[txn]
        verdict = Verdict.BEGUN if txn == state.begun else Verdict.UNKNOWN
        return Swapped(
            txn=txn,
            verdict=verdict,
            version=state.proved,
            serving=self.state.host.running,
            reason=f"transaction is {verdict}",
        )
