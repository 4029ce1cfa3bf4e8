"""`Update`: what a training script holds of one call of `publish`: an attempt, later (when sealed) a version."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from dcr_daemon.errors import DcrError, Fenced, UsageError
from dcr_daemon.publish.version.fate import AttemptFate
from dcr_daemon.publish.version.versions import SealedVersion


class Update:
    """One call of `Publisher.publish`, which returns it. Reads the fate of its attempt.

        update = publisher.publish(model, step=12)
        train(...)                        # the upload goes on behind
        sealed = update.wait_sealed()     # SealedVersion(version=3, step=12, ...)

    Args:
        fate: of the attempt; written by the publisher's `Leader` or `Member` and its `RankContext`.
        in_publisher: whether the caller is in the process whose publisher writes the fate.
    """

    def __init__(self, fate: AttemptFate, in_publisher: Callable[[], bool]) -> None:
        self._fate, self._in_publisher = fate, in_publisher
        self._raised = False

    @property
    def version(self) -> int:
        """The version that this update is, or would have been."""
        return self._fate.version

    @property
    def sealed(self) -> bool:
        """Whether the version exists now."""
        return self._fate.sealed is not None

    def wait_sealed(self, timeout: float | None = None) -> SealedVersion:
        """Wait until the version exists.

        Raises:
            TimeoutError: not within `timeout` seconds; it may still be.
            UsageError: this process is a fork of the publisher's, and does not learn the fate.
            Fenced, StoreUnavailable, ...: it does not exist and never will, unless the message says that this is not
                known; publish again.
        """
        if self._fate.open and not self._in_publisher():
            raise UsageError(
                f"the fate of version {self.version} is not told to a fork of the publisher's process",
                hint="wait in the process that published, before it forks if the fork depends on it",
            )
        try:
            return self._fate.wait(timeout)
        except TimeoutError:
            raise TimeoutError(f"version {self.version} was not sealed within {timeout} s") from None
        except DcrError:
            self._raised = True
            raise

    def background_ended(self, background: Future[None]) -> None:
        """The work that was to learn the fate has ended. Nobody waits for ever, even if it died of a bug, or with the
        interpreter."""
        error = None if background.cancelled() else background.exception()
        self._fate.set_lost(error or DcrError(f"version {self.version} was given up: the publisher ended"))

    def raise_once(self) -> None:
        """Raise its error, unless `wait_sealed` did; `Fenced` is raised always."""
        error = self._fate.error
        if error and (not self._raised or isinstance(error, Fenced)):
            self._raised = True
            raise error
