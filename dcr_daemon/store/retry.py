"""Bounded, jittered persistence: the only retry loop below the ledger.

It knows one exception, `Transient`: whatever a store cannot name as transient is never tried again. Patience is
counted in seconds *without progress*, so that a large object over a slow link is not given up while it comes.
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

PROGRESS_BYTES = 1 << 20  #: this much more of an object renews the patience
HEARD = 0.25  #: seconds that a try has to be given for its silence to say anything
QUIET_TRIES = 2  #: failures in a row that nobody needs to hear about,
QUIET_SECONDS = 15.0  #: unless they took this long: a store that swallows requests fails seldom

HINT = "check the network, the endpoint and the store's health; a restart continues where this stopped"


class Transient(Exception):
    """A request failed in a way that may pass. `throttled`: the store asked for fewer requests."""

    def __init__(self, reason: str, *, throttled: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.throttled = throttled


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a store is asked again.

    Attributes:
        seconds: total time of tries and pauses without progress.
        first: longest first pause, in seconds; later ones double.
        longest: no pause is longer, in seconds.
    """

    seconds: float = 60.0
    first: float = 0.2
    longest: float = 8.0

    def pause(self, tries: int, *, throttled: bool) -> float:
        """Seconds to wait after the `tries`-th failure: between half and all of a doubling step.

        A throttled client begins four times higher: hurrying back is what the store just complained about.
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
    emit: Emit = discard,
    hint: str = HINT,
) -> T:
    """Call `attempt(seconds left)` until it answers.

    Args:
        attempt: one try; it must end within the seconds it is given and raises `Transient` to be tried again.
        what: the request in words, for the error.
        patience: budget and pauses.
        gate: held during a try and not during a pause; waiting for it costs no patience.
        progress: bytes that have arrived so far over all tries.
        emit: told once, early, that a request does not get through.
        hint: the hint of the error.

    Raises:
        StoreUnavailable: the patience is used up.
    """
    left, tries, total, seen, said = patience.seconds, 0, 0, progress(), False
    told: Transient | None = None  #: what the store was last heard to say
    while True:
        tries, total = tries + 1, total + 1
        async with gate:
            started = runtime.monotonic()
            try:
                return await attempt(left)
            except Transient as error:
                failure = error
            # Silence in the moment that was left tells less than the answer before it.
            told = told if told and left < HEARD else failure
            left -= runtime.monotonic() - started
        if progress() - seen >= PROGRESS_BYTES:
            left, tries, seen, said = patience.seconds, 1, progress(), False
        pause = patience.pause(tries, throttled=failure.throttled)
        left -= pause
        if left <= 0:
            raise StoreUnavailable(
                f"{what}: {told.reason} (tried {total} times, {patience.seconds:g} s without progress)",
                hint=hint,
            ) from failure
        if not said and (tries > QUIET_TRIES or patience.seconds - left >= QUIET_SECONDS):
            emit(Retrying(what=f"{what}: {failure.reason}"))
            said = True
        await runtime.sleep(pause)
