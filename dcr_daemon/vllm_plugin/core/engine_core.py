"""The half that lives in the EngineCore process: who owns the engine, what it holds, whether it may run.

Everything here runs on EngineCore's one thread, between two steps of the model, so nothing can come between a check
and what follows from it (must E5). Promises: the engine is born paused and is not resumed by anybody unless it is
proved at a version, no transaction is begun and no rank is dirty (musts E1, E2); every change comes from the present
owner (must E3). The change itself is in `changes.py`.
"""

from __future__ import annotations

import logging
import secrets
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from dcr_daemon.engine import messages
from dcr_daemon.engine.messages import Answer, AnyCall, RankChecksums, Report, TensorReport
from dcr_daemon.engine.port import Attached, EngineGone, EngineStatus, StreamFacts, Swapped, TensorClass, Verdict
from dcr_daemon.engine.staged import read_layout
from dcr_daemon.errors import DcrError, EngineRefused, Fenced
from dcr_daemon.vllm_plugin import calls
from dcr_daemon.vllm_plugin.calls import AttachedRank, FingerprintRank, JobKind, JobRef, JobState, JobStatus, Op
from dcr_daemon.vllm_plugin.core import verify_sums
from dcr_daemon.vllm_plugin.core.operations import JobSteps, Operation, Steps
from dcr_daemon.vllm_plugin.core.verify_sums import JointPlacement, LiveSums
from dcr_daemon.vllm_plugin.core.worker_group import WorkerGroup, kind_of, raise_for
from dcr_daemon.vllm_plugin.settings import Settings
from dcr_daemon.wording import shorten

log = logging.getLogger("vllm.dcr")
T = TypeVar("T")
OUTCOMES = 256  #: transactions whose outcome is remembered


class Host(Protocol):
    """What the core asks of EngineCore; `hooks` implements it."""

    @property
    def running(self) -> bool:
        """Whether the scheduler is unpaused."""
        ...

    def pause(self) -> Future[Any] | None:
        """Bring the engine to rest, caches handled as configured. None: it is at rest already."""
        ...

    def state(self) -> Any:
        """The scheduler's pause state, for `restore`."""
        ...

    def restore(self, state: Any) -> None:
        """Back to a pause state taken before; resumes if that was running."""
        ...

    def resume(self) -> None:
        """Let the scheduler go on."""
        ...

    def halt(self) -> None:
        """Pause at once, whatever is in flight keeps its place."""
        ...

    def label(self, text: str) -> None:
        """Set what the engine shows as its weight version."""
        ...

    def end(self, reason: str) -> None:
        """End the engine process; does not return."""
        ...


