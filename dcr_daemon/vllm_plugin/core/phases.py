"""How long the parts of a pause take: rest, begin, apply, sums, commit, resume.

Runs in the EngineCore process; the coordinator keeps one `PhaseTimer` for each call that pauses the engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping


class PhaseTimer:
    """Divides the time since it was made into phases; a phase that is repeated adds up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def ended(self, phase: str) -> None:
        """What was done since the last phase, or since the start, was this phase."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


def longest(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Of each phase the longest time: ranks, and engines, work beside one another."""
    found: dict[str, float] = {}
    for seconds in parts:
        for phase, taken in seconds.items():
            found[phase] = max(found.get(phase, 0.0), taken)
    return found
