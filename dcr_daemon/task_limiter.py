"""Tasks side by side: a bounded number of them, of a bounded number of bytes. The first failure ends all.

Used wherever many objects are read or written at once. It differs from `asyncio.TaskGroup` in its bounds, and in that
the first failure is raised as it is, not in an exception group. `run_in_order` is for results that are used one after
the other, while those of the next works are on their way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, T]]


class TaskLimiter:
    """Starts tasks within bounds.

    As a context manager: when it is left, all tasks have ended, or one has failed and the others are cancelled (with
    `settles`: they have ended too). A class that keeps one for longer calls `finish` or `cancel` instead.

    Args:
        limit: how many tasks run at a time; None for any number.
        budget_bytes: bytes that the running tasks may have together; a single task may have more.
        settles: a failure lets the tasks that run come to their end, and only keeps others from starting. For
            downloads: what is half there is not thrown away because a neighbour failed.
    """

    def __init__(self, limit: int | None, budget_bytes: int | None = None, *, settles: bool = False) -> None:
        self._limit, self._budget_bytes, self._settles = limit, budget_bytes, settles
        self._sizes: dict[asyncio.Task[Any], int] = {}
        self._one_ended = asyncio.Event()
        self._failure: BaseException | None = None

    @property
    def bytes(self) -> int:
        """Bytes that the running tasks have together."""
        return sum(self._sizes.values())

    def is_full(self, size: int = 0) -> bool:
        """Whether a task of `size` bytes would have to wait."""
        running = len(self._sizes)
        over_limit = self._limit is not None and running >= self._limit
        over_budget = self._budget_bytes is not None and self.bytes + size > self._budget_bytes
        return running > 0 and (over_limit or over_budget)

    async def start(self, work: Work[T], size: int = 0) -> asyncio.Task[T]:
        """Start `work`, which takes `size` bytes, as soon as the bounds allow it; in the order of the calls.

        Raises:
            What a task has raised.
        """
        while self.is_full(size) and not self._failure:
            await self._wait_one()
        self.raise_failure()
        task = asyncio.create_task(work())
        self._sizes[task] = size
        task.add_done_callback(self._ended)
        return task

    def raise_failure(self) -> None:
        """Raise what the first task to fail has raised, if one has failed."""
        if self._failure:
            raise self._failure

    async def finish(self) -> None:
        """Wait until all tasks have ended, or one has failed. Raises what it raised; the others still run then."""
        while self._sizes and not self._failure:
            await self._wait_one()
        self.raise_failure()

    async def settle(self) -> None:
        """Wait until all tasks have ended, whatever becomes of them."""
        while self._sizes:
            await self._wait_one()

    async def cancel(self) -> None:
        """Cancel the tasks that run; returns when all have ended."""
        running = list(self._sizes)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._sizes[task]
        if not task.cancelled() and (failure := task.exception()):
            self._failure = self._failure or failure
        self._one_ended.set()

    async def _wait_one(self) -> None:
        self._one_ended.clear()
        await self._one_ended.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        try:
            while error is None and self._sizes and not self._failure:
                await self._wait_one()
            if self._settles and isinstance(error or self._failure, Exception):
                await self.settle()
        finally:
            await self.cancel()
        if error is None:
            self.raise_failure()


async def run_limited(works: Iterable[Work[T]], limit: int, *, settles: bool = False) -> list[T]:
    """Run at most `limit` at a time; returns what all return, in order. Raises what the first to fail has raised."""
    async with TaskLimiter(limit, settles=settles) as group:
        tasks = [await group.start(work) for work in works]
    return [task.result() for task in tasks]


async def run_in_order(works: Iterable[Work[T]] | AsyncGenerator[Work[T]], limit: int) -> AsyncGenerator[T]:
    """What `works` return, in their order; at most `limit` of them run, or have ended and wait for their turn.

    A failure, of a work or of `works` itself, is raised when it is its turn: all that comes before it has been given
    out by then. Leave it by `contextlib.aclosing`, which cancels the works that run.
    """
    running: deque[asyncio.Task[T]] = deque()
    failure: Exception | None = None
    try:
        async with aclosing(_each(works)) as each:
            while True:
                try:
                    work = await anext(each, None)
                except Exception as error:  # noqa: BLE001 (raised below, after what comes before it)
                    failure = error
                    break
                if work is None:
                    break
                if len(running) == limit:
                    yield await running[0]
                    running.popleft()
                running.append(asyncio.create_task(work()))
        while running:
            yield await running[0]
            running.popleft()
        if failure:
            raise failure
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _each(works: Iterable[Work[T]] | AsyncGenerator[Work[T]]) -> AsyncGenerator[Work[T]]:
    if isinstance(works, AsyncGenerator):
        async with aclosing(works):
            async for work in works:
                yield work
    else:
        for work in works:
            yield work
