"""What one engine holds and whether it may run: the state that `Core`, attach, the coordinator and the scrub share.

Runs in the EngineCore process, on its one thread. `EngineState` asks the workers through a `WorkerGroup` and the
scheduler through a `Host`; it answers what is proved, what is begun, and why the engine may not resume (musts E1, F1).
It starts no change of the weights: `coordinator` does that, and reports the outcome here (`accept`, `remember`).
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from dcr_daemon.engine.port import StreamFacts, Swapped
from dcr_daemon.errors import DcrError, EngineRefused
from dcr_daemon.vllm_plugin import calls
from dcr_daemon.vllm_plugin.calls import FingerprintRank, JobKind, JobRef, JobState, JobStatus, Op, PreparedRank, Start
from dcr_daemon.vllm_plugin.core import verify_sums
from dcr_daemon.vllm_plugin.core.operations import JobSteps
from dcr_daemon.vllm_plugin.core.verify_sums import JointPlacement, LiveSums
from dcr_daemon.vllm_plugin.core.worker_group import WorkerGroup, kind_of, raise_for

log = logging.getLogger("vllm.dcr")
T = TypeVar("T")
OUTCOMES = 256  #: transactions whose outcome is remembered


class Host(Protocol):
    """The scheduler of EngineCore, as far as this package uses it; `hooks` implements it."""

    @property
    def running(self) -> bool:
        """Whether the scheduler is unpaused."""
        ...

    def pause(self) -> Future[Any] | None:
        """Pause generation and handle the caches, both as configured. None: the engine is already at rest."""
        ...

    def state(self) -> Any:
        """The scheduler's pause state, for `restore`."""
        ...

    def restore(self, state: Any) -> None:
        """Return to an earlier pause state; this resumes the engine if that state was running."""
        ...

    def resume(self) -> None:
        """Let the scheduler go on."""
        ...

    def halt(self) -> None:
        """Pause at once; requests in flight keep their place."""
        ...

    def label(self, text: str) -> None:
        """Set the weight version that the engine shows."""
        ...

    def end(self, reason: str) -> None:
        """End the engine process; does not return."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DeltaTransaction:
    """A verified transaction: what each rank must find before and after it, and the version that it leads to.
    `empty`: it changes nothing that this engine holds."""

    txn: str
    base: int
    version: int
    label: str
    ranks: list[PreparedRank]
    after: LiveSums
    empty: bool = False


@dataclass(frozen=True, slots=True)
class LoadTransaction:
    """A dense load that has begun or is about to. Whoever finds it unfinished can repeat it from its files."""

    txn: str
    start: Start
    version: int
    label: str


class EngineState:
    """The state of one engine.

    Attributes:
        facts, placement, live: stream, joint placement and sums of the live weights, from the last attach; None before.
        proved: the version that the live weights were last shown to be, None if it is unknown.
        prepared: the transaction that a swap may write next.
        begun: id of a transaction that only commit, rollback or a dense load may end.
        begun_record: what is known about it; None if this process never prepared it, or its files cannot be used.
        paused_for: "swap", "load" or "proof" while one of them keeps the engine paused, else "".
        outcomes: outcome of the last `OUTCOMES` transactions, for a caller that lost the answer.
    """

    def __init__(self, host: Host, workers: WorkerGroup, incarnation: str) -> None:
        self.host = host
        self.workers = workers
        self.incarnation = incarnation
        self.facts: StreamFacts | None = None
        self.placement: JointPlacement | None = None
        self.live: LiveSums | None = None
        self.proved: int | None = None
        self.prepared: DeltaTransaction | None = None
        self.begun: str | None = None
        self.begun_record: DeltaTransaction | LoadTransaction | None = None
        self.paused_for = ""
        self.outcomes: dict[str, Swapped] = {}
        self._generations: list[int] | None = None  # of the workers' weights, when `live` was summed

    # -- jobs on all ranks ----------------------------------------------------------------------------------------

    def job(self, start: Start, kind: type[T]) -> JobSteps[list[T]]:
        """Run one job on all ranks while generation goes on (must E4): start it, poll it, join it."""
        ref = JobRef(id=start.id)
        try:
            raise_for(Op.START, self.workers.replies(Op.START, start))
            while True:
                yield None
                if not self.workers.jobs_may_have_ended():
                    continue
                states = self.workers.ask(Op.POLL, JobStatus, arg=ref)
                for rank, job in enumerate(states):
                    if job.state in (JobState.FAILED, JobState.CANCELLED):
                        raise kind_of(job.code)(f"{start.kind} on rank {rank} {job.state}: {job.error or 'by request'}")
                if all(job.state is JobState.DONE for job in states):
                    return self.workers.ask(Op.JOIN, kind, arg=ref)
        except (DcrError, GeneratorExit):
            self.workers.replies(Op.CANCEL, ref)
            raise

    def fingerprint(self, job_id: str, placement: JointPlacement) -> JobSteps[LiveSums]:
        """Sum all live weights on all ranks and join the sums."""
        summed = yield from self.job(Start(id=job_id, kind=JobKind.FINGERPRINT), FingerprintRank)
        return verify_sums.join_fingerprint(placement, summed)

    # -- what is live ---------------------------------------------------------------------------------------------

    @property
    def placed(self) -> JointPlacement:
        """The placement. Raises `EngineRefused` before the first attach."""
        if self.placement is None:
            raise EngineRefused("no tensor is placed yet", hint="attach first")
        return self.placement

    def require_live(self) -> tuple[JointPlacement, LiveSums]:
        """Placement and live sums. Raises `EngineRefused` if somebody wrote since they were taken (must F1)."""
        if self.begun is not None:
            raise EngineRefused(f"transaction {self.begun} is begun", hint="finish it, or load an anchor")
        self.workers.ask(Op.STATUS, calls.Status)
        self.note_external_writes()
        if self.placement is None or self.live is None:
            raise EngineRefused("the live weights are not known", hint="attach again")
        return self.placement, self.live

    def record_attach(
        self, facts: StreamFacts, placement: JointPlacement, *, live: LiveSums, generations: list[int]
    ) -> None:
        """Keep what an attach found; `proved` survives only if stream and weights are the same as before."""
        same_stream = self.facts is not None and (self.facts.stream, self.facts.layout_digest) == (
            facts.stream,
            facts.layout_digest,
        )
        if self.proved is not None and self._generations not in (None, generations):
            self.unprove("an external writer wrote the weights; the caches may belong to other values")
        same_weights = self.live is not None and (self.live.vector == live.vector).all()
        if self.proved is not None and not (same_stream and same_weights):
            self.unprove("the weights or the stream changed since they were proved")
        self.facts, self.placement, self.live, self._generations = facts, placement, live, generations

    def accept(self, version: int, live: LiveSums) -> None:
        """Prove the engine at a version that was written and verified here, at the ranks' present generations."""
        self.proved, self.live, self._generations = version, live, list(self.workers.generations)

    def remember(self, outcome: Swapped) -> Swapped:
        """Keep an outcome for a caller that lost the answer."""
        self.outcomes[outcome.txn] = outcome
        while len(self.outcomes) > OUTCOMES:
            self.outcomes.pop(next(iter(self.outcomes)))
        return outcome

    def forget_prepared(self) -> None:
        """Drop the record of the prepared transaction. Workers drop theirs at attach, drop, and external writes."""
        self.prepared = None

    # -- external writes ------------------------------------------------------------------------------------------

    def poll_external_writes(self) -> None:
        """Ask the ranks whether somebody wrote the weights, and pause if so. Workers that cannot be asked may have
        been written as well."""
        try:
            self.workers.replies(Op.STATUS)
        except EngineRefused as error:
            self.unprove(f"the workers do not say whether somebody wrote the weights: {error}")
        self.note_external_writes()

    def note_external_writes(self) -> None:
        """Compare the generations in the last replies with those at attach; a difference ends the proof (must F1)."""
        if self._generations is not None and self.workers.generations != self._generations:
            self._generations = None
            self.live = None
            self.unprove("an external writer wrote the weights (reload, sleep, LoRA or another transfer)")

    def unprove(self, reason: str) -> None:
        """The live weights are no known version any more: pause until they are."""
        log.error("dcr: the engine is no longer proved and is paused: %s", reason)
        self.proved = None
        self.forget_prepared()
        if self.host.running:
            self.host.halt()

    def why_not_resume(self) -> str:
        """Why the engine may not resume; empty if every rank is clean and the engine is proved (must E1)."""
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
        return "" if self.proved is not None else "an external writer wrote the weights"
