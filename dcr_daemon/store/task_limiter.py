"""Requests side by side: a bounded number of them, of a bounded number of bytes. The first failure ends all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, T]]


class TaskLimiter:
    """A context: when it is left all work has ended, or one has failed and the others are cancelled.

    Args:
        most: how many run at a time.
        room: bytes that all under way may have together; one alone may have more.
    """

    def __init__(self, most: int, room: int | None = None) -> None:
        self._most, self._room = most, room
        self._sizes: dict[asyncio.Task[Any], int] = {}
        self._moved = asyncio.Event()
        self._failure: BaseException | None = None

    async def start(self, work: Work[T], size: int = 0) -> asyncio.Task[T]:
        """Begin `work`, which takes `size` bytes, when there is room; in the order in which this is called.

        Raises:
            whatever work that was begun has raised.
        """
        while self._full(size) and not self._failure:
            await self._move()
        self._raise()
        task = asyncio.create_task(work())
        self._sizes[task] = size
        task.add_done_callback(self._ended)
        return task

    def _full(self, size: int) -> bool:
        running = len(self._sizes)
        crowded = self._room is not None and sum(self._sizes.values()) + size > self._room
        return running > 0 and (running >= self._most or crowded)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._sizes[task]
        if not task.cancelled() and (failure := task.exception()):
            self._failure = self._failure or failure
        self._moved.set()

    async def _move(self) -> None:
        self._moved.clear()
        await self._moved.wait()

    def _raise(self) -> None:
        if self._failure:
            raise self._failure

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        try:
            while error is None and self._sizes and not self._failure:
                await self._move()
        finally:
            left = list(self._sizes)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        if error is None:
            self._raise()


async def run_limited(works: Iterable[Work[T]], most: int) -> list[T]:
    """What all of them return, in order; raises what the first to fail raised."""
    async with TaskLimiter(most) as group:
        tasks = [await group.start(work) for work in works]
    return [task.result() for task in tasks]
