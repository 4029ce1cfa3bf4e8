"""Chunks on their way to the bucket while the diff goes on: bounded in bytes and in requests.

`admit` makes the diff wait, visibly, when the bucket is slower than the trainer. The first failure ends the attempt:
it is raised by the next `admit` and by `finish`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from dcr_daemon import runtime
from dcr_daemon.events import ChunkPut, Emit, Waiting
from dcr_daemon.ledger.records import ChunkRef
from dcr_daemon.store.port import Store
from dcr_daemon.store.put_if_absent import put_if_absent
from dcr_daemon.store.retry import RetryPolicy


class Uploads:
    """The uploads of one attempt.

    Args:
        backlog: bytes not yet in the bucket at which a diff waits.
        concurrency: PUTs at a time.
        patience: seconds without an answer before the attempt is given up.
    """

    def __init__(
        self,
        store: Store,
        *,
        version: int,
        attempt: int,
        backlog: int,
        concurrency: int,
        patience: float,
        emit: Emit,
    ) -> None:
        self.store, self._emit = store, emit
        self._version, self._attempt = version, attempt
        self._backlog, self._patience = backlog, patience
        self._slots = asyncio.Semaphore(concurrency)
        self._moved = asyncio.Event()
        self._bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._done: dict[int, ChunkRef] = {}

    async def admit(self, n: int, chunk: ChunkRef, body: Callable[[], Awaitable[bytes]]) -> None:
        """Queue chunk `n`; returns when the backlog has room for it. `body` fetches its bytes when its turn comes."""
        if self._full(chunk.size):
            self._emit(Waiting(what=f"the bucket: {self._bytes} bytes of version {self._version} are not there yet"))
        while self._full(chunk.size) and not self._failure:
            self._moved.clear()
            await self._moved.wait()
        self._raise()
        self._bytes += chunk.size
        task = asyncio.create_task(self._upload(n, chunk, body))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._ended(task, chunk.size))

    def _full(self, size: int) -> bool:
        return self._bytes > 0 and self._bytes + size > self._backlog

    async def _upload(self, n: int, chunk: ChunkRef, body: Callable[[], Awaitable[bytes]]) -> None:
        async with self._slots:
            self._raise()
            data, started = await body(), runtime.monotonic()
            runtime.failpoint("publish.chunk.begun")
            await put_if_absent(self.store, chunk.key, data, patience=RetryPolicy(self._patience))
        runtime.failpoint("publish.chunk.put")
        self._done[n] = chunk
        took = runtime.monotonic() - started
        self._emit(ChunkPut(version=self._version, attempt=self._attempt, n=n, bytes=chunk.size, seconds=took))

    def _ended(self, task: asyncio.Task[None], size: int) -> None:
        self._tasks.discard(task)
        self._bytes -= size
        if not task.cancelled() and (failure := task.exception()):
            self._failure = self._failure or failure
        self._moved.set()

    def _raise(self) -> None:
        if self._failure:
            raise self._failure

    async def finish(self) -> list[ChunkRef]:
        """Wait until every chunk is durable; their references by number (must L4)."""
        while self._tasks and not self._failure:
            self._moved.clear()
            await self._moved.wait()
        self._raise()
        return [self._done[n] for n in sorted(self._done)]

    async def cancel(self) -> None:
        """Give up what is not there yet; returns when nothing is under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
