"""`AttemptFate`: what becomes of one attempt, kept in this one place (musts L1, P7).

    open ─┬─────────────► sealed    the version exists
          ├─────────────► aborted   it does not exist and never will; the abort record or the undo may still be due
          └─► unknown ──► sealed | aborted    the ledger did not answer; the next call finds out

`RankContext`, `Leader` and `Member` write it on the event loop as the ledger is read; `Update` marks it lost if the
background work dies. `Update` reads it, from any thread.
"""

from __future__ import annotations

from concurrent.futures import Future

from dcr_daemon.errors import DcrError, StoreUnavailable, UpdateAborted
from dcr_daemon.publish.version.versions import SealedVersion

Cause = BaseException | str  #: why an attempt ends: an error, or a sentence


def reason_of(cause: Cause) -> str:
    """The text for the abort record and for events."""
    if isinstance(cause, str):
        return cause
    return f"{cause.kind if isinstance(cause, DcrError) else type(cause).__name__}: {cause}"


class AttemptFate:
    """The fate of the attempt at `version`."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._first_cause: Cause | None = None
        # One tuple, which other threads read at once: whether the answer stands for "unknown", and the answer.
        self._state: tuple[bool, Future[SealedVersion]] = False, Future()

    @property
    def open(self) -> bool:
        """True until the attempt is sealed, aborted or unknown."""
        return not self._state[1].done()

    @property
    def sealed(self) -> SealedVersion | None:
        """The version, if it exists."""
        answer = self._state[1]
        return answer.result() if answer.done() and not answer.exception() else None

    @property
    def unknown(self) -> bool:
        """Whether the ledger was asked and did not answer."""
        return self._state[0]

    @property
    def aborted(self) -> bool:
        """Whether it is no version and never will be."""
        unknown, answer = self._state
        return not unknown and answer.done() and answer.exception() is not None

    @property
    def error(self) -> BaseException | None:
        """Why it is aborted or unknown; None while it is open or sealed."""
        answer = self._state[1]
        return answer.exception() if answer.done() else None

    def wait(self, timeout: float | None = None) -> SealedVersion:
        """Wait until it is not open any more, in a thread other than the coordinator's.

        Raises:
            TimeoutError: it is still open after `timeout` seconds.
            BaseException: `error`.
        """
        return self._state[1].result(timeout)

    def set_sealed(self, sealed: SealedVersion) -> None:
        """The ledger has its seal."""
        if answer := self._undecided():
            answer.set_result(sealed)

    def set_aborted(self, cause: Cause) -> None:
        """The ledger has no seal of it, and nothing can become one. The cause that is given first stands."""
        if answer := self._undecided():
            cause = self._first_cause or cause
            if not isinstance(cause, DcrError):
                cause = UpdateAborted(f"version {self.version} was given up: {reason_of(cause)}")
            answer.set_exception(cause)

    def set_unknown(self, cause: Cause) -> None:
        """The attempt failed by `cause`, and the ledger does not say now whether it was sealed all the same."""
        self._first_cause = self._first_cause or cause
        kind = type(cause) if isinstance(cause, DcrError) else StoreUnavailable
        reason = cause.message if isinstance(cause, DcrError) else reason_of(cause)
        self.set_lost(
            kind(
                f"whether version {self.version} exists is not known: {reason}",
                hint="the next publish finds out before it begins; nothing is lost",
            )
        )

    def set_lost(self, error: BaseException) -> None:
        """Unknown, because whoever was to learn it has ended by `error`."""
        if self.open:
            answer: Future[SealedVersion] = self._state[1]
            self._state = True, answer
            answer.set_exception(error)

    def _undecided(self) -> Future[SealedVersion] | None:
        """The answer that may be given now: none is given yet, or only "unknown". None if the fate is decided."""
        unknown, answer = self._state
        if unknown:
            answer = Future()
            self._state = False, answer
        return None if answer.done() else answer
