"""What stands between a replica and its target, and when it is tried again.

A daemon does not leave because a bucket holds a bad object or an engine says no: it goes on serving what it has, says
why it is not further, and tries again, less and less often. What is held against a version or an anchor lapses after a
pause that doubles each time, so that nothing is given up for ever and nothing is tried in a hot loop. A poisoned
version is only gone round, until the engine is another one (must P4). No clock decides anything but when to look.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dcr_daemon import runtime
from dcr_daemon.errors import DcrError, EngineRefused

BACK_OFF = 60.0  #: seconds between two tries at most
REFUSALS = 2  #: times that proved weights may refuse a version before it counts as poisoned
LOSSES = 2  #: times that an engine may be lost over the same version before it is held against the version
LOSS_PAUSE = 60.0  #: seconds that a version which cost engines is left alone, at first; doubles each time
LONGEST_LOSS_PAUSE = 3600.0


@dataclass(frozen=True, slots=True)
class BlockedVersion:
    """A version that the chain does not get past before `again` (monotonic); one that is poisoned never."""

    version: int
    error: DcrError
    poisoned: bool
    again: float


@dataclass(slots=True)
class _Record:
    """How often something failed, and until when it is left alone."""

    failures: int = 0
    losses: int = 0
    again: float = 0.0


class FailureBackoff:
    """`poll` is the first pause, in seconds."""

    def __init__(self, poll: float) -> None:
        self._poll = poll
        self._tries = 0
        self._blocked: BlockedVersion | None = None
        self._refusals: tuple[int, int] = (0, 0)
        self._versions: dict[int, _Record] = {}
        self._anchors: dict[int, _Record] = {}

    @property
    def blocked(self) -> BlockedVersion | None:
        """The version that is not to be tried now."""
        return self._blocked if self._blocked and self._blocked.again > runtime.monotonic() else None

    @property
    def bad_anchors(self) -> set[int]:
        """Versions whose anchors are not to be tried now."""
        now = runtime.monotonic()
        return {version for version, record in self._anchors.items() if record.again > now}

    def block(self, version: int, error: DcrError, *, poisoned: bool = False) -> None:
        record = self._versions.setdefault(version, _Record())
        again = math.inf if poisoned else self._later(record)
        self._blocked = BlockedVersion(version, error, poisoned, again)

    def block_anchor(self, version: int) -> None:
        self._later(self._anchors.setdefault(version, _Record()))

    def note_refusal(self, version: int) -> bool:
        """Proved weights refused a version. Whether it counts as poisoned now."""
        last, count = self._refusals
        count = count + 1 if last == version else 1
        self._refusals = (version, count) if count < REFUSALS else (0, 0)
        return count >= REFUSALS

    def note_loss(self, version: int, error: DcrError, *, anchor: bool) -> None:
        """The engine went away while it was asked to take a version: once may be chance."""
        record = (self._anchors if anchor else self._versions).setdefault(version, _Record())
        record.losses += 1
        if record.losses < LOSSES:
            return
        record.again = runtime.monotonic() + min(LOSS_PAUSE * 2.0 ** (record.losses - LOSSES), LONGEST_LOSS_PAUSE)
        if not anchor:
            refused = EngineRefused(
                f"the engine was lost {record.losses} times over version {version}: {error.message}",
                hint="look at its log; an anchor above that version is tried before it is",
            )
            self._blocked = BlockedVersion(version, refused, False, record.again)

    def note_progress(self, version: int) -> None:
        """The engine has come to `version`, or serves there as it should: the next failure is a first one."""
        self._tries, self._refusals = 0, (0, 0)
        self.forget_up_to(version)

    def forget_up_to(self, version: int) -> None:
        """The engine is at `version`: what stood before it is behind."""
        if self._blocked and self._blocked.version <= version:
            self._blocked = None
        for records in (self._versions, self._anchors):
            for passed in [found for found in records if found <= version]:
                del records[passed]

    def note_new_engine(self) -> None:
        """What one engine refused, another may take."""
        self._refusals = (0, 0)
        if self._blocked and self._blocked.poisoned:
            self._blocked = None

    def next_pause(self) -> float:
        """Seconds until what stands in the way may be tried again."""
        if blocked := self.blocked:
            return min(blocked.again - runtime.monotonic(), BACK_OFF)
        return self.note_failure()

    def note_failure(self) -> float:
        """Seconds until the next try, of as many in a row as have come to nothing."""
        self._tries += 1
        return back_off(self._poll, self._tries - 1)

    def _later(self, record: _Record) -> float:
        record.again = runtime.monotonic() + back_off(self._poll, record.failures)
        record.failures += 1
        return record.again


def back_off(first: float, tries: int, longest: float = BACK_OFF) -> float:
    """Seconds before try number `tries` (from 0): doubling, capped, jittered."""
    seconds: float = min(first * 2.0 ** min(tries, 32), longest) * (0.75 + runtime.jitter() / 2)
    return seconds
