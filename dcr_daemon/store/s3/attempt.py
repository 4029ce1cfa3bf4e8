"""One request in flight: its window without progress, and the body of an upload as a source of progress."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable

from dcr_daemon.store.instrumented import Request

WINDOW_BYTES = 10 << 10  #: a try that moves fewer bytes in a window has stalled: 1 KiB per second at first
UPLOAD_PIECE = 64 << 10  #: bytes of an upload handed over at a time


class Try:
    """What is told about a request, and the clock that ends it after `window` seconds without progress."""

    def __init__(self, request: Request, clock: asyncio.Timeout, window: float) -> None:
        self.request = request
        self.stalled = True  #: until it had moved enough bytes for one window
        self._clock, self._window = clock, window
        self._moved = 0

    def moved(self, count: int, enough: int = WINDOW_BYTES) -> None:
        """`count` bytes have moved; `enough` of them begin the window anew."""
        self.request.bytes += count
        self._moved += count
        if self._moved >= enough:
            self._moved, self.stalled = 0, False
            self._clock.reschedule(asyncio.get_running_loop().time() + self._window)


class UploadBody(io.BytesIO):
    """The body of a PUT, which tells how much of it the connection has taken.

    The SDK reads it first for the signature; only what is read after `begin` is on its way.
    """

    def __init__(self, data: bytes, taken: Callable[[int], None]) -> None:
        super().__init__(data)
        self._taken = taken
        self._begun = False

    def begin(self) -> None:
        """The request is signed, and is sent now."""
        self._begun = True

    def read(self, size: int | None = -1, /) -> bytes:
        if not self._begun:
            return super().read(size)
        piece = super().read(UPLOAD_PIECE if size is None or size < 0 else min(size, UPLOAD_PIECE))
        self._taken(len(piece))
        return piece
