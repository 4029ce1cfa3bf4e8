"""A slow pass over the baseline, repeated between updates, that finds damaged blocks (must P4).

One block at a time, on a worker that only reads, so an update cancels the wait and begins at once. `RankContext` runs
it.
"""

from __future__ import annotations

from dcr_daemon import runtime
from dcr_daemon.publish.baseline.baseline import Baseline

ROUND = 1.0  #: least seconds from the start of one pass to the next: a small baseline must not keep a core busy


class Scrub:
    """Verifies a baseline at `rate` bytes per second; 0 switches it off."""

    def __init__(self, baseline: Baseline, rate: float) -> None:
        self._baseline, self._rate = baseline, rate
        self._next = 0
        self._due = self._began = runtime.monotonic()

    @property
    def due(self) -> float:
        """When the next block may be read, on `runtime.monotonic`."""
        idle = not self._rate or not len(self._baseline.blocks) or self._baseline.version is None
        return float("inf") if idle else self._due

    async def step(self) -> str:
        """Check one block. Returns the name of its tensor if it is damaged, else ""."""
        number = self._next
        if number == 0:
            self._began = runtime.monotonic()
        self._due = runtime.monotonic() + self._baseline.blocks.nbytes(number) / self._rate
        intact = await self._baseline.intact(number)
        self._next = (number + 1) % len(self._baseline.blocks)
        if self._next == 0:
            self._due = max(self._due, self._began + ROUND)
        return "" if intact else self._baseline.name(number)
