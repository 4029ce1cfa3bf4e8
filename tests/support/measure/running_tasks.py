"""How many asyncio tasks a stretch of code has at once: a million tensors must not become a million tasks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class RunningTasks:
    """Tasks that the stretch started: `most` at once, `started` in all."""

    most: int = 0
    started: int = 0


@contextlib.contextmanager
def running_tasks() -> Iterator[RunningTasks]:
    """Counts the tasks that the running event loop starts inside."""
    loop, count, running = asyncio.get_running_loop(), RunningTasks(), set[asyncio.Task[Any]]()

    def start(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, **options)
        running.add(task)
        task.add_done_callback(running.discard)
        count.started, count.most = count.started + 1, max(count.most, len(running))
        return task

    before = loop.get_task_factory()
    loop.set_task_factory(start)
    try:
        yield count
    finally:
        loop.set_task_factory(before)
