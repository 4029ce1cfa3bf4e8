"""A pass over live weights that finds what no wrap can see: bits that changed by themselves (musts E4, F1).

Batch after batch of tensors is summed on the workers' background threads and compared, box by box, with what those
boxes were accepted at. That reference moves with every commit, and a commit ends the pass first, so no batch is judged
by another version than it was summed at. A difference counts only if a second look finds it too.

The engine is paused then, and stays so until an owner has attached and repaired it. To go on would be to answer from
weights that are no sealed version (must E1), for as long as an operator takes to notice; and a replica that is out for
the time of one load costs less than a rollout that nobody can use. So there is no switch.
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

BATCH = 256 << 20  #: bytes of one job at most, if it has more than one tensor
PATIENCE = 4.0  #: seconds one job may take at the rate asked for, if it has more than one tensor
LEG = 30.0  #: seconds of one call, about


class ScrubPass:
    """One call. `so_far` may be asked for at any time, also after its steps were closed."""

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
        """Raises `EngineRefused` if the engine is at no known version, or somebody else writes meanwhile."""
        state, began = self._state, time.monotonic()
        while self._tensors == 0 or time.monotonic() - began < LEG:
            placement, live = state.require_live()
            if state.proved is None:
                raise EngineRefused("the engine is at no known version", hint="prove it, or load an anchor")
            batch = self._batch(placement)
            if not batch:
                self._done = True
                break
            if differing := (yield from self._look(placement, live, batch)):
                self._done = True
                state.unprove(f"the live weights changed by themselves: {_described(differing)}")
                return self.so_far(differing)
            self._at = batch.stop
        return self.so_far()

    def _batch(self, placement: verify_sums.JointPlacement) -> range:
        """The next tensors, at least one while there are any; as many as are soon summed at this rate."""
        room = min(BATCH, self._call.rate * PATIENCE) if self._call.rate else BATCH
        layout, exact = placement.layout, placement.exact
        stop, size = self._at, 0
        while stop < len(layout) and (size == 0 or size + layout[stop].nbytes <= room):
            size += layout[stop].nbytes if exact[stop] else 0
            stop += 1
        return range(self._at, stop)

    def _look(
        self, placement: verify_sums.JointPlacement, live: verify_sums.LiveSums, batch: range
    ) -> JobSteps[list[Difference]]:
        """What differs in a batch, twice in a row."""
        found = verify_sums.find_damage(placement, live, (yield from self._summed(batch)), batch)
        if found:
            again = verify_sums.find_damage(placement, live, (yield from self._summed(batch)), batch)
            found = [one for one in found if one in again]
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
            self._state.require_live()  # says so if somebody else's write has ended the job
            raise


def _described(differing: list[Difference]) -> str:
    return shorten(f"{one.tensor} (rank {', '.join(map(str, one.ranks))})" for one in differing)
