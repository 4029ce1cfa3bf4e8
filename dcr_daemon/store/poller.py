"""The pauses between looks at something that only looking shows: an object of another process, a record, a stream.

A store tells nobody that something has arrived. Whoever waits looks again and again: often at first, then less and
less often, and says now and then what it waits for. `retry` is the loop for requests that fail, this one for requests
that succeed and find nothing yet.
"""

from __future__ import annotations

from dcr_daemon import runtime

REPORT_EVERY = 5.0  #: seconds between two reports of a wait


class Poller:
    """One wait.

    Args:
        first: seconds of the first pause.
        longest: seconds of the longest.
        factor: by which each pause is longer than the one before it.

    Example:
        >>> poller = Poller(first=0.02, longest=1.0)
        >>> while (found := await look()) is None:
        ...     if poller.waited > patience:
        ...         raise StoreUnavailable(...)
        ...     if poller.report_due():
        ...         emit(Waiting(what=...))
        ...     await poller.pause()
    """

    def __init__(self, *, first: float, longest: float, factor: float = 2.0) -> None:
        self._first, self._longest, self._factor = first, longest, factor
        self._pause = first
        self._began = self._reported = runtime.monotonic()

    @property
    def waited(self) -> float:
        """Seconds since the wait began."""
        return runtime.monotonic() - self._began

    def reset(self) -> None:
        """Something has arrived: look often again."""
        self._pause = self._first

    def report_due(self) -> bool:
        """Whether to say now what is waited for: True once in `REPORT_EVERY` seconds."""
        if runtime.monotonic() - self._reported <= REPORT_EVERY:
            return False
        self._reported = runtime.monotonic()
        return True

    async def pause(self) -> None:
        """Sleep until the next look."""
        await runtime.sleep(self._pause)
        self._pause = min(self._factor * self._pause, self._longest)
