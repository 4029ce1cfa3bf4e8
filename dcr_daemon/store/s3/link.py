"""The link to a bucket in one direction, as a client sees it: how many large requests it carries, and whether it moves.

*How many.* A stream that shares a slow link must not look stalled because of its neighbours. So the number of large
requests follows the goodput: each `STREAM_RATE` bytes per second allow one. It rises at once, with the first bytes of a
fast link, and falls after a whole `WINDOW`. `STREAM_RATE` is 16 times what a stream needs not to count as stalled, and
less than what any store gives a single stream, so that a limit per stream is never mistaken for a slow link.

*Whether it moves.* A request without an answer is not given up while its neighbours receive bytes, since it may wait
behind them; but not for ever (`SILENCE`), since its object alone may be unreachable.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from dcr_daemon import runtime

STREAM_RATE = 16 << 10  #: bytes per second that a large request should have on average
WINDOW = 5.0  #: seconds over which goodput is measured
FEWEST = 4  #: also before anything was measured; the link is still used while one or two of them are stalled
SILENCE = 300.0  #: seconds without a byte of its own after which the bytes of others do not count for a request


class Link:
    """Held by a large request while it is under way: `async with link`. At most `most` at a time.

    Attributes:
        bytes: all bytes that its requests have moved.
        limit: how many requests may be under way now.
    """

    def __init__(self, most: int) -> None:
        self.bytes = 0
        self.limit = min(FEWEST, most)
        self._most, self._running = most, 0
        self._since, self._before = runtime.monotonic(), 0
        self._changed = asyncio.Event()

    def moved(self, count: int) -> None:
        """`count` more bytes of a request that holds the link have moved."""
        self.bytes += count
        now = runtime.monotonic()
        elapsed, moved = now - self._since, self.bytes - self._before
        allowed = max(min(FEWEST, self._most), min(self._most, int(moved / max(elapsed, WINDOW) / STREAM_RATE)))
        if elapsed >= WINDOW:
            self.limit, self._since, self._before = allowed, now, self.bytes
        else:
            self.limit = max(self.limit, allowed)
        self._changed.set()

    async def __aenter__(self) -> None:
        while self._running >= self.limit:
            self._changed.clear()
            await self._changed.wait()
        if not self._running:  # an idle link says nothing about its goodput
            self._since, self._before = runtime.monotonic(), self.bytes
        self._running += 1

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._running -= 1
        self._changed.set()


class Progress:
    """The bytes that count as progress of one request: its own, and for a time those of its neighbours on the link."""

    def __init__(self, link: Link | None) -> None:
        self._link = link
        self._own = self._others = 0
        self._moved = runtime.monotonic()

    def moved(self, count: int) -> None:
        """`count` bytes of this request have moved."""
        self._own += count
        self._moved = runtime.monotonic()
        if self._link:
            self._link.moved(count)

    def bytes(self) -> int:
        """Never falls."""
        if self._link and runtime.monotonic() - self._moved < SILENCE:
            self._others = self._link.bytes - self._own
        return self._own + self._others
