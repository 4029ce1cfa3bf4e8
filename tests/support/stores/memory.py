"""A bucket in memory whose every answer can be lost, and a clock that nobody waits for.

`MemoryStore` passes the store contract. With a `Fault` queued, the next create misbehaves as a real bucket may.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from enum import Enum
from typing import Any

from dcr_daemon.errors import Corrupt, KeyNotFound, StoreUnavailable
from dcr_daemon.store.keys import check_key, check_prefix
from dcr_daemon.store.port import Entry, Outcome


class Fault(Enum):
    REQUEST_LOST = "the PUT never arrives"
    ANSWER_LOST = "the PUT takes effect, its answer does not come back"
    GHOST = "the PUT arrives later, when `land_ghosts` is called"
    DOWN = "one request is refused"


class MemoryStore:
    """A store in a dict. `requests` counts what was asked of it."""

    def __init__(self, url: str = "memory://bucket/stream") -> None:
        self.url = url
        self.objects: dict[str, bytes] = {}
        self.faults: deque[Fault] = deque()
        self.ghosts: list[tuple[str, bytes]] = []
        self.requests: Counter[str] = Counter()
        self.before: Callable[[str, str], Coroutine[Any, Any, None]] | None = None

    async def get(self, key: str, *, limit: int, keep: Any = None) -> bytes:
        await self._enter("get", key)
        if key not in self.objects:
            raise KeyNotFound(key)
        body = self.objects[key]
        if len(body) > limit:
            raise Corrupt(f"{self.url}/{key} has {len(body)} bytes; the limit is {limit}")
        return body

    async def create(self, key: str, body: bytes | memoryview) -> Outcome:
        await self._enter("create", key)
        fault = self.faults.popleft() if self.faults else None
        if fault in (Fault.REQUEST_LOST, Fault.GHOST):
            if fault is Fault.GHOST:
                self.ghosts.append((key, bytes(body)))
            return Outcome.UNKNOWN
        outcome = self._put(key, bytes(body))
        return Outcome.UNKNOWN if fault is Fault.ANSWER_LOST else outcome

    async def overwrite(self, key: str, body: bytes) -> None:
        await self._enter("overwrite", key)
        self.objects[key] = bytes(body)

    async def list(self, prefix: str) -> AsyncIterator[Entry]:
        check_prefix(prefix)
        self.requests["list"] += 1
        for key in sorted(self.objects):
            if key.startswith(prefix):
                yield Entry(key, len(self.objects[key]))

    async def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            await self._enter("delete", key)
            self.objects.pop(key, None)

    async def close(self) -> None:
        pass

    def land_ghosts(self) -> None:
        """Every delayed PUT arrives now; one that finds its slot occupied changes nothing."""
        for key, body in self.ghosts:
            self._put(key, body)
        self.ghosts.clear()

    def _put(self, key: str, body: bytes) -> Outcome:
        if key in self.objects:
            return Outcome.LOST
        self.objects[key] = body
        return Outcome.WON

    async def _enter(self, operation: str, key: str) -> None:
        check_key(key)
        self.requests[operation] += 1
        if self.before:
            await self.before(operation, key)
        if self.faults and self.faults[0] is Fault.DOWN:
            self.faults.popleft()
            if operation != "create":
                raise StoreUnavailable(f"{self.url} did not answer")
