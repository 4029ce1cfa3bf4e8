"""Work that goes on beside a test, and would for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any


@asynccontextmanager
async def going_on(work: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """`work` runs inside, must not have ended by itself, and is cancelled at the end."""
    task = asyncio.create_task(work)
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
