"""Waiting for the next record: every record once and in order, with the patience of a daemon."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from support.events import RecordedEvents
from support.stores.memory import Fault, MemoryStore
from support.streams.record_writer import RecordWriter, make_open
from support.virtual_time import VirtualTimeRuntime

from dcr_daemon.errors import Corrupt, ResourceExhausted
from dcr_daemon.events import Alarm, Retrying
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.follow import GAP_AFTER, Polling
from dcr_daemon.ledger.high_water_mark import HighWaterMark
from dcr_daemon.ledger.ledger import Header, Ledger
from dcr_daemon.ledger.records import Open, Seal


@pytest.fixture
def writer(store: MemoryStore) -> RecordWriter:
    async def write() -> Any:
        writer = RecordWriter(Ledger(store))
        await writer.create()
        await writer.ledger.claim("trainer")
        return writer

    return asyncio.run(write())


def acting(still: VirtualTimeRuntime, *actions: Any) -> None:
    """Do the n-th action at the n-th sleep, then nothing more."""
    left = list(actions)

    def act(_seconds: float) -> None:
        if left:
            action = left.pop(0)
            if action:
                action()

    still.on_sleep = act


def test_each_record_that_counts_comes_once_and_in_order(
    store: MemoryStore, writer: RecordWriter, events: RecordedEvents
) -> None:
    async def check() -> None:
        reader = Ledger(store, emit=events)
        await reader.read()
        follower, late = reader.follow(), reader.follow()
        await writer.version()
        header = writer.ledger._header()
        other = make_open(Header(header.state, header.seq, header.fields | {"prev": records.NO_RECORD}))
        store.objects[names.record(header.seq)] = records.encode_record(other)
        await writer.version()
        seqs = [(await anext(follower)).seq for _ in range(4)]
        assert seqs == [2, 3, 5, 6], "the void one is an alarm, not a record"
        assert len(events.of(Alarm)) == 1
        assert [(await anext(late)).seq for _ in range(4)] == seqs, "whoever else read them"

    asyncio.run(check())


def test_a_full_disk_delays_what_is_told_and_loses_nothing(
    store: MemoryStore, writer: RecordWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Must T1: remembered before it is told; must not be forgotten because it could not be remembered at once."""

    async def check() -> None:
        reader = Ledger(store, mark=tmp_path / "mark")
        await reader.read()
        follower = reader.follow()
        await writer.version()
        with monkeypatch.context() as full:
            full.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
            with pytest.raises(ResourceExhausted):
                await anext(follower)
        kinds = [type(await anext(follower)) for _ in range(2)]
        assert kinds == [Open, Seal]
        full_again = Ledger(store, mark=tmp_path / "mark")
        await writer.open()
        with monkeypatch.context() as full:
            full.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
            with pytest.raises(ResourceExhausted):
                await full_again.read()
        state = await full_again.read()
        assert state.open is not None
        assert HighWaterMark(tmp_path / "mark").mark.tip == full_again.tip

    asyncio.run(check())


def test_a_follower_begins_where_it_was_made(store: MemoryStore, writer: RecordWriter) -> None:
    async def check() -> None:
        await writer.version()
        reader = Ledger(store)
        await reader.read()
        follower = reader.follow()
        await writer.open()
        await reader.read()
        await writer.seal()
        assert [type(await anext(follower)) for _ in range(2)] == [Open, Seal]

    asyncio.run(check())


def test_an_idle_ledger_is_asked_less_and_less_often_and_after_a_record_at_once(
    store: MemoryStore, writer: RecordWriter, still: VirtualTimeRuntime
) -> None:
    async def check() -> None:
        reader = Ledger(store, polling=Polling(first=1.0, longest=2.5))
        await reader.read()
        follower = reader.follow()
        quiet = [None] * 55
        acting(still, *quiet, *quiet, lambda: asyncio.ensure_future(writer.open()))
        store.requests.clear()
        still.slept.clear()
        await anext(follower)
        idle = list(still.slept)
        assert idle[0] == 1.0
        assert idle == sorted(idle)
        assert idle[-1] == 2.5
        assert store.requests["get"] - len(idle) <= 2, "one GET per look, and nothing else"
        assert store.requests["list"] == 0
        still.slept.clear()
        acting(still, *[None] * 10, lambda: asyncio.ensure_future(writer.seal()))
        await anext(follower)
        assert max(still.slept) < 1.25, "a record came: the next one may come any moment"

    asyncio.run(check())


def test_looks_of_many_replicas_do_not_fall_into_step(still: VirtualTimeRuntime) -> None:
    still.jitter = lambda: 0.0
    low = Polling().pause(1)
    still.jitter = lambda: 0.999
    assert low < 1.0 < Polling().pause(1)


def test_an_unavailable_store_is_waited_out(
    store: MemoryStore, writer: RecordWriter, still: VirtualTimeRuntime, events: RecordedEvents
) -> None:
    async def check() -> None:
        reader = Ledger(store, emit=events)
        await reader.read()
        follower = reader.follow()
        store.faults.extend([Fault.DOWN] * 3)
        acting(still, None, None, lambda: asyncio.ensure_future(writer.open()))
        assert isinstance(await anext(follower), Open)
        assert len(events.of(Retrying)) == 3

    asyncio.run(check())


def test_a_gap_is_noticed_by_a_reader_that_waits_for_ever(
    store: MemoryStore, writer: RecordWriter, still: VirtualTimeRuntime
) -> None:
    """Must L2: a missing low seq under a present high one is an error, not an idle stream."""

    async def check() -> None:
        reader = Ledger(store)
        await reader.read()
        follower = reader.follow()
        await writer.version()
        del store.objects[names.record(2)]
        with pytest.raises(Corrupt, match="record 2 "):
            await anext(follower)
        assert len([pause for pause in still.slept if pause >= 1.0]) == GAP_AFTER, "beside second looks"

    asyncio.run(check())


@pytest.mark.parametrize("hours", [0.01, 0.1, 1, 24])
def test_a_record_is_noticed_late_by_a_small_share_of_the_time_since_the_last_one(
    hours: float, still: VirtualTimeRuntime
) -> None:
    polling, waited, looks = Polling(), 0.0, 0
    while waited < 3600 * hours:
        looks += 1
        waited += (pause := polling.pause(looks))
    assert pause <= min(1.03 + 0.02 * waited, 30.0)


@pytest.mark.parametrize(("first", "longest"), [(1.0, 30.0), (60.0, 5.0), (0.01, 1e6)])
def test_a_pause_is_never_below_the_first_nor_above_the_longest(
    first: float, longest: float, still: VirtualTimeRuntime
) -> None:
    pauses = [Polling(first, longest).pause(looks) for looks in (1, 2, 100, 1000, 10**9)]
    assert pauses == sorted(pauses)
    assert pauses[0] == first
    assert pauses[-1] == max(first, longest) or longest == 1e6
