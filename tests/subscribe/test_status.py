from __future__ import annotations

import asyncio
import contextlib
import json

from dcr_daemon.errors import Missing
from dcr_daemon.events import Alarm, Waiting
from dcr_daemon.ledger import names
from dcr_daemon.store import open_store
from dcr_daemon.subscribe.status import Reporter

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
            with contextlib.suppress(Missing, ValueError):
                found = json.loads(await store.get(KEY, limit=10_000))
                if fields.items() <= found.items():
                    return found
            await asyncio.sleep(0.01)


async def test_changes_are_written_and_the_counter_only_rises(tmp_path):
    store, events = await open_store(f"file://{tmp_path}/s"), []
    reporter = Reporter(store, "r", "stream", emit=events.append, refresh=0.02)
    task = asyncio.create_task(reporter.run())
    counters = []
    for version in range(3):
        reporter.set(version=version, state="serving")
        counters.append((await read_until(store, version=version, state="serving"))["counter"])
    reporter.set(state="stopped")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await read_until(store, state="stopped", version=2)
    assert counters == sorted(set(counters))
    assert not events


async def test_what_an_earlier_run_left_is_no_alarm(tmp_path):
    store, events = await open_store(f"file://{tmp_path}/s"), []
    for _ in range(2):
        task = asyncio.create_task(Reporter(store, "r", "stream", emit=events.append, refresh=0.01).run())
        await asyncio.sleep(0.1)  # time for several writes; too few only weaken the test
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert not events


async def test_a_second_process_under_the_same_id_is_an_alarm(tmp_path):
    store, events = await open_store(f"file://{tmp_path}/s"), []
    tasks = [
        asyncio.create_task(Reporter(store, "r", "stream", emit=events.append, refresh=0.02).run()) for _ in range(2)
    ]
    await until(lambda: [event for event in events if isinstance(event, Alarm) and event.must == "L7"])
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_unreadable_status_counts_as_absent(tmp_path):
    store, events = await open_store(f"file://{tmp_path}/s"), []
    await store.overwrite(KEY, b"\xff not JSON")
    task = asyncio.create_task(Reporter(store, "r", "stream", emit=events.append, refresh=0.02).run())
    assert await read_until(store, id="r")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not events


async def test_a_store_that_does_not_take_it_is_said_once_and_no_reason_to_stop(tmp_path):
    place = tmp_path / "s"
    place.mkdir()
    (place / "replicas").write_text("in the way")
    store, events = await open_store(f"file://{place}"), []
    reporter = Reporter(store, "r", "stream", emit=events.append, refresh=0.01)
    task = asyncio.create_task(reporter.run())
    await until(lambda: events)
    await asyncio.sleep(0.1)
    assert not task.done()
    assert len([event for event in events if isinstance(event, Waiting)]) == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
