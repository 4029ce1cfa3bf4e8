"""One `StoreRequest` event for every request, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from dcr_daemon import runtime
from dcr_daemon.errors import DcrError, KeyNotFound
from dcr_daemon.events import Emit, StoreRequest


class Request:
    """What is known about a request so far; the caller fills in `outcome` and `bytes`."""

    __slots__ = ("bytes", "outcome")

    def __init__(self) -> None:
        self.outcome = "ok"
        self.bytes = 0


@contextmanager
def instrumented(emit: Emit, operation: str) -> Iterator[Request]:
    """Time one request and emit it. An outcome that the caller did not name is told from the exception."""
    request = Request()
    started = runtime.monotonic()
    try:
        yield request
    except KeyNotFound:
        request.outcome = "missing"
        raise
    except DcrError as error:
        request.outcome = error.kind.lower()
        raise
    except asyncio.CancelledError:
        request.outcome = "cancelled"
        raise
    finally:
        seconds = runtime.monotonic() - started
        emit(StoreRequest(operation=operation, outcome=request.outcome, seconds=seconds, bytes=request.bytes))
