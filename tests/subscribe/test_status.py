from __future__ import annotations

import asyncio
import contextlib
import json

from dcr_daemon.errors import KeyNotFound
from dcr_daemon.events import Alarm, Degraded
from dcr_daemon.ledger import names
from dcr_daemon.store import open_store
from dcr_daemon.subscribe.status import StatusWriter
from dcr_daemon.subscribe.status_publisher import StatusPublisher

KEY = names.replica("r")


async def until(condition):
    async with asyncio.timeout(30):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def read_until(store, **fields):
    """The status object as soon as it says all of this."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(KeyNotFound, ValueError):
                found = json.loads(await store.get(KEY, limit=10_000))
                if fields.items() <= found.items():
                    return found
            await asyncio.sleep(0.01)


def reporter_of(store, events, *, refresh=0.02):
    return StatusWriter(store, "r", stream="stream", emit=events.append, refresh=refresh)


async def test_changes_are_written_and_the_counter_only_rises(tmp_path):
    store, events = await open_store(f"file://{tmp_path}/s"), []
    reporter, counters = reporter_of(store, events), []
    async with reporter.running():
        for version in range(3):
            reporter.set(version=version, state="serving")
            counters.append((await read_until(store, version=version, state="serving"))["counter"])
        reporter.set(state="stopped")
    assert json.loads(await store.get(KEY, limit=10_000))["state"] == "stopped"
    assert counters == sorted(set(counters))
    assert not events


async def test_the_last_word_is_not_overtaken_by_a_write_under_way(tmp_path):
    """A write that is cut off may still land: later than the one that should have replaced it."""
    store, events = await open_store(f"file://{tmp_path}/s"), []
    under_way, go_on = asyncio.Event(), asyncio.Event()

    class Slow:
        def __getattr__(self, name):
            return getattr(store, name)

        async def overwrite(self, key, body):
            if json.loads(body)["state"] == "catching up":
                under_way.set()
                await asyncio.shield(asyncio.create_task(self.later(key, body)))
            else:
                await store.overwrite(key, body)

        async def later(self, key, body):
            await go_on.wait()
            await store.overwrite(key, body)

    reporter = reporter_of(Slow(), events, refresh=30.0)
    async with reporter.running():
        reporter.set(state="catching up")
        await under_way.wait()
        reporter.set(state="fenced")
        asyncio.get_running_loop().call_later(0.1, go_on.set)
    await asyncio.sleep(0.2)
    assert json.loads(await store.get(KEY, limit=10_000))["state"] == "fenced"


async def test_what_an_earlier_run_left_is_no_alarm(tmp_path):
    store, events = await open_store(f"file://{tmp_path}/s"), []
    for _ in range(2):
        async with reporter_of(store, events, refresh=0.01).running():
            await asyncio.sleep(0.1)  # time for several writes; too few only weaken the test
    assert not events


async def test_a_second_process_under_the_same_id_is_an_alarm(tmp_path):
    store, events = await open_store(f"file://{tmp_path}/s"), []
    async with reporter_of(store, events).running(), reporter_of(store, events).running():
        await until(lambda: [event for event in events if isinstance(event, Alarm) and event.must == "L7"])


async def test_an_unreadable_status_counts_as_absent(tmp_path):
    store, events = await open_store(f"file://{tmp_path}/s"), []
    await store.overwrite(KEY, b"\xff not JSON")
    async with reporter_of(store, events).running():
        assert await read_until(store, id="r")
    assert not events


async def test_a_store_that_does_not_take_it_is_said_once_and_no_reason_to_stop(tmp_path):
    place = tmp_path / "s"
    place.mkdir()
    (place / "replicas").write_text("in the way")
    store, events = await open_store(f"file://{place}"), []
    reporter = reporter_of(store, events, refresh=0.01)
    async with reporter.running():
        await until(lambda: events)
        await asyncio.sleep(0.1)
        (place / "replicas").unlink()
        assert await read_until(store, id="r")
    assert len([event for event in events if isinstance(event, Degraded)]) == 1


async def test_a_report_says_when_the_next_one_comes(tmp_path):
    store, events = await open_store(f"file://{tmp_path}/s"), []
    async with reporter_of(store, events, refresh=0.5).running():
        assert (await read_until(store, id="r"))["refresh"] == 0.5


async def test_tries_to_reach_an_engine_that_is_away_are_no_news(make_stream):
    class Writer:
        def __init__(self):
            self.told = []

        def set(self, **fields):
            self.told.append(fields)

    stream, writer = await make_stream(1), Writer()
    publisher = StatusPublisher(stream.ledger, writer, emit=lambda event: None)
    publisher.attaching()
    publisher.lost("no socket")
    once = writer.told[-1]
    for _ in range(5):
        publisher.attaching()
        publisher.lost("no socket")
    assert [told["state"] for told in writer.told[:2]] == ["attaching", "waiting for the engine"]
    assert all(told == once for told in writer.told[1:]), "StatusWriter.set writes nothing if nothing changes"
