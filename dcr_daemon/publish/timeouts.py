"""Waits that end and that say what they wait for.

A record that was sent to the ledger stays undecided when a wait for it ends; the next call decides it first (must L1).
A time-out ends the wait, and decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from dcr_daemon.errors import StoreUnavailable
from dcr_daemon.events import Emit, Waiting

T = TypeVar("T")

REPORT_AFTER = 5.0  #: seconds after which an event says what is waited for


async def with_timeout(seconds: float, work: Awaitable[T], *, what: str, emit: Emit) -> T:
    """The result of `work`, which is cancelled after `seconds`; a `Waiting` event names it if it takes long.

    Raises:
        StoreUnavailable: it did not end in time.
    """
    loop = asyncio.get_running_loop()
    reminder = loop.call_later(min(REPORT_AFTER, seconds), lambda: emit(Waiting(what=what)))
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        raise StoreUnavailable(
            f"{what}: the bucket did not answer in {seconds:g} s",
            hint="nothing is lost: what is undecided is resolved before anything else is written",
        ) from None
    finally:
        reminder.cancel()
