"""A `Runtime` in which no real time passes: a sleep moves its clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path


class VirtualTimeRuntime:
    """A sleep moves the clock and returns at once. Nonces are counted, so that a run can be repeated."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.slept: list[float] = []
        self.passed: list[str] = []
        self.on_sleep: Callable[[float], None] | None = None
        self._nonce = 0

    def monotonic(self) -> float:
        return self.clock

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.clock)

    async def sleep(self, seconds: float) -> None:
        self.clock += seconds
        self.slept.append(seconds)
        if self.on_sleep:
            self.on_sleep(seconds)
        await asyncio.sleep(0)

    def nonce(self, size: int) -> str:
        self._nonce += 1
        return f"{self._nonce:0{2 * size}x}"

    def jitter(self) -> float:
        return 0.5

    def failpoint(self, name: str) -> None:
        self.passed.append(name)

    def synced(self, path: Path) -> None:
        pass

    def executor(self, count: int) -> Executor:
        return ThreadPoolExecutor(count)
