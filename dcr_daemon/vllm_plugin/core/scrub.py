"""The scrub: a pass over live weights that finds bits that changed without a write (musts E4, F1).

Runs in the EngineCore process as a preemptible operation that `Core` starts. The workers' background threads sum one
batch of tensors after another; the sums are compared, box by box, with those that were accepted. Every commit changes
the accepted sums, and a commit ends the pass first, so no batch is compared with another version than it was summed at.
A difference counts only if a second sum shows it too.

After a difference the engine is paused until an owner has attached and repaired it. Going on would mean to answer from
weights that are no sealed version (must E1) until an operator notices; and a replica that is out for the time of one
load costs less than a rollout that nobody can use. So no option switches this off.
"""

from __future__ import annotations

import time

from dcr_daemon.engine import messages
from dcr_daemon.engine.port import Difference, Scrubbed
from dcr_daemon.errors import EngineRefused
from dcr_daemon.vllm_plugin.calls import FingerprintRank, JobKind, Start
from dcr_daemon.vllm_plugin.core import verify_sums
from dcr_daemon.vllm_plugin.core.operations import JobSteps, Steps
from dcr_daemon.vllm_plugin.core.state import EngineState
from dcr_daemon.wording import shorten

MAX_BATCH = 256 << 20  #: bytes of one job, if it has more than one tensor
MAX_BATCH_SECONDS = 4.0  #: duration of one job at the requested rate, if it has more than one tensor
CALL_SECONDS = 30.0  #: approximate duration of one call


class ScrubPass:
    """One call of the scrub. `so_far` may be called at any time, also after its steps were closed."""

    def __init__(self, state: EngineState, call: messages.Scrub) -> None:
        self._state = state
        self._call = call
        self._version = state.proved
        self._at = call.first
        self._tensors = self._bytes = self._jobs = 0
        self._done = False

    def so_far(self, differing: list[Difference] | None = None) -> Scrubbed:
        return Scrubbed(
            version=self._version,
            tensors=self._tensors,
            bytes=self._bytes,
            next=None if self._done else self._at,
            differing=differing or [],
        )

    def steps(self) -> Steps:
        """Raises `EngineRefused` if the engine is at no known version, or an external writer writes meanwhile."""
        state, began = self._state, time.monotonic()
        while self._tensors == 0 or time.monotonic() - began < CALL_SECONDS:
            placement, live = state.require_live()
            if state.proved is None:
                raise EngineRefused("the engine is at no known version", hint="prove it, or load an anchor")
            batch = self._batch(placement)
            if not batch:
                self._done = True
                break
            if differing := (yield from self._look(placement, live, batch)):
                self._done = True
                state.unprove(f"live weights changed without a write: {_described(differing)}")
                return self.so_far(differing)
            self._at = batch.stop
        return self.so_far()

    def _batch(self, placement: verify_sums.JointPlacement) -> range:
        """The next tensors: at least one if any is left, and as many as the limits of a batch allow."""
        budget = min(MAX_BATCH, self._call.rate * MAX_BATCH_SECONDS) if self._call.rate else MAX_BATCH
        layout, exact = placement.layout, placement.exact
        stop, size = self._at, 0
        while stop < len(layout) and (size == 0 or size + layout[stop].nbytes <= budget):
            size += layout[stop].nbytes if exact[stop] else 0
            stop += 1
        return range(self._at, stop)

    def _look(
        self, placement: verify_sums.JointPlacement, live: verify_sums.LiveSums, batch: range
    ) -> JobSteps[list[Difference]]:
        """The differences that two sums of the batch in a row show."""
        found = verify_sums.find_damage(placement, live, ranks=(yield from self._summed(batch)), tensors=batch)
        if found:
            again = verify_sums.find_damage(placement, live, ranks=(yield from self._summed(batch)), tensors=batch)
            found = [difference for difference in found if difference in again]
        exact = placement.exact
        self._tensors += int(exact[batch.start : batch.stop].sum())
        self._bytes += sum(placement.layout[tensor].nbytes for tensor in batch if exact[tensor])
        return found

    def _summed(self, batch: range) -> JobSteps[list[FingerprintRank]]:
        self._jobs += 1
        job = f"{self._call.id}-{self._jobs}"
        start = Start(id=job, kind=JobKind.SCRUB, tensors=(batch.start, batch.stop), rate=self._call.rate)
        try:
            return (yield from self._state.job(start, FingerprintRank))
        except EngineRefused:
            self._state.require_live()  # names the cause if an external write has ended the job
            raise


def _described(differing: list[Difference]) -> str:
    return shorten(f"{tensor.tensor} (rank {', '.join(map(str, tensor.ranks))})" for tensor in differing)
