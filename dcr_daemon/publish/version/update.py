"""`Update`: what a training script holds of one call of `publish`: an attempt, later (when sealed) a version."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from dcr_daemon.errors import DcrError, Fenced, UsageError
from dcr_daemon.publish.version.versions import SealedVersion


class Update:
    """One call of `publish`. Made and told by its `Publisher`; `version`, `sealed` and `wait_sealed` are for users."""

    def __init__(self, version: int, here: Callable[[], bool]) -> None:
        self._version, self._here = version, here
        self._fate: Future[SealedVersion] = Future()
        self._told = False

    @property
    def version(self) -> int:
        """The version that this update is, or would have been."""
        return self._version

    @property
    def sealed(self) -> bool:
        """Whether the version exists now."""
        return self._fate.done() and self._fate.exception() is None

    def wait_sealed(self, timeout: float | None = None) -> SealedVersion:
        """Wait until the version exists.

        Raises:
            TimeoutError: not within `timeout` seconds; it may still be.
            UsageError: this process is a fork of the publisher's, and will not hear of it.
            Fenced, StoreUnavailable, ...: it does not exist and never will, unless the message says that this is not
                known; publish again.
        """
        if not self._fate.done() and not self._here():
            raise UsageError(
                f"the fate of version {self._version} is not told to a fork of the publisher's process",
                hint="wait in the process that published, before it forks if the fork depends on it",
            )
        try:
            return self._fate.result(timeout)
        except TimeoutError:
            raise TimeoutError(f"version {self._version} was not sealed within {timeout} s") from None
        except DcrError:
            self._told = True
            raise

    def ended(self, behind: Future[None]) -> None:
        """Nobody waits for ever, even for work that died of a bug or of the interpreter's end."""
        if not self._fate.done():
            error = None if behind.cancelled() else behind.exception()
            self._fate.set_exception(error or DcrError(f"version {self._version} was given up: the publisher ended"))

    def found(self, sealed: SealedVersion) -> None:
        """It exists; perhaps after all, when nobody could tell before."""
        if self._fate.done():
            self._fate = Future()
        self._fate.set_result(sealed)

    def failed(self, error: BaseException) -> None:
        """It does not exist, or nobody can tell."""
        self._fate.set_exception(error)

    def raise_untold(self) -> None:
        """Raise its error, unless `wait_sealed` did; being fenced is raised always."""
        error = self._fate.exception()
        if error and (not self._told or isinstance(error, Fenced)):
            self._told = True
            raise error
