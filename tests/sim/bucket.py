"""A bucket, and the road to it: requests and answers travel, and either may be lost, late or (for data) damaged.

`SimStore` is one process's client. Its patience is the real `store.retry`; a create is tried once, as the port says.
What has left a process is on its way, whatever becomes of the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import nullcontext
from enum import Enum
from typing import TYPE_CHECKING, Any

from dcr_daemon.errors import Corrupt, KeyNotFound
from dcr_daemon.events import Emit, discard
from dcr_daemon.store.instrumented import instrumented
from dcr_daemon.store.keys import check_key, check_prefix
from dcr_daemon.store.port import Entry, Outcome
from dcr_daemon.store.retry import RetryPolicy, Transient, retry

if TYPE_CHECKING:
    from sim.clock import Process
    from sim.world import World

TIMEOUT = 5.0  #: seconds a client waits for one answer
PATIENCE = 20.0  #: seconds a client goes on asking


class Fault(Enum):
    REQUEST_LOST = "request lost"
    ANSWER_LOST = "answer lost"
    GHOST = "arrives late"
    REFUSED = "refused"
    SLOW = "slow"
    DAMAGED = "answer damaged"


class Bucket:
    """The objects. Whoever wants to know what happens here is told at the instant it happens."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.objects: dict[str, bytes] = {}
        self.born: dict[str, float] = {}
        self.created: Callable[[str, bytes, Process], None] = lambda key, body, by: None
        self.deleted: Callable[[str, Process], None] = lambda key, by: None

    def act(self, operation: str, key: str, body: bytes, by: Process) -> Any:
        """One request arrives and takes effect."""
        match operation:
            case "get":
                return self.objects.get(key)
            case "create":
                if key in self.objects:
                    return Outcome.LOST
                self._put(key, body)
                self.created(key, body, by)
                return Outcome.WON
            case "overwrite":
                self._put(key, body)
            case "delete":
                if self.objects.pop(key, None) is not None:
                    self.deleted(key, by)
            case "list":
                return [Entry(name, len(self.objects[name])) for name in sorted(self.objects) if name.startswith(key)]
        return None

    def _put(self, key: str, body: bytes) -> None:
        self.objects[key] = body
        self.born[key] = self.world.loop.time()


class SimStore:
    """The store port, for one process. `lag` is how late, at most, it sees an object (a replicated bucket)."""

    def __init__(self, world: World, process: Process, *, emit: Emit = discard, lag: float = 0.0) -> None:
        self.url = "sim://bucket/stream"
        self._world, self._process, self._emit, self._lag = world, process, emit, lag

    async def get(self, key: str, *, limit: int, keep: Any = None) -> bytes:
        body = await self._persist("get", check_key(key))
        if body is None or self._not_here_yet(key):
            raise KeyNotFound(key)
        if len(body) > limit:
            raise Corrupt(f"{self.url}/{key} has {len(body)} bytes; the limit is {limit}")
        return body

    async def create(self, key: str, body: bytes | memoryview) -> Outcome:
        check_key(key)
        with instrumented(self._emit, "create") as request:
            try:
                outcome: Outcome = await self.send("create", key, bytes(body))
            except Transient:
                outcome = Outcome.UNKNOWN
            request.outcome = outcome.value
            return outcome

    async def overwrite(self, key: str, body: bytes) -> None:
        await self._persist("overwrite", check_key(key), body)

    async def list(self, prefix: str) -> AsyncIterator[Entry]:
        entries = await self._persist("list", check_prefix(prefix))
        for entry in self._world.stale_list(self._process, entries):
            if not self._not_here_yet(entry.key):
                yield entry

    async def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            await self._persist("delete", check_key(key))

    async def close(self) -> None:
        pass

    def _not_here_yet(self, key: str) -> bool:
        if not self._lag or not key.startswith(("data/", "anchors/")):
            return False
        born = self._world.bucket.born.get(key, 0.0)
        return self._world.loop.time() < born + self._lag * (hash_of(key) % 16) / 16

    async def _persist(self, operation: str, key: str, body: bytes = b"") -> Any:
        with instrumented(self._emit, operation):
            return await retry(
                lambda left: self.send(operation, key, body, min(left, TIMEOUT)),
                what=f"{operation} {key}",
                patience=RetryPolicy(PATIENCE),
                gate=nullcontext(),
                emit=self._emit,
            )

    async def send(self, operation: str, key: str, body: bytes = b"", seconds: float = TIMEOUT) -> Any:
        """One request and its answer. Raises `Transient`."""
        world = self._world
        fault = world.store_fault(self._process, operation, key)
        answer: asyncio.Future[Any] = world.loop.create_future()
        delay = world.latency() * (40 if fault is Fault.SLOW else 1)
        if fault is Fault.GHOST:
            delay += world.rng.uniform(TIMEOUT, 4 * TIMEOUT)
        if fault is Fault.REFUSED:
            await asyncio.sleep(delay)
            raise Transient("503", throttled=True)
        if fault is not Fault.REQUEST_LOST:
            world.loop.world_later(delay, self._arrive, operation, key, body, fault, answer)
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            raise Transient("no answer") from None

    def _arrive(self, operation: str, key: str, body: bytes, fault: Fault | None, answer: asyncio.Future[Any]) -> None:
        """At the bucket. A process that died meanwhile may have got this request out, or not."""
        world = self._world
        if world.ended or (self._process.dead and world.rng.random() < 0.5):
            return
        result = world.bucket.act(operation, key, body, self._process)
        world.note(f"{operation} {key} {getattr(result, 'value', type(result).__name__)}", self._process)
        if fault is Fault.DAMAGED and isinstance(result, bytes):
            result = damaged(result, world.rng.random())
        if fault not in (Fault.ANSWER_LOST, Fault.GHOST):
            world.loop.world_later(world.latency(), _deliver, answer, result)


def _deliver(answer: asyncio.Future[Any], result: Any) -> None:
    if not answer.done():
        answer.set_result(result)


def damaged(body: bytes, where: float) -> bytes:
    """One bit flipped, or the end cut off."""
    if not body or where < 0.25:
        return body[: len(body) // 2]
    at = int(len(body) * where)
    return body[:at] + bytes([body[at] ^ 4]) + body[at + 1 :]


def hash_of(text: str) -> int:
    """The same in every process, unlike `hash`."""
    value = 5381
    for byte in text.encode():
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value >> 4
