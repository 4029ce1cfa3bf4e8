"""Waits for the next record by reading the next slot; a clock only decides when to read it again.

Between two records a reader polls less and less often. While a version is open, and around the time at which the next
one is expected, it polls fast: the times between the last records say when that is. A forecast that is wrong costs some
polls and nothing else (must L8).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from statistics import median

from dcr_daemon import runtime
from dcr_daemon.errors import StoreUnavailable
from dcr_daemon.events import Emit, Retrying
from dcr_daemon.ledger import records
from dcr_daemon.ledger.records import AnyRecord, Open, Seal

GAP_AFTER = 30  #: polls in a row without a record after which it is looked for a missing one; fast ones do not count
GAP_EVERY = 6  #: polls of which one then looks further ahead, instead of at the next slot: a poll stays one request

KEPT = 8  #: times between records from which the next one is forecast: half of them outweigh any that are unusual
WIDTH = 4.0  #: of a window to either side of the median, in median deviations from it
UNCERTAINTY = 0.1  #: the least width, as a share of one time; of n times it is an n-th of this
WINDOW_POLLS = 256  #: polls in one window: what a forecast costs, however uncertain it is
SLOWDOWN = 0.1  #: of the time since a window has passed in vain: the pause from then on


@dataclass(frozen=True, slots=True)
class Polling:
    """Seconds between polls, before jitter.

    While nothing is expected a pause is `first` after a record, and then longer with the time waited: by `growth` of
    it, to `longest`. So whatever comes is noticed late by about that share of the wait. While a record is expected a
    pause is `fast`.
    """

    first: float = 1.0
    longest: float = 30.0
    growth: float = 0.02

    @property
    def fast(self) -> float:
        """A tenth of `first`, so that the operator's choice holds for both; below 0.1 s only if `first` is."""
        return max(self.first / 10, min(self.first, 0.1))

    def pause(self, waited: float, first: float | None = None) -> float:
        """Seconds to sleep after `waited` seconds without a record; `first` replaces the first pause."""
        first = self.first if first is None else first
        return max(first, min(first + self.growth * waited, self.longest))


def jittered(seconds: float) -> float:
    """`seconds`, more or less: the replicas of a fleet do not poll in step."""
    return seconds * (0.75 + runtime.jitter() / 2)


class Intervals:
    """How long it takes from one record to another, by the last few times."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=KEPT)

    def add(self, seconds: float) -> None:
        """A time from one record to the other, by the clock of who wrote them; one that went back is left out."""
        if seconds > 0:
            self._seconds.append(seconds)

    def window(self) -> tuple[float, float] | None:
        """The least and the most seconds that it takes next time, most likely; None if it has never been seen."""
        if not self._seconds:
            return None
        middle = median(self._seconds)
        deviation = median(abs(seconds - middle) for seconds in self._seconds)
        margin = max(WIDTH * deviation, UNCERTAINTY * middle / len(self._seconds))
        return middle - margin, middle + margin


class PollSchedule:
    """When to poll next, by the records that came. The times between them are those that the records name, so that
    they are right for a reader that reads many at once; where the last one stands on this process's clock is known as
    well as that reader polled.

    Args:
        is_open: whether a version is open, as far as the ledger was read.
    """

    def __init__(self, polling: Polling, *, is_open: Callable[[], bool]) -> None:
        self._polling, self._is_open = polling, is_open
        self._opens, self._uploads = Intervals(), Intervals()  # from open to open, and from an open to its seal
        self._polled = self._since = runtime.monotonic()  #: the last poll in vain; the last record
        self._opened: tuple[float, float] | None = None  #: between these times the last open was written
        self._opened_at: datetime | None = None  #: by its writer's clock

    def note(self, record: AnyRecord) -> None:
        """A record was read."""
        self._since = runtime.monotonic()
        if isinstance(record, Open | Seal):
            at = records.written_at(record)
            if at and self._opened_at:
                times = self._opens if isinstance(record, Open) else self._uploads
                times.add((at - self._opened_at).total_seconds())
            if isinstance(record, Open):
                self._opened, self._opened_at = (self._polled, self._since), at

    def pause(self) -> float:
        """Seconds until the next poll, before jitter, after one that found nothing."""
        self._polled = now = runtime.monotonic()
        polling, is_open = self._polling, self._is_open()
        usual = polling.pause(now - self._since, polling.fast if is_open else polling.first)
        window = (self._uploads if is_open else self._opens).window()
        if self._opened is None or window is None:
            return usual
        early, late = self._opened[0] + window[0], self._opened[1] + window[1]
        if now < early:
            return min(usual, max(early - now, polling.fast))
        if now > late:
            return min(usual, polling.fast + SLOWDOWN * (now - late))
        return min(usual, max(polling.fast, (late - early) / WINDOW_POLLS))


class Follower:
    """An endless async iterator over the records that count, in order, each given once.

    While the store is unavailable it polls on, with a `Retrying` event each time: a replica goes on serving what it
    has. Raises what reading the ledger raises otherwise (`Corrupt`, `Incompatible`).
    """

    def __init__(
        self,
        poll: Callable[[], Awaitable[bool]],
        check_gap: Callable[[int], Awaitable[None]],
        *,
        polling: Polling,
        is_open: Callable[[], bool],
        emit: Emit,
        url: str,
    ) -> None:
        self._poll = poll
        self._check_gap = check_gap
        self._polling = polling
        self._schedule = PollSchedule(polling, is_open=is_open)
        self._emit = emit
        self._url = url
        self._given: deque[AnyRecord] = deque()
        self._idle = 0  # polls in a row that found nothing, without the fast ones
        self._slow = False  #: whether the last pause was no fast one

    def give(self, record: AnyRecord) -> None:
        """Called by the ledger for every record that counts, whoever caused it to be read."""
        self._given.append(record)
        self._schedule.note(record)

    def taken(self) -> list[AnyRecord]:
        """The records that were read and not given yet; does not wait."""
        fresh = list(self._given)
        self._given.clear()
        return fresh

    def __aiter__(self) -> Follower:
        return self

    async def __anext__(self) -> AnyRecord:
        while not self._given:
            pause = 0.0
            try:
                if await self._look():
                    self._idle = 0
                    continue
            except StoreUnavailable as error:
                self._emit(Retrying(what=f"the store of {self._url}: {error.message}"))
                pause = self._polling.first  # a store in trouble is not polled fast
            pause = max(pause, self._schedule.pause())
            self._slow = pause >= self._polling.first
            self._idle += self._slow
            await runtime.sleep(jittered(pause))
        self._idle = 0
        return self._given.popleft()

    async def _look(self) -> bool:
        turn, polls = divmod(self._idle - GAP_AFTER, GAP_EVERY)
        if self._slow and turn >= 0 and polls == 0:
            await self._check_gap(turn)
            return False
        return await self._poll()
