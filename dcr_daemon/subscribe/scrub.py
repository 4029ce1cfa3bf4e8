"""The scrub: sums the live weights again and again in the background, to find damage in memory (musts E4, F1).

The engine does the summing and lets everything else go first. This module decides how fast and how often, continues
where it was interrupted, and reports. A difference has already ended the engine's proof and paused it; `wait_damage`
tells the driver, which attaches again and thereby repairs.
"""

from __future__ import annotations

import asyncio

from dcr_daemon import runtime
from dcr_daemon.engine.port import Engine, EngineGone, Scrubbed
from dcr_daemon.errors import EngineRefused, Fenced, ResourceExhausted
from dcr_daemon.events import Alarm, Damaged, Emit, ScrubEnded
from dcr_daemon.subscribe.status import StatusWriter
from dcr_daemon.wording import shorten

REST = 1.0  #: seconds before another try when one did not get through a tensor
FASTEST = 6  #: how often the rate is doubled at most


class Scrub:
    """Passes over one engine's weights.

    Args:
        every: seconds from the start of one pass to that of the next; 0 for none at all.
        rate: bytes a second that each rank reads; 0 for no limit. A tensor has to be summed between two versions: if
            versions come faster than that, the rate is doubled until it fits.
    """

    def __init__(self, engine: Engine, *, every: float, rate: float, status: StatusWriter, emit: Emit) -> None:
        self._engine, self._every, self._rate = engine, every, rate
        self._status, self._emit = status, emit
        self._allowed = asyncio.Event()
        self._differs = asyncio.Event()
        self._what = ""

    def resume(self) -> None:
        """The engine is attached and proved: go on."""
        self._allowed.set()

    def suspend(self) -> None:
        """Pause until the next attach, which finds by itself what was found before."""
        self._allowed.clear()
        self._differs.clear()

    async def wait_damage(self) -> str:
        """Wait until a difference is found; returns its description."""
        await self._differs.wait()
        return self._what

    async def run(self) -> None:
        """Scrub until cancelled."""
        # An attach has just summed everything. The jitter keeps a fleet that starts together from scrubbing together.
        await runtime.sleep(self._every * (0.5 + runtime.jitter() / 2) if self._every else 0)
        while self._every:
            began = runtime.monotonic()
            await self._pass()
            await runtime.sleep(max(REST, self._every - (runtime.monotonic() - began)))
        await asyncio.Event().wait()

    async def _pass(self) -> None:
        """Sum all tensors once, in as many calls as it takes; a difference ends it."""
        began, first, held_up, size, tensors = runtime.monotonic(), 0, 0, 0, 0
        while True:
            await self._allowed.wait()
            seen = await self._look(self._rate * 2.0 ** min(held_up, FASTEST), first)
            if seen is not None:
                size, tensors = size + seen.bytes, tensors + seen.tensors
                if seen.differing:
                    self._damaged(seen)
                    return
                if seen.next is None:
                    self._ended(seen, tensors, size, runtime.monotonic() - began)
                    return
            held_up = 0 if seen is not None and seen.tensors else held_up + 1
            first = first if seen is None or seen.next is None else seen.next
            if held_up:
                await runtime.sleep(REST)

    async def _look(self, rate: float, first: int) -> Scrubbed | None:
        """One call; None if the engine cannot be scrubbed now. The driver learns by itself whether it is lost."""
        try:
            return await self._engine.scrub(rate, first)
        except (EngineRefused, ResourceExhausted):
            return None
        except (EngineGone, Fenced):
            self.suspend()
            return None

    def _ended(self, seen: Scrubbed, tensors: int, size: int, seconds: float) -> None:
        at = runtime.now().isoformat(timespec="seconds")
        self._status.set(scrubbed_at=at, scrub=f"clean, {tensors} tensors")
        self._emit(ScrubEnded(version=seen.version, tensors=tensors, bytes=size, seconds=seconds))

    def _damaged(self, seen: Scrubbed) -> None:
        names = [_place(found.tensor, found.ranks, found.engine, found.replica) for found in seen.differing]
        tensors = shorten(names)
        self._what = f"the live weights are no longer those of version {seen.version}: {tensors}"
        self._status.set(scrubbed_at=runtime.now().isoformat(timespec="seconds"), scrub=f"differed: {tensors}")
        self._emit(Damaged(version=seen.version, tensors=[found.tensor for found in seen.differing], what=tensors))
        self._emit(Alarm(must="F1", what=f"{self._what}: failing memory or disk, or something wrote there"))
        self.suspend()
        self._differs.set()


def _place(tensor: str, ranks: list[int], engine: int, replica: bool) -> str:
    where = [f"engine {engine}"] if engine else []
    where += [f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"] if ranks else []
    where += ["a copy differs from its owner"] if replica else []
    return f"{tensor} ({'; '.join(where)})" if where else tensor
