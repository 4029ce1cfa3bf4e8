"""Work side by side keeps within its bounds, and nothing of it outlives the first failure."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from dcr_daemon.errors import Corrupt
from dcr_daemon.task_limiter import TaskLimiter, run_limited


class Work:
    def __init__(self) -> None:
        self.running = self.most = self.bytes = self.most_bytes = 0
        self.ended: list[int] = []
        self.cancelled = 0

    async def run(self, n: int, size: int = 0) -> int:
        self.running, self.bytes = self.running + 1, self.bytes + size
        self.most, self.most_bytes = max(self.most, self.running), max(self.most_bytes, self.bytes)
        try:
            await asyncio.sleep(60 if n > 10_000 else 0.001 * (n % 3))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running, self.bytes = self.running - 1, self.bytes - size
        self.ended.append(n)
        return n

    async def fail(self) -> int:
        raise Corrupt("spoilt")


def test_results_come_in_order_and_no_more_run_than_may() -> None:
    work = Work()
    assert asyncio.run(run_limited((partial(work.run, n) for n in range(50)), 4)) == list(range(50))
    assert work.most == 4


def test_bytes_are_bounded_but_for_one_that_is_alone() -> None:
    work = Work()

    async def run() -> None:
        async with TaskLimiter(10, budget_bytes=100) as group:
            for n in range(30):
                await group.start(partial(work.run, n, 40), 40)
            await group.start(partial(work.run, 30, 1000), 1000)

    asyncio.run(run())
    assert len(work.ended) == 31
    assert work.most == 2
    assert work.most_bytes == 1000


def test_the_first_failure_is_raised_and_ends_the_rest() -> None:
    work = Work()

    async def run() -> None:
        async with TaskLimiter(4) as group:
            await group.start(partial(work.run, 2))
            await group.start(work.fail)
            for n in range(1, 50):
                await group.start(partial(work.run, n))

    with pytest.raises(Corrupt, match="spoilt"):
        asyncio.run(run())
    assert work.running == 0
    assert len(work.ended) < 10


def test_one_failure_does_not_throw_away_its_neighbours_where_they_settle() -> None:
    work = Work()

    async def run() -> None:
        works = [partial(work.run, 1), work.fail, partial(work.run, 2), partial(work.run, 3), partial(work.run, 4)]
        await run_limited(works, 4, settles=True)

    with pytest.raises(Corrupt, match="spoilt"):
        asyncio.run(run())
    assert work.running == 0
    assert {1, 2, 3} <= set(work.ended)


def test_whoever_is_cancelled_leaves_nothing_behind() -> None:
    work = Work()

    async def run() -> None:
        task = asyncio.ensure_future(run_limited((partial(work.run, 10_001 + n) for n in range(5)), 3))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
    assert work.running == 0


def test_an_error_in_the_block_is_the_one_that_is_raised() -> None:
    async def run() -> None:
        async with TaskLimiter(3) as group:
            await group.start(partial(Work().run, 1))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(run())
