"""Which versions and anchors a replica does not try now, and when each is tried again.

A daemon does not end because a bucket holds a bad object or an engine refuses a version: it goes on serving what it
has, reports why it cannot advance, and tries again, less and less often. A version or an anchor that failed is blocked
for a pause that doubles each time, so nothing is given up for ever and nothing is tried in a hot loop. A poisoned
version stays blocked until the engine is another one (must P4). The clock decides only when to try again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dcr_daemon import runtime
from dcr_daemon.errors import DcrError, EngineRefused

BACK_OFF = 60.0  #: seconds between two tries at most
REFUSALS = 2  #: refusals of one version by proved weights, after which the version is poisoned
LOSSES = 2  #: engines lost while they took one version, after which the version is blocked
LOSS_PAUSE = 60.0  #: seconds for which it is blocked then, at first; doubles each time
LONGEST_LOSS_PAUSE = 3600.0
UNSUPPORTED_PAUSE = 60.0  #: seconds until an engine that can never be served is asked again; doubles each time
LONGEST_UNSUPPORTED_PAUSE = 900.0


@dataclass(frozen=True, slots=True)
class BlockedVersion:
    """A version that is not applied before `again` (on `runtime.monotonic`); a poisoned one never is."""

    version: int
    error: DcrError
    poisoned: bool
    again: float


@dataclass(slots=True)
class _Record:
    """How often a version or an anchor failed, and until when it is blocked."""

    failures: int = 0
    losses: int = 0
    again: float = 0.0


class FailureBackoff:
    """Counts the failures of one replica.

    Args:
        poll: the first pause, in seconds.
    """

    def __init__(self, poll: float) -> None:
        self._poll = poll
        self._tries = 0
        self._blocked: BlockedVersion | None = None
        self._unsupported = 0
        self._refusals: tuple[int, int] = (0, 0)
        self._versions: dict[int, _Record] = {}
        self._anchors: dict[int, _Record] = {}

    @property
    def blocked(self) -> BlockedVersion | None:
        """The version that is not to be applied now; a route has to avoid its delta."""
        return self._blocked if self._blocked and self._blocked.again > runtime.monotonic() else None

    @property
    def bad_anchors(self) -> set[int]:
        """Versions whose anchors are not to be loaded now."""
        now = runtime.monotonic()
        return {version for version, record in self._anchors.items() if record.again > now}

    def block(self, version: int, error: DcrError, *, poisoned: bool = False) -> None:
        record = self._versions.setdefault(version, _Record())
        again = math.inf if poisoned else self._later(record)
        self._blocked = BlockedVersion(version, error, poisoned, again)

    def block_anchor(self, version: int) -> None:
        self._later(self._anchors.setdefault(version, _Record()))

    def note_refusal(self, version: int) -> bool:
        """Proved weights refused a version. Returns whether that makes it a poisoned one."""
        last, count = self._refusals
        count = count + 1 if last == version else 1
        self._refusals = (version, count) if count < REFUSALS else (0, 0)
        return count >= REFUSALS

    def note_loss(self, version: int, error: DcrError, *, anchor: bool) -> None:
        """The engine was lost while it was asked to take a version. Once may be chance."""
        record = (self._anchors if anchor else self._versions).setdefault(version, _Record())
        record.losses += 1
        if record.losses < LOSSES:
            return
        record.again = runtime.monotonic() + min(LOSS_PAUSE * 2.0 ** (record.losses - LOSSES), LONGEST_LOSS_PAUSE)
        if not anchor:
            refused = EngineRefused(
                f"the engine was lost {record.losses} times over version {version}: {error.message}",
                hint="look at the engine's log; an anchor above that version is tried first",
            )
            self._blocked = BlockedVersion(version, refused, False, record.again)

    def note_progress(self, version: int) -> None:
        """The engine has reached `version`, or serves it as it should: the next failure counts as the first."""
        self._tries, self._refusals = 0, (0, 0)
        self.forget_up_to(version)

    def forget_up_to(self, version: int) -> None:
        """The engine is at `version`: failures of versions up to it do not matter any more."""
        if self._blocked and self._blocked.version <= version:
            self._blocked = None
        for records in (self._versions, self._anchors):
            for passed in [found for found in records if found <= version]:
                del records[passed]

    def note_new_engine(self) -> None:
        """Another engine may take what the last one refused."""
        self._refusals, self._unsupported = (0, 0), 0
        if self._blocked and self._blocked.poisoned:
            self._blocked = None

    def next_pause(self) -> float:
        """Seconds until the blocked version, or whatever failed, may be tried again."""
        if blocked := self.blocked:
            return min(blocked.again - runtime.monotonic(), BACK_OFF)
        return self.note_failure()

    def note_failure(self) -> float:
        """Something failed. Returns the seconds until the next try, by the number of failures in a row."""
        self._tries += 1
        return back_off(self._poll, self._tries - 1)

    def note_unsupported(self) -> float:
        """The engine can never be served, as it was started. Returns the seconds until it is asked again."""
        self._unsupported += 1
        return back_off(UNSUPPORTED_PAUSE, self._unsupported - 1, longest=LONGEST_UNSUPPORTED_PAUSE)

    def _later(self, record: _Record) -> float:
        record.again = runtime.monotonic() + back_off(self._poll, record.failures)
        record.failures += 1
        return record.again


def back_off(first: float, tries: int, *, longest: float = BACK_OFF) -> float:
    """Seconds before try number `tries` (from 0): doubling, capped, jittered."""
    seconds: float = min(first * 2.0 ** min(tries, 32), longest) * (0.75 + runtime.jitter() / 2)
    return seconds
