"""The retry loop, on a clock that only moves when it sleeps."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest

from dcr_daemon.errors import StoreUnavailable
from dcr_daemon.events import Retrying
from dcr_daemon.store.retry import PROGRESS_BYTES, RetryPolicy, Transient, retry

PATIENCE = RetryPolicy(seconds=10.0, first=0.4, longest=2.0)


async def fail(_: float) -> None:
    raise Transient("503 SlowDown")


async def test_the_budget_bounds_pauses_and_the_error_tells_the_story(clock) -> None:
    with pytest.raises(StoreUnavailable, match=r"get x: 503 SlowDown \(tried \d+ times, 10 s"):
        await retry(fail, what="get x", patience=PATIENCE, gate=nullcontext())
    assert sum(clock.slept) <= 10.0
    assert clock.slept[:4] == pytest.approx([0.3, 0.6, 1.2, 1.5])
    assert max(clock.slept) == pytest.approx(1.5)


async def test_an_outage_is_said_early_and_once(clock) -> None:
    events = []
    with pytest.raises(StoreUnavailable):
        await retry(fail, what="get x", patience=PATIENCE, gate=nullcontext(), emit=events.append)
    assert events == [Retrying(what="get x: 503 SlowDown")]


async def test_a_store_that_swallows_requests_is_told_of_after_the_first(clock) -> None:
    events: list[Retrying] = []
    heard: list[int] = []

    async def swallowed(seconds: float) -> None:
        heard.append(len(events))
        clock.time += 20.0
        raise Transient("read timeout")

    with pytest.raises(StoreUnavailable):
        await retry(swallowed, what="get x", patience=RetryPolicy(60), gate=nullcontext(), emit=events.append)
    assert heard == [0, 1, 1]


async def test_time_spent_trying_counts(clock) -> None:
    given: list[float] = []

    async def slow(seconds: float) -> None:
        given.append(seconds)
        clock.time += 4.0
        raise Transient("no answer")

    with pytest.raises(StoreUnavailable):
        await retry(slow, what="get x", patience=PATIENCE, gate=nullcontext())
    assert given == pytest.approx([10.0, 5.7, 1.1])


async def test_progress_renews_the_patience(clock) -> None:
    arrived, tries = 0, 0

    async def some(_: float) -> str:
        nonlocal arrived, tries
        tries += 1
        if tries == 100:
            return "all"
        arrived += PROGRESS_BYTES
        raise Transient("cut")

    assert await retry(some, what="get", patience=PATIENCE, gate=nullcontext(), progress=lambda: arrived) == "all"
    assert sum(clock.slept) > 10 * PATIENCE.seconds / 4


async def test_a_trickle_is_not_progress(clock) -> None:
    arrived = 0

    async def drop(_: float) -> None:
        nonlocal arrived
        arrived += 1
        raise Transient("cut")

    with pytest.raises(StoreUnavailable):
        await retry(drop, what="get", patience=PATIENCE, gate=nullcontext(), progress=lambda: arrived)


async def test_waiting_for_a_place_costs_no_patience_and_a_pause_holds_none(clock) -> None:
    gate = asyncio.Semaphore(1)
    free_during_pause: list[bool] = []
    sleep = clock.sleep

    async def look(seconds: float) -> None:
        free_during_pause.append(not gate.locked())
        await sleep(seconds)

    clock.sleep = look
    await gate.acquire()
    task = asyncio.create_task(retry(fail, what="get", patience=PATIENCE, gate=gate))
    await asyncio.sleep(0)
    clock.time += 1000.0
    gate.release()
    with pytest.raises(StoreUnavailable, match=r"tried ([5-9]|\d\d) times"):
        await task
    assert all(free_during_pause)


async def test_only_transient_faults_are_tried_again(clock) -> None:
    async def broken(_: float) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await retry(broken, what="get", patience=PATIENCE, gate=nullcontext())
    assert clock.slept == []


def test_throttling_begins_higher() -> None:
    assert PATIENCE.pause(1, throttled=True) > PATIENCE.pause(1, throttled=False)
    assert PATIENCE.pause(10_000, throttled=True) <= PATIENCE.longest


async def test_the_moment_that_was_left_does_not_hide_what_the_store_said(clock) -> None:
    given: list[float] = []

    async def deny(seconds: float) -> None:
        given.append(seconds)
        if seconds < 0.25:
            raise Transient("no answer within 0.0 s")
        clock.time += seconds - 0.45 if len(given) == 2 else 0.0
        raise Transient("the key is not known")

    with pytest.raises(StoreUnavailable, match="the key is not known"):
        await retry(deny, what="get x", patience=RetryPolicy(10.0, first=0.4, longest=0.4), gate=nullcontext())
    assert given[-1] < 0.25


async def test_the_window_doubles_while_tries_stall_and_a_try_that_moves_ends_that(clock) -> None:
    given: list[float] = []

    async def stall(seconds: float) -> None:
        given.append(seconds)
        clock.time += seconds
        raise Transient("no answer", stalled=len(given) != 3)

    arrived = iter(range(0, 1000 * PROGRESS_BYTES, PROGRESS_BYTES))
    with pytest.raises(RuntimeError, match="enough"):
        await retry(
            stall,
            what="get",
            patience=RetryPolicy(60.0, first=0.1, longest=0.1),
            gate=nullcontext(),
            progress=lambda: next(arrived) if len(given) < 6 else enough(),
        )
    assert given == pytest.approx([10.0, 20.0, 40.0, 10.0, 20.0, 40.0])


def enough() -> int:
    raise RuntimeError("enough")


async def test_what_may_move_for_longer_than_the_patience_is_tried_again(clock) -> None:
    tries = 0

    async def long(_: float) -> None:
        nonlocal tries
        tries += 1
        clock.time += 1000.0
        raise Transient("broke off near its end")

    with pytest.raises(StoreUnavailable, match="tried 3 times"):
        await retry(long, what="put", patience=PATIENCE, gate=nullcontext(), fewest=3)
    assert tries == 3
