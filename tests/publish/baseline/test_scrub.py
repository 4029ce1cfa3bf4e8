"""The scrub's pace: a large baseline by its rate, a small one seldom enough to cost nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.virtual_time import VirtualTimeRuntime

from dcr_daemon import runtime
from dcr_daemon.publish.baseline.scrub import ROUND, Scrub


class Blocks:
    """A baseline of `count` sound blocks; its own share as well."""

    version = 3

    def __init__(self, count: int, size: int) -> None:
        self._count, self._size = count, size
        self.blocks = self
        self.read: list[int] = []

    def __len__(self) -> int:
        return self._count

    def nbytes(self, number: int) -> int:
        return self._size

    async def intact(self, number: int) -> bool:
        self.read.append(number)
        return True


@pytest.fixture
def still() -> Iterator[VirtualTimeRuntime]:
    clock = VirtualTimeRuntime()
    runtime.install(clock)
    yield clock
    runtime.install(runtime.SystemRuntime())


async def go_on(scrub: Scrub, blocks: int) -> None:
    for _ in range(blocks):
        await runtime.sleep(max(0.0, scrub.due - runtime.monotonic()))
        assert await scrub.step() == ""


def test_a_small_baseline_is_not_read_over_and_over(still: VirtualTimeRuntime) -> None:
    baseline = Blocks(4, 100)
    asyncio.run(go_on(Scrub(baseline, 1e9), 40))
    assert still.clock >= 9 * ROUND
    assert baseline.read == [0, 1, 2, 3] * 10


def test_a_large_one_is_read_at_its_rate(still: VirtualTimeRuntime) -> None:
    asyncio.run(go_on(Scrub(Blocks(50, 1000), 1000.0), 101))
    assert still.clock == pytest.approx(100.0)
