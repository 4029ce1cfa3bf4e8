"""A store that counts what is asked of it, and how much of that at once: costs are requests, never times."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from dcr_daemon.store.partial import PartialFile
from dcr_daemon.store.port import Store
from support.stores.wrapped import WrappedStore


class CountedStore(WrappedStore):
    """Counts GETs. Each lasts about 0.1 s, so that requests which may overlap do.

    Attributes:
        gets: how often each key was asked for.
        most: GETs under way at once, of keys for which `of` is true.
    """

    def __init__(self, inner: Store, of: Callable[[str], bool] = lambda key: True) -> None:
        super().__init__(inner)
        self.gets: Counter[str] = Counter()
        self.most = 0
        self._of, self._running = of, 0

    async def get(self, key: str, *, limit: int, keep: PartialFile | None = None) -> bytes:
        self.gets[key] += 1
        counted = self._of(key)
        self._running += counted
        self.most = max(self.most, self._running)
        try:
            for _ in range(100):
                await asyncio.sleep(0.001)  # others may come from threads
            return await super().get(key, limit=limit, keep=keep)
        finally:
            self._running -= counted

    def count(self, prefix: str = "") -> int:
        """GETs of keys below `prefix`."""
        return sum(times for key, times in self.gets.items() if key.startswith(prefix))
