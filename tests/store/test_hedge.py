"""A silent small download is sent again on another connection; how soon is learned, and how often is bounded."""

from __future__ import annotations

import asyncio
import os

import pytest

from dcr_daemon.errors import KeyNotFound
from dcr_daemon.events import StoreRequest
from dcr_daemon.store.retry import RetryPolicy, Transient
from dcr_daemon.store.s3 import hedge
from dcr_daemon.store.s3.hedge import LEAST, MOST, SAVED, SHARE, Answer, Hedge

#: a stalled try is never replaced within a test: whoever is answered, is answered by a second request
PATIENT = RetryPolicy(seconds=3600.0, stall=3600.0)


@pytest.fixture(autouse=True)
def short_silences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hedge, "FIRST", 0.05)
    monkeypatch.setattr(hedge, "LEAST", 0.05)


# Against a bucket.


@pytest.mark.parametrize("fault", ["stall", "trickle", "hang:300"])
async def test_a_stalled_small_object_is_asked_for_on_another_connection(fake_s3, fault: str) -> None:
    whole, told = os.urandom(1000), list[StoreRequest]()
    async with fake_s3(objects={"run/a": whole}, patience=PATIENT, emit=told.append) as (server, store):
        server.faults.append(fault)
        assert await store.get("a", limit=1000) == whole
        assert len(server.seen) == server.connections == 2
    assert sorted(event.outcome for event in told if isinstance(event, StoreRequest)) == ["cancelled", "ok"]


async def test_every_tenth_answer_stalls_and_each_object_arrives(fake_s3) -> None:
    async with fake_s3(objects={"run/a": b"a" * 1000}, patience=PATIENT) as (server, store):
        for _ in range(10):
            server.faults.extend(["ok"] * 9 + ["stall"])
            for _ in range(10):
                assert len(await store.get("a", limit=1000)) == 1000
            server.faults.clear()


async def test_an_object_that_arrives_slowly_is_asked_for_once(fake_s3) -> None:
    async with fake_s3(objects={"run/a": b"a" * 3000}, patience=PATIENT, always="drip:0") as (server, store):
        server.drip = (100, 0.01)
        assert len(await store.get("a", limit=3000)) == 3000
        assert len(server.seen) == 1


async def test_a_list_that_stalls_is_asked_for_again_and_one_that_is_slow_is_then_waited_for(fake_s3) -> None:
    patience = RetryPolicy(seconds=600.0, first=0.001, longest=0.002, stall=1.0)
    async with fake_s3(objects={"run/a": b"a"}, patience=patience) as (server, store):
        server.faults.append("stall")
        assert [entry.key async for entry in store.list("")] == ["a"]
        assert len(server.seen) == 2
        server.pause = 1.5  # longer than the first window, shorter than the second
        assert [entry.key async for entry in store.list("")] == ["a"]
        assert len(server.seen) - 2 <= 1 + MOST, "alone, once it has stalled"


async def test_a_large_object_and_an_upload_are_sent_once(fake_s3) -> None:
    async with fake_s3(objects={"run/a": b"a"}, patience=PATIENT) as (server, store):
        server.pause = 0.5
        assert await store.get("a", limit=8 << 20) == b"a"
        await store.create("b", b"b")
        assert [request.method for request in server.seen] == ["GET", "PUT"]


async def test_what_has_arrived_is_not_fetched_again(fake_s3) -> None:
    """By the next try, after every request of the one before it has ended."""
    whole = os.urandom(60_000)
    patience = RetryPolicy(seconds=60.0, first=0.001, longest=0.002, stall=0.3)
    async with fake_s3(objects={"run/a": whole}, patience=patience, always="hang:20000") as (server, store):
        assert await store.get("a", limit=60_000) == whole
        begins = {request.headers.get("range", "bytes=0-") for request in server.seen}
        assert begins == {"bytes=0-", "bytes=20000-", "bytes=40000-"}


# The rule alone.


async def never(answer: Answer) -> bytes:
    await asyncio.Event().wait()
    return b""


async def test_no_more_than_a_few_requests_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    started = 0

    async def send(answer: Answer) -> bytes:
        nonlocal started
        started += 1
        return await never(answer)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await Hedge().race(send)
    assert started == MOST


async def test_second_requests_are_a_share_of_all_however_slow_the_store_is() -> None:
    rule, sent = Hedge(), 0
    rule._learn = lambda waited: None  # type: ignore[method-assign]  # it never becomes wiser

    async def slow(answer: Answer) -> bytes:
        nonlocal sent
        sent += 1
        await asyncio.sleep(0.3)
        return b""

    for _ in range(20):
        await rule.race(slow)
    assert 20 < sent <= 20 + SAVED + SHARE * 20


def test_slow_answers_make_the_next_ones_wait_longer() -> None:
    rule = Hedge()
    for _ in range(50):
        rule._learn(0.001)
    assert rule.silence == hedge.LEAST < LEAST
    for _ in range(10):
        rule._learn(5.0)
    assert rule.silence > 5.0
    for _ in range(100):
        rule._learn(0.001)
    assert rule.silence < 1.0


async def test_the_first_failure_is_raised_when_all_have_failed_and_an_answer_at_once() -> None:
    errors = iter([Transient("first"), Transient("second"), Transient("third")])

    async def fails(answer: Answer) -> bytes:
        error = next(errors)
        await asyncio.sleep(0.2)
        raise error

    with pytest.raises(Transient, match="first"):
        await Hedge().race(fails)

    async def missing(answer: Answer) -> bytes:
        raise KeyNotFound("it is not there")

    with pytest.raises(KeyNotFound):
        await Hedge().race(missing)


async def test_a_cancelled_download_leaves_no_request_behind() -> None:
    before = asyncio.all_tasks()
    racing = asyncio.create_task(Hedge().race(never))
    await asyncio.sleep(0.2)
    racing.cancel()
    await asyncio.gather(racing, return_exceptions=True)
    assert asyncio.all_tasks() == before
