"""How many requests follow one another: what a link with a long round trip makes a process wait for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from dcr_daemon.store.port import Entry, Outcome, Store
from support.stores.wrapped import WrappedStore


class RoundTrips(WrappedStore):
    """Counts requests in rounds: the requests of a round are answered together, once no more of them come.

    Args:
        writes: whether a creation and a LIST are such a request; by default only a GET is.

    Attributes:
        trips: the rounds so far.
        rounds: the keys and prefixes of each.
        gets: how often each key was asked for.
    """

    PATIENCE = 0.03  #: seconds without another request after which those that wait are answered
    TURNS = 50  #: of the loop, after that

    def __init__(self, inner: Store, *, writes: bool = False) -> None:
        super().__init__(inner)
        self.trips, self._writes = 0, writes
        self.rounds: list[list[str]] = []
        self.gets: Counter[str] = Counter()
        self._round: asyncio.Event | None = None
        self._came = 0

    async def get(self, key: str, *, limit: int, keep: Any = None) -> bytes:
        self.gets[key] += 1
        await self._trip(key)
        return await super().get(key, limit=limit, keep=keep)

    async def create(self, key: str, body: bytes | memoryview) -> Outcome:
        if self._writes:
            await self._trip(key)
        return await super().create(key, body)

    async def list(self, prefix: str) -> AsyncIterator[Entry]:
        if self._writes:
            await self._trip(prefix)
        async for entry in super().list(prefix):
            yield entry

    async def _trip(self, key: str) -> None:
        self._came += 1
        if self._round is None:
            self._round, self.trips = asyncio.Event(), self.trips + 1
            self.rounds.append([])
            self._answering = asyncio.create_task(self._answer(self._round))
        self.rounds[-1].append(key)
        await self._round.wait()

    async def _answer(self, one: asyncio.Event) -> None:
        came = 0
        while came != self._came:
            came = self._came
            await asyncio.sleep(self.PATIENCE)
            for _ in range(self.TURNS):  # whoever was kept from asking by a slow neighbour on the loop
                await asyncio.sleep(0)
        self._round = None
        one.set()

    def asked(self, part: str) -> int:
        """GETs of keys that contain `part`."""
        return sum(times for key, times in self.gets.items() if part in key)
