"""How many requests of a reader follow one another: what a link with a long round trip makes it wait for."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from dcr_daemon.store.port import Store
from support.stores.wrapped import WrappedStore


class RoundTrips(WrappedStore):
    """Counts GETs in rounds: the GETs of a round are answered together, once no more of them come.

    Attributes:
        trips: the rounds so far.
        gets: how often each key was asked for.
    """

    PATIENCE = 0.03  #: seconds without another request after which those that wait are answered

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.trips = 0
        self.gets: Counter[str] = Counter()
        self._round: asyncio.Event | None = None
        self._came = 0

    async def get(self, key: str, *, limit: int, keep: Any = None) -> bytes:
        self.gets[key] += 1
        self._came += 1
        if self._round is None:
            self._round, self.trips = asyncio.Event(), self.trips + 1
            self._answering = asyncio.create_task(self._answer(self._round))
        await self._round.wait()
        return await super().get(key, limit=limit, keep=keep)

    async def _answer(self, one: asyncio.Event) -> None:
        came = 0
        while came != self._came:
            came = self._came
            await asyncio.sleep(self.PATIENCE)
        self._round = None
        one.set()

    def asked(self, part: str) -> int:
        """GETs of keys that contain `part`."""
        return sum(times for key, times in self.gets.items() if part in key)
