"""Chunks on their way to the bucket while the diff goes on: bounded in bytes and in requests.

`admit` makes the diff wait, visibly, when the bucket is slower than the trainer. The first failure ends the attempt:
it is raised by the next `admit` and by `finish`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from dcr_daemon import runtime
from dcr_daemon.events import ChunkPut, Emit, Waiting
from dcr_daemon.ledger.records import ChunkRef
from dcr_daemon.store.port import Store
from dcr_daemon.store.put_if_absent import put_if_absent
from dcr_daemon.store.retry import RetryPolicy
from dcr_daemon.task_limiter import TaskLimiter


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
        self._patience = patience
        self._queue = TaskLimiter(None, backlog)
        self._slots = asyncio.Semaphore(concurrency)

    async def admit(self, n: int, chunk: ChunkRef, body: Callable[[], Awaitable[bytes]]) -> None:
        """Queue chunk `n`; returns when the backlog has room for it. `body` fetches its bytes when its turn comes."""
        if self._queue.is_full(chunk.size):
            left = self._queue.bytes
            self._emit(Waiting(what=f"the bucket: {left} bytes of version {self._version} are not there yet"))
        await self._queue.start(partial(self._upload, n, chunk, body), chunk.size)

    async def _upload(self, n: int, chunk: ChunkRef, body: Callable[[], Awaitable[bytes]]) -> None:
        async with self._slots:
            self._queue.raise_failure()
            data, started = await body(), runtime.monotonic()
            runtime.failpoint("publish.chunk.begun")
            await put_if_absent(self.store, chunk.key, data, patience=RetryPolicy(self._patience))
        runtime.failpoint("publish.chunk.put")
        took = runtime.monotonic() - started
        self._emit(ChunkPut(version=self._version, attempt=self._attempt, n=n, bytes=chunk.size, seconds=took))

    async def finish(self) -> None:
        """Wait until every chunk is durable (must L4)."""
        await self._queue.finish()

    async def cancel(self) -> None:
        """Give up what is not there yet; returns when nothing is under way."""
        await self._queue.cancel()
