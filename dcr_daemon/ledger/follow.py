"""Waits for the next record by reading the next slot; a clock only decides when to read it again."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from dcr_daemon import runtime
from dcr_daemon.errors import StoreUnavailable
from dcr_daemon.events import Emit, Retrying
from dcr_daemon.ledger.records import AnyRecord

GAP_AFTER = 30  #: polls in a row without a record after which it is looked for a missing one
GAP_EVERY = 6  #: polls of which one then looks further ahead, instead of at the next slot: a poll stays one request


@dataclass(frozen=True, slots=True)
class Polling:
    """Seconds between polls: `first` after something was found, then longer with each that finds nothing; jittered.

    Each pause is longer than the one before by `growth`, so it is about `growth` times what was waited so far: whatever
    comes is noticed late by that share of the wait, by `longest` seconds at most.
    """

    first: float = 1.0
    longest: float = 30.0
    growth: float = 0.02

    def pause(self, looks: int) -> float:
        """Seconds to sleep after `looks` polls in a row that found nothing."""
        steps = min(looks - 1, 1000)  # no pause is above `longest` for longer, and no power overflows
        delay: float = max(self.first, min(self.first * (1 + self.growth) ** steps, self.longest))
        return delay * (0.75 + runtime.jitter() / 2)


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
        emit: Emit,
        url: str,
    ) -> None:
        self._poll = poll
        self._check_gap = check_gap
        self._polling = polling
        self._emit = emit
        self._url = url
        self._given: deque[AnyRecord] = deque()
        self._idle = 0  # polls in a row that found nothing

    def give(self, record: AnyRecord) -> None:
        """Called by the ledger for every record that counts, whoever caused it to be read."""
        self._given.append(record)

    def taken(self) -> list[AnyRecord]:
        """The records that were read and not given yet; does not wait."""
        fresh = list(self._given)
        self._given.clear()
        return fresh

    def __aiter__(self) -> Follower:
        return self

    async def __anext__(self) -> AnyRecord:
        while not self._given:
            if await self._look():
                self._idle = 0
                continue
            self._idle += 1
            await runtime.sleep(self._polling.pause(self._idle))
        self._idle = 0
        return self._given.popleft()

    async def _look(self) -> bool:
        try:
            turn, polls = divmod(self._idle - GAP_AFTER, GAP_EVERY)
            if turn >= 0 and polls == 0:
                await self._check_gap(turn)
                return False
            return await self._poll()
        except StoreUnavailable as error:
            self._emit(Retrying(what=f"the store of {self._url}: {error.message}"))
            return False