class Core:
    """One engine's state, and one method per call of the engine port.

    `proved` is the version that the live weights were last shown to be, None if unknown. `live` is what the
    weights sum to. `begun` names a transaction that only commit, rollback or a dense load may end.
    """

    def __init__(self, host: Host, workers: WorkerGroup, settings: Settings) -> None:
        from dcr_daemon.vllm_plugin.core.coordinator import TransactionCoordinator

        self.host = host
        self.workers = workers
        self.settings = settings
        self.incarnation = secrets.token_hex(8)
        self.facts: StreamFacts | None = None
        self.placement: JointPlacement | None = None
        self.live: LiveSums | None = None
        self.proved: int | None = None
        self.begun: str | None = None
        self.paused_for = ""  #: "swap" or "load" while one has the engine paused
        self.operation: Operation | None = None
        self._preempted: Operation | None = None
        self.outcomes: dict[str, Swapped] = {}
        self.coordinator = TransactionCoordinator(self)
        self._generations: list[int] | None = None

    def start_paused(self) -> None:
        """First thing in the engine's life: paused, guards in every worker. Raises if a worker lacks our extension."""
        self.host.halt()
        self.workers.ask(Op.HELLO, calls.Status)

    def handle(self, call: AnyCall) -> Answer | Future[Answer]:
        """Carry out one call. Every `DcrError` becomes an answer."""
        try:
            match call:
                case messages.Status():
                    if call.incarnation:
                        self._require_owner(call)
                        self.poll_external_writes()
                    return messages.done(call.id, self.status())
                case messages.Outcome():
                    return messages.done(call.id, self.outcome(call.txn))
                case messages.Checksums():
                    return messages.done(call.id, self._checksums())
                case messages.Attach():
                    return self._begin_operation(call, self._attach(call), after_raising=call.at_least)
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
        if self.operation is not None and self.operation.live:
            raise EngineRefused(
                f"the engine is busy with {self.operation.kind}", hint="wait for its answer, or attach again"
            )
        match call:
            case messages.Prove():
                return self._begin_operation(call, coordinator.prove(call))
            case messages.Serve():
                self._serve()
                return messages.done(call.id, None)
            case messages.Prepare():
                return self._begin_operation(call, coordinator.prepare(call))
            case messages.Swap():
                return self._begin_operation(call, coordinator.swap(call.txn, hold=call.hold))
            case messages.FinishAdopted():
                return self._begin_operation(call, coordinator.finish_adopted(call))
            case messages.Load():
                return self._begin_operation(call, coordinator.load(call))
            case messages.Inspect():
                return self._begin_operation(call, self._inspect(call))
        raise EngineRefused(f"{type(call).__name__} is not a call of this engine")

    # -- operations -----------------------------------------------------------------------------------------------

    def _scrub(self, call: messages.Scrub) -> Answer | Future[Answer]:
        """Never in the way: of a call that is under way either, nor of another scrub."""
        from dcr_daemon.vllm_plugin.core.scrub import ScrubPass

        scrub = ScrubPass(self, call)
        if self.operation is not None and self.operation.live:
            return messages.done(call.id, scrub.so_far())
        self.operation = Operation(call.id, "scrub", scrub.steps(), scrub.so_far)
        return self.operation.advance()

    def _preempt(self) -> None:
        """Another call is made: a scrub ends, and whoever polls it still gets its answer."""
        if self.operation is not None and self.operation.preemptible:
            self.operation.preempt()
            self._preempted = self.operation

    def _begin_operation(
        self, call: AnyCall, steps: Steps, *, after_raising: int | None = None
    ) -> Answer | Future[Answer]:
        """Start an operation. An attach raises the token first, which fences the operation before it."""
        if after_raising is not None:
            self.workers.token = max(self.workers.token + 1, after_raising)
            self._preempt()
            self._supersede("a newer owner attached")
        self.operation = Operation(call.id, type(call).__name__.lower(), steps)
        return self.operation.advance()

    def _supersede(self, why: str, *, only: str | None = None) -> None:
        operation = self.operation
        if operation is not None and operation.live and (only is None or operation.kind == only):
            operation.end(
                Fenced(f"{operation.kind} was ended: {why}") if only is None else EngineRefused(f"ended: {why}")
            )

    def _poll(self, call: messages.Poll) -> Answer | Future[Answer]:
        for operation in (self.operation, self._preempted):
            if operation is not None and operation.id == call.id:
                return operation.advance()
        raise Fenced("this call was superseded", hint="attach again")

    def _require_owner(self, call: messages.Owned | messages.Status) -> None:
        if self.incarnation not in call.incarnation.split("+"):
            raise EngineGone("the engine was restarted since attach", hint="attach again")
        if call.token != self.workers.token:
            raise Fenced(
                f"owner token {call.token} is no longer the engine's: "
                f"another subscriber attached ({self.workers.token})",
                hint="one subscriber per engine: stop this one or the other",
            )

    def job(self, start: calls.Start, kind: type[T]) -> JobSteps[list[T]]:
        """Run one job on all ranks without holding up generation (must E4): start, be polled, join."""
        ref = JobRef(id=start.id)
        try:
            raise_for(Op.START, self.workers.replies(Op.START, start))
            while True:
                yield None
                states = self.workers.ask(Op.POLL, JobStatus, ref)
                for rank, job in enumerate(states):
                    if job.state in (JobState.FAILED, JobState.CANCELLED):
                        raise kind_of(job.code)(f"{start.kind} on rank {rank} {job.state}: {job.error or 'by request'}")
                if all(job.state is JobState.DONE for job in states):
                    return self.workers.ask(Op.JOIN, kind, ref)
        except (DcrError, GeneratorExit):
            self.workers.replies(Op.CANCEL, ref)
            raise

    def fingerprint(self, job_id: str, placement: JointPlacement) -> JobSteps[LiveSums]:
        """Sum the whole of the live weights on all ranks, joined."""
        summed = yield from self.job(calls.Start(id=job_id, kind=JobKind.FINGERPRINT), FingerprintRank)
        return verify_sums.join_fingerprint(placement, summed)

    # -- calls ----------------------------------------------------------------------------------------------------

    def _attach(self, call: messages.Attach) -> Steps:
        """Own the engine, place the tensors, sum the live weights. With a begun transaction: the token only (E6)."""
        self.coordinator.forget_prepared()
        request = calls.Attach(
            layout=call.facts.layout,
            layout_digest=call.facts.layout_digest,
            cap=self.settings.stage_cap,
            cpus=list(self.settings.background_cpus) if self.settings.background_cpus else None,
        )
        answers = self.workers.ask(Op.ATTACH, AttachedRank, request)
        adopted = next((answer.adopted for answer in answers if answer.adopted), None)
        if adopted is not None:
            self.begun = adopted
            return self._attached(b"", adopted)
        if self.begun is not None:
            self.begun, self.paused_for = None, ""
            self.coordinator.forget_begun()
        layout = read_layout(call.facts.layout, call.facts.layout_digest)
        placement = verify_sums.join_placement(layout, answers, self.settings.computed_cap)
        generations = list(self.workers.generations)
        live = yield from self.fingerprint(call.id, placement)
        if generations != self.workers.generations:
            raise EngineRefused("somebody changed the weights while they were summed", hint="attach again")
        self._take(call.facts, placement, live, generations)
        return self._attached(live.vector.tobytes(), None)

    def _take(self, facts: StreamFacts, placement: JointPlacement, live: LiveSums, generations: list[int]) -> None:
        """Accept what attach found. What was proved stays so only if stream and weights are the same."""
        if live.torn:
            log.error("dcr: these weights are of no version until they are loaded anew: %s", live.torn)
        same = self.facts is not None and (self.facts.stream, self.facts.layout_digest) == (
            facts.stream,
            facts.layout_digest,
        )
        if self.proved is not None and self._generations not in (None, generations):
            self.unprove("somebody else wrote the weights, if only what they were; the caches may be of others")
        if self.proved is not None and not (same and self.live is not None and (self.live.vector == live.vector).all()):
            self.unprove("the weights or the stream changed since they were proved")
        if left_out := [
            s.name for s, kind in zip(placement.layout, placement.classes, strict=True) if kind is TensorClass.ABSENT
        ]:
            log.info("dcr: no loader reads these, they are left out: %s", shorten(left_out))
        self.facts, self.placement, self.live, self._generations = facts, placement, live, generations

    def _attached(self, vector: bytes, adopted: str | None) -> Attached:
        return Attached(
            token=self.workers.token,
            incarnation=self.incarnation,
            adopted=adopted,
            version=self.proved,
            serving=self.host.running,
            vector=vector,
            classes=list(self.placement.classes) if self.placement else [],
        )

    def _serve(self) -> None:
        if reason := self.why_not_resume():
            raise EngineRefused(f"serving refused: {reason}", hint="prove the engine first")
        if not self.host.running:
            self.host.resume()

    def _inspect(self, call: messages.Inspect) -> Steps:
        """Scrub: what no wrap can see is found by summing again (must F1)."""
        placement, known = self.require_live()
        live = yield from self.fingerprint(call.id, placement)
        if wrong := verify_sums.differing(placement, live.vector, known.vector):
            self.live = live
            self.unprove(f"the live weights changed: {shorten(wrong)}")
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
        return Report(incarnation=self.incarnation, version=self.proved, serving=self.host.running, tensors=reports)

    def _checksums(self) -> list[RankChecksums]:
        found = self.workers.ask(Op.CHECKSUMS, calls.Checksums)
        return [
            RankChecksums(rank=rank, parameters=one.parameters, buffers=one.buffers) for rank, one in enumerate(found)
        ]

    def status(self) -> EngineStatus:
        return EngineStatus(
            incarnation=self.incarnation,
            version=self.proved,
            serving=self.host.running,
            prepared=self.coordinator.prepared_id,
            begun=self.begun,
        )

    def outcome(self, txn: str) -> Swapped:
        if txn in self.outcomes:
            return self.outcomes[txn]
        verdict = Verdict.BEGUN if txn == self.begun else Verdict.UNKNOWN
        return Swapped(
            txn=txn, verdict=verdict, version=self.proved, serving=self.host.running, reason=f"transaction is {verdict}"
        )

    # -- what may run ---------------------------------------------------------------------------------------------

    @property
    def placed(self) -> JointPlacement:
        """Raises `EngineRefused` before the first attach."""
        if self.placement is None:
            raise EngineRefused("nothing is placed yet", hint="attach first")
        return self.placement

    def require_live(self) -> tuple[JointPlacement, LiveSums]:
        """Placement and live sums, if nobody wrote since they were taken (must F1)."""
        if self.begun is not None:
            raise EngineRefused(f"transaction {self.begun} is begun", hint="settle it, or load an anchor")
        self.workers.ask(Op.STATUS, calls.Status)
        self.note_external_writes()
        if self.placement is None or self.live is None:
            raise EngineRefused("the live weights are not known", hint="attach again")
        return self.placement, self.live

    def poll_external_writes(self) -> None:
        """Ask the ranks, and stop generating if somebody has written. Workers that cannot be asked may have been
        written to as well."""
        try:
            self.workers.replies(Op.STATUS)
        except EngineRefused as error:
            self.unprove(f"the workers do not tell who wrote: {error}")
        self.note_external_writes()

    def note_external_writes(self) -> None:
        """Compare the weights generations of the last replies with those at attach."""
        if self._generations is not None and self.workers.generations != self._generations:
            self._generations = None
            self.live = None
            self.unprove("somebody else wrote the weights (reload, sleep, LoRA or another transfer)")

    def unprove(self, why: str) -> None:
        """The weights are no known version any more: stop generating until they are."""
        log.error("dcr: the engine is no longer proved and is paused: %s", why)
        self.proved = None
        self.coordinator.forget_prepared()
        if self.host.running:
            self.host.halt()

    def why_not_resume(self) -> str:
        """Empty if every rank is clean and the engine proved; else why not (must E1)."""
        if self.begun is not None:
            return f"transaction {self.begun} is begun"
        if self.paused_for:
            return f"a {self.paused_for} is under way"
        if self.proved is None:
            return "the engine is not proved to hold a known version of its stream"
        replies = self.workers.replies(Op.STATUS)
        dirty = [reply.rank for reply in replies if reply.dirty or not reply.ok]
        if dirty:
            return f"ranks {dirty} are dirty"
        self.note_external_writes()
        return "" if self.proved is not None else "somebody else wrote the weights"

    def accept(self, version: int, live: LiveSums) -> None:
        """We wrote the weights and judged them: proved, at the generation that the ranks show now."""
        self.proved, self.live, self._generations = version, live, list(self.workers.generations)

    def remember(self, outcome: Swapped) -> Swapped:
        """Keep an outcome for whoever lost the answer."""
        self.outcomes[outcome.txn] = outcome
        while len(self.outcomes) > OUTCOMES:
            self.outcomes.pop(next(iter(self.outcomes)))
        return outcome
