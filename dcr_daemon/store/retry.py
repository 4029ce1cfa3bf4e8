"""Bounded, jittered retries: the only retry loop below the ledger.

It retries one exception, `Transient`; an error that a store does not call transient is never retried. Two limits, both
in seconds *without progress*: a try that stalls is replaced (`RetryPolicy.window`), and the request is given up when
nothing has moved for all of the budget. So a large object over a slow link is not given up while it arrives.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from dcr_daemon import runtime
from dcr_daemon.errors import StoreUnavailable
from dcr_daemon.events import Emit, Retrying, discard

T = TypeVar("T")

PROGRESS_BYTES = 4 << 10  #: this many bytes more renew the patience
SHORTEST_TRY = 0.25  #: seconds that a try must have had for its time-out to replace an earlier answer in the error
QUIET_TRIES = 2  #: failures in a row that are not reported,
QUIET_SECONDS = 15.0  #: unless they took this long: requests to a store that does not answer fail slowly

HINT = "check the network, the endpoint and the store's health; a restart continues where this stopped"


class Transient(Exception):
    """A request failed in a way that may pass.

    `throttled`: the store asked for fewer requests. `stalled`: it had its whole window and got nowhere.
    """

    def __init__(self, reason: str, *, throttled: bool = False, stalled: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.throttled = throttled
        self.stalled = stalled


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long, and how often, a request is retried.

    Attributes:
        seconds: total time of tries and pauses without progress.
        first: longest first pause, in seconds; later ones double.
        longest: no pause is longer, in seconds.
        stall: a try that gets nowhere for so many seconds is replaced by another one.
    """

    seconds: float = 60.0
    first: float = 0.2
    longest: float = 8.0
    stall: float = 10.0

    def window(self, stalled: int) -> float:
        """Seconds that a try may get nowhere, after `stalled` tries in a row that stalled.

        It doubles, because a second stall makes it less likely that the connection is at fault, and more that the link
        or the store is slow: then another try only costs what is under way.
        """
        return min(self.seconds, self.stall * 2.0 ** min(stalled, 16))

    def pause(self, tries: int, *, throttled: bool) -> float:
        """Seconds to wait after the `tries`-th failure: between half and all of a doubling step.

        After throttling the pauses begin four times longer, since the store has asked for fewer requests.
        """
        step = min(self.longest, self.first * 2.0 ** min(tries - 1, 16) * (4.0 if throttled else 1.0))
        return step * (0.5 + 0.5 * runtime.jitter())


async def retry(
    attempt: Callable[[float], Awaitable[T]],
    *,
    what: str,
    patience: RetryPolicy,
    gate: AbstractAsyncContextManager[Any],
    progress: Callable[[], int] = lambda: 0,
    fewest: int = 1,
    emit: Emit = discard,
    hint: str = HINT,
) -> T:
    """Call `attempt(seconds)` until it returns.

    Args:
        attempt: one try; it must end when it gets nowhere for the seconds it is given, and raises `Transient` to be
            tried again.
        what: the request in words, for the error.
        patience: budget and pauses.
        gate: held during a try and not during a pause; waiting for it costs no patience.
        progress: bytes that have moved so far over all tries.
        fewest: tries before it is given up, however long they took.
        emit: gets one `Retrying` when the request keeps failing.
        hint: the hint of the error.

    Raises:
        StoreUnavailable: the patience is used up.
    """
    left, tries, total, stalled, seen, announced = patience.seconds, 0, 0, 0, progress(), False
    reported: Transient | None = None  #: the failure that the error will name
    while True:
        tries, total = tries + 1, total + 1
        async with gate:
            started = runtime.monotonic()
            try:
                return await attempt(min(left, patience.window(stalled)))
            except Transient as error:
                failure = error
            # A time-out in the little time that was left says less than the answer before it.
            reported = reported if reported and left < SHORTEST_TRY else failure
            left -= runtime.monotonic() - started
        stalled = stalled + 1 if failure.stalled else 0
        if progress() - seen >= PROGRESS_BYTES:
            left, tries, seen, announced = patience.seconds, 1, progress(), False
        pause = patience.pause(tries, throttled=failure.throttled)
        left -= pause
        if left <= 0 and total >= fewest:
            raise StoreUnavailable(
                f"{what}: {reported.reason} (tried {total} times, {patience.seconds:g} s without progress)",
                hint=hint,
            ) from failure
        if not announced and (tries > QUIET_TRIES or patience.seconds - left >= QUIET_SECONDS):
            emit(Retrying(what=f"{what}: {failure.reason}"))
            announced = True
        await runtime.sleep(pause)
