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
from dcr_daemon.vllm_plugin.core.verify_sums import Live, Placement
from dcr_daemon.vllm_plugin.core.worker_group import Ranks, kind_of, raise_for
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

    def __init__(self, host: Host, ranks: Ranks, settings: Settings) -> None:
        from dcr_daemon.vllm_plugin.core.coordinator import Changes

        self.host = host
        self.ranks = ranks
        self.settings = settings
        self.incarnation = secrets.token_hex(8)
        self.facts: StreamFacts | None = None
        self.placement: Placement | None = None
        self.live: Live | None = None
        self.proved: int | None = None
        self.begun: str | None = None
        self.moving = ""  #: "swap" or "load" while one has the engine paused
        self.flow: Operation | None = None
        self._gave_way: Operation | None = None
        self.outcomes: dict[str, Swapped] = {}
        self.changes = Changes(self)
        self._generations: list[int] | None = None

    def awaken(self) -> None:
        """First thing in the engine's life: paused, guards in every worker. Raises if a worker lacks our extension."""
        self.host.halt()
        self.ranks.ask(Op.HELLO, calls.Status)

    def handle(self, call: AnyCall) -> Answer | Future[Answer]:
        """Carry out one call. Every `DcrError` becomes an answer."""
        try:
            match call:
                case messages.Status():
                    if call.incarnation:
                        self._require_owner(call)
                        self.look_for_writes()
                    return messages.done(call.id, self.status())
                case messages.Outcome():
                    return messages.done(call.id, self.outcome(call.txn))
                case messages.Checksums():
                    return messages.done(call.id, self._checksums())
                case messages.Attach():
                    return self._begin_flow(call, self._attach(call), after_raising=call.at_least)
                case messages.Poll():
                    return self._poll(call)
            self._require_owner(call)
            return self._owned(call)
        except DcrError as error:
            return messages.refused(call.id, error)

    def _owned(self, call: AnyCall) -> Answer | Future[Answer]:
        """A call of the present owner."""
        changes = self.changes
        if isinstance(call, messages.Scrub):
            return self._scrub(call)
        self._give_way()
        if isinstance(call, messages.Drop):
            self._supersede("the owner dropped it", only="prepare")
            changes.drop()
            return messages.done(call.id, None)
        if self.flow is not None and self.flow.live:
            raise EngineRefused(
                f"the engine is busy with {self.flow.kind}", hint="wait for its answer, or attach again"
            )
        match call:
            case messages.Prove():
                return self._begin_flow(call, changes.prove(call))
            case messages.Serve():
                self._serve()
                return messages.done(call.id, None)
            case messages.Prepare():
                return self._begin_flow(call, changes.prepare(call))
            case messages.Swap():
                return self._begin_flow(call, changes.swap(call.txn, hold=call.hold))
            case messages.FinishAdopted():
                return self._begin_flow(call, changes.finish_adopted(call))
            case messages.Load():
                return self._begin_flow(call, changes.load(call))
            case messages.Inspect():
                return self._begin_flow(call, self._inspect(call))
        raise EngineRefused(f"{type(call).__name__} is not a call of this engine")

    # -- flows ----------------------------------------------------------------------------------------------------

    def _scrub(self, call: messages.Scrub) -> Answer | Future[Answer]:
        """Never in the way: of a call that is under way either, nor of another scrub."""
        from dcr_daemon.vllm_plugin.core.scrub import Scrub

        scrub = Scrub(self, call)
        if self.flow is not None and self.flow.live:
            return messages.done(call.id, scrub.so_far())
        self.flow = Operation(call.id, "scrub", scrub.steps(), scrub.so_far)
        return self.flow.advance()

    def _give_way(self) -> None:
        """Another call is made: a scrub ends, and whoever polls it still gets its answer."""
        if self.flow is not None and self.flow.gives_way:
            self.flow.give_way()
            self._gave_way = self.flow

    def _begin_flow(self, call: AnyCall, steps: Steps, *, after_raising: int | None = None) -> Answer | Future[Answer]:
        """Start a flow. For attach the token is raised first, so the flow before it is fenced, wherever it was."""
        if after_raising is not None:
            self.ranks.token = max(self.ranks.token + 1, after_raising)
            self._give_way()
            self._supersede("a newer owner attached")
        self.flow = Operation(call.id, type(call).__name__.lower(), steps)
        return self.flow.advance()

    def _supersede(self, why: str, *, only: str | None = None) -> None:
        flow = self.flow
        if flow is not None and flow.live and (only is None or flow.kind == only):
            flow.end(Fenced(f"{flow.kind} was ended: {why}") if only is None else EngineRefused(f"ended: {why}"))

    def _poll(self, call: messages.Poll) -> Answer | Future[Answer]:
        for flow in (self.flow, self._gave_way):
            if flow is not None and flow.id == call.id:
                return flow.advance()
        raise Fenced("this call was superseded", hint="attach again")

    def _require_owner(self, call: messages.Owned | messages.Status) -> None:
        if self.incarnation not in call.incarnation.split("+"):
            raise EngineGone("the engine was restarted since attach", hint="attach again")
        if call.token != self.ranks.token:
            raise Fenced(
                f"owner token {call.token} is no longer the engine's: another subscriber attached ({self.ranks.token})",
                hint="one subscriber per engine: stop this one or the other",
            )

    def job(self, start: calls.Start, kind: type[T]) -> JobSteps[list[T]]:
        """Run one job on all ranks without holding up generation (must E4): start, be polled, join."""
        ref = JobRef(id=start.id)
        try:
            raise_for(Op.START, self.ranks.replies(Op.START, start))
            while True:
                yield None
                states = self.ranks.ask(Op.POLL, JobStatus, ref)
                for rank, job in enumerate(states):
                    if job.state in (JobState.FAILED, JobState.CANCELLED):
                        raise kind_of(job.code)(f"{start.kind} on rank {rank} {job.state}: {job.error or 'by request'}")
                if all(job.state is JobState.DONE for job in states):
                    return self.ranks.ask(Op.JOIN, kind, ref)
        except (DcrError, GeneratorExit):
            self.ranks.replies(Op.CANCEL, ref)
            raise

    def fingerprint(self, job_id: str, placement: Placement) -> JobSteps[Live]:
        """Sum the whole of the live weights on all ranks, joined."""
        summed = yield from self.job(calls.Start(id=job_id, kind=JobKind.FINGERPRINT), FingerprintRank)
        return verify_sums.join_fingerprint(placement, summed)

    # -- calls ----------------------------------------------------------------------------------------------------

    def _attach(self, call: messages.Attach) -> Steps:
        """Own the engine, place the tensors, sum the live weights. With a begun transaction: the token only (E6)."""
        self.changes.forget_prepared()
        request = calls.Attach(
            layout=call.facts.layout,
            layout_digest=call.facts.layout_digest,
            cap=self.settings.stage_cap,
            cpus=list(self.settings.background_cpus) if self.settings.background_cpus else None,
        )
        answers = self.ranks.ask(Op.ATTACH, AttachedRank, request)
        adopted = next((answer.adopted for answer in answers if answer.adopted), None)
        if adopted is not None:
            self.begun = adopted
            return self._attached(b"", adopted)
        if self.begun is not None:
            self.begun, self.moving = None, ""
            self.changes.forget_begun()
        layout = read_layout(call.facts.layout, call.facts.layout_digest)
        placement = verify_sums.join_placement(layout, answers, self.settings.loaded_cap)
        generations = list(self.ranks.generations)
        live = yield from self.fingerprint(call.id, placement)
        if generations != self.ranks.generations:
            raise EngineRefused("somebody changed the weights while they were summed", hint="attach again")
        self._take(call.facts, placement, live, generations)
        return self._attached(live.vector.tobytes(), None)

    def _take(self, facts: StreamFacts, placement: Placement, live: Live, generations: list[int]) -> None:
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
            token=self.ranks.token,
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
        held = [placement.held(rank) for rank in range(len(placement.local))]
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
        found = self.ranks.ask(Op.CHECKSUMS, calls.Checksums)
        return [
            RankChecksums(rank=rank, parameters=one.parameters, buffers=one.buffers) for rank, one in enumerate(found)
        ]

    def status(self) -> EngineStatus:
        return EngineStatus(
            incarnation=self.incarnation,
            version=self.proved,
            serving=self.host.running,
            prepared=self.changes.prepared_id,
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
    def placed(self) -> Placement:
        """Raises `EngineRefused` before the first attach."""
        if self.placement is None:
            raise EngineRefused("nothing is placed yet", hint="attach first")
        return self.placement

    def require_live(self) -> tuple[Placement, Live]:
        """Placement and live vector, if nobody wrote since they were taken (must F1)."""
        if self.begun is not None:
            raise EngineRefused(f"transaction {self.begun} is begun", hint="settle it, or load an anchor")
        self.ranks.ask(Op.STATUS, calls.Status)
        self.notice_writes()
        if self.placement is None or self.live is None:
            raise EngineRefused("the live weights are not known", hint="attach again")
        return self.placement, self.live

    def look_for_writes(self) -> None:
        """Ask the ranks, and stop generating if somebody has written. Workers that cannot be asked may have been
        written to as well."""
        try:
            self.ranks.replies(Op.STATUS)
        except EngineRefused as error:
            self.unprove(f"the workers do not tell who wrote: {error}")
        self.notice_writes()

    def notice_writes(self) -> None:
        """Compare the weights generations of the last replies with those at attach."""
        if self._generations is not None and self.ranks.generations != self._generations:
            self._generations = None
            self.live = None
            self.unprove("somebody else wrote the weights (reload, sleep, LoRA or another transfer)")

    def unprove(self, why: str) -> None:
        """The weights are no known version any more: stop generating until they are."""
        log.error("dcr: the engine is no longer proved and is paused: %s", why)
        self.proved = None
        self.changes.forget_prepared()
        if self.host.running:
            self.host.halt()

    def why_not_resume(self) -> str:
        """Empty if every rank is clean and the engine proved; else why not (must E1)."""
        if self.begun is not None:
            return f"transaction {self.begun} is begun"
        if self.moving:
            return f"a {self.moving} is under way"
        if self.proved is None:
            return "the engine is not proved to hold a known version of its stream"
        replies = self.ranks.replies(Op.STATUS)
        dirty = [reply.rank for reply in replies if reply.dirty or not reply.ok]
        if dirty:
            return f"ranks {dirty} are dirty"
        self.notice_writes()
        return "" if self.proved is not None else "somebody else wrote the weights"

    def accept(self, version: int, live: Live) -> None:
        """We wrote the weights and judged them: proved, at the generation that the ranks show now."""
        self.proved, self.live, self._generations = version, live, list(self.ranks.generations)

    def remember(self, outcome: Swapped) -> Swapped:
        """Keep an outcome for whoever lost the answer."""
        self.outcomes[outcome.txn] = outcome
        while len(self.outcomes) > OUTCOMES:
            self.outcomes.pop(next(iter(self.outcomes)))
        return outcome
