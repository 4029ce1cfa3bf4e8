"""Waiting for the next record: every record once and in order, with the patience of a daemon."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from msgspec import structs
from support.events import RecordedEvents
from support.stores.memory import Fault, MemoryStore
from support.streams.record_writer import RecordWriter, make_open
from support.virtual_time import VirtualTimeRuntime

from dcr_daemon.errors import Corrupt, ResourceExhausted
from dcr_daemon.events import Alarm, LedgerPolled, Retrying
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.follow import GAP_AFTER, Polling, PollSchedule, jittered
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
    low = jittered(1.0)
    still.jitter = lambda: 0.999
    assert low < 1.0 < jittered(1.0)


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


def test_every_look_that_the_store_answers_is_told_and_no_other(
    store: MemoryStore, writer: RecordWriter, still: VirtualTimeRuntime, events: RecordedEvents
) -> None:
    """Also the looks further ahead, of which a follower that waits for long makes one in six."""

    async def check() -> None:
        await writer.version()
        reader = Ledger(store, emit=events)
        await reader.read()
        follower = reader.follow()
        await reader.read()
        events.clear()
        store.faults.extend([Fault.DOWN] * 3)
        looks = GAP_AFTER + 10
        acting(still, *[None] * looks, lambda: asyncio.ensure_future(writer.open()))
        assert isinstance(await anext(follower), Open)
        polled = events.of(LedgerPolled)
        assert {event.head for event in polled} == {1}
        assert looks - 3 <= len(polled) <= looks

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


def test_fast_polls_are_no_search_for_a_missing_record(
    store: MemoryStore, writer: RecordWriter, still: VirtualTimeRuntime
) -> None:
    """A version is open: each of the fast polls is at the next slot, and finds the record that comes after them."""

    async def check() -> None:
        await writer.open()
        reader = Ledger(store, polling=Polling(first=1.0))
        await reader.read()
        follower, read, polls = reader.follow(), list[str](), list[tuple[str, float]]()

        async def note(_operation: str, key: str) -> None:
            read.append(key)

        def count(pause: float) -> None:
            polls.append((read[-1], pause))
            if still.clock > 120:
                raise EndOfTestError

        store.before, still.on_sleep, still.clock = note, count, 0.0
        with pytest.raises(EndOfTestError):
            await anext(follower)
        assert len(read) == len(polls), "a poll is one request"
        fast = [key for key, pause in polls if pause < 1.0]
        assert len(fast) > 3 * GAP_AFTER
        assert set(fast) == {names.record(3)}
        assert len({key for key, _ in polls}) > 1, "slow polls look further ahead now and then"

    asyncio.run(check())


class EndOfTestError(Exception):
    pass


def test_a_store_that_does_not_answer_is_not_polled_fast(
    store: MemoryStore, writer: RecordWriter, still: VirtualTimeRuntime
) -> None:
    async def check() -> None:
        await writer.open()
        reader = Ledger(store, polling=Polling(first=1.0))
        await reader.read()
        follower = reader.follow()
        store.faults.extend([Fault.DOWN] * 5)
        acting(still, *[None] * 6, lambda: asyncio.ensure_future(writer.seal()))
        still.slept.clear()
        await anext(follower)
        assert still.slept[:5] == [1.0] * 5
        assert still.slept[5] < 0.5

    asyncio.run(check())


@pytest.mark.parametrize("hours", [0.01, 0.1, 1, 24])
def test_a_record_is_noticed_late_by_a_small_share_of_the_time_since_the_last_one(hours: float) -> None:
    polling, waited = Polling(), 0.0
    while waited < 3600 * hours:
        waited += (pause := polling.pause(waited))
    assert pause <= min(1.03 + 0.02 * waited, 30.0)


@pytest.mark.parametrize(("first", "longest"), [(1.0, 30.0), (60.0, 5.0), (0.01, 1e6)])
def test_a_pause_is_never_below_the_first_nor_above_the_longest(first: float, longest: float) -> None:
    pauses = [Polling(first, longest).pause(waited) for waited in (0, 2, 100, 1000, 10**9)]
    assert pauses == sorted(pauses)
    assert pauses[0] == first
    assert pauses[-1] == max(first, longest)


@pytest.mark.parametrize(("first", "fast"), [(1.0, 0.1), (5.0, 0.5), (0.1, 0.1), (0.05, 0.05)])
def test_a_fast_pause_follows_the_operators_choice(first: float, fast: float) -> None:
    assert Polling(first).fast == fast


class TestForecast:
    """A stream whose versions begin `every` so many seconds and are uploaded in `upload`, and one reader of it."""

    @staticmethod
    def follow(
        still: VirtualTimeRuntime, every: Iterable[float], *, upload: float = 2.0, offset: float = 0.0
    ) -> tuple[list[float], list[int], PollSchedule]:
        """How late each record is seen, in seconds, and the polls that each took. `offset`: of the writer's clock."""
        opened = list[float]()
        schedule = PollSchedule(Polling(), is_open=lambda: bool(opened))
        lateness, polls, due = list[float](), list[int](), 0.0
        for period in every:
            due += period
            for kind, at in ((Open, due), (Seal, due + upload)):
                count = 1
                while still.clock < at:
                    still.clock += schedule.pause()
                    count += 1
                lateness.append(still.clock - at)
                polls.append(count)
                schedule.note(_record(kind, at + offset))
                opened[:] = [at] if kind is Open else []
        return lateness, polls, schedule

    @pytest.mark.parametrize(("every", "jitter"), [(2, 0.1), (15, 0.1), (60, 0.05), (300, 0.02), (1800, 0.004)])
    def test_every_record_of_a_regular_stream_is_seen_at_once(
        self, still: VirtualTimeRuntime, every: float, jitter: float
    ) -> None:
        rng = random.Random(1)
        periods = [every * rng.uniform(1 - jitter, 1 + jitter) for _ in range(40)]
        lateness, polls, _ = self.follow(still, periods, upload=every / 10)
        assert sum(seen > 0.15 for seen in lateness[8:]) <= 9, "of 72; the others came outside their windows"
        assert median(lateness[8:]) < 0.1
        assert max(polls) < 400

    def test_a_clock_that_is_wrong_forecasts_as_well(self, still: VirtualTimeRuntime) -> None:
        lateness, _, _ = self.follow(still, [30.0] * 10, offset=-1e8)
        assert max(lateness[6:]) <= 0.15

    def test_one_long_pause_of_the_trainer_changes_no_forecast(self, still: VirtualTimeRuntime) -> None:
        lateness, polls, _ = self.follow(still, [*[60.0] * 10, 7200.0, *[60.0] * 3])
        assert polls[20] < 7200 / 30 + 600, "what came in vain was a window, then pauses grew"
        assert max(lateness[22:]) <= 0.15

    def test_a_stream_that_changes_its_pace_is_learned_again(self, still: VirtualTimeRuntime) -> None:
        lateness, _, _ = self.follow(still, [*[60.0] * 10, *[25.0] * 12])
        assert max(lateness[-6:]) <= 0.15

    def test_versions_without_any_pace_cost_a_bounded_number_of_polls(self, still: VirtualTimeRuntime) -> None:
        rng = random.Random(2)
        _, polls, _ = self.follow(still, [rng.expovariate(1 / 300) for _ in range(60)])
        assert max(polls) < 800

    def test_after_the_last_version_a_replica_polls_as_rarely_as_one_that_never_saw_any(
        self, still: VirtualTimeRuntime
    ) -> None:
        *_, schedule = self.follow(still, [60.0] * 10)
        ended, polls = still.clock, 0
        while still.clock < ended + 3600:
            still.clock += schedule.pause()
            polls += 1
        assert schedule.pause() == Polling().longest
        assert polls / 3600 <= 0.3

    def test_records_that_are_read_late_all_at_once_count_by_their_own_times(self, still: VirtualTimeRuntime) -> None:
        schedule = PollSchedule(Polling(), is_open=lambda: False)
        still.clock = 970.0
        schedule.pause()
        still.clock = 1000.0
        for n in range(8):
            schedule.note(_record(Open, 60.0 * n))
            schedule.note(_record(Seal, 60.0 * n + 5))
        still.clock += 58.0
        assert schedule.pause() <= 0.5

    def test_a_time_that_cannot_be_parsed_forecasts_nothing(self, still: VirtualTimeRuntime) -> None:
        schedule = PollSchedule(Polling(), is_open=lambda: False)
        for n in range(3):
            schedule.note(structs.replace(_record(Open, 60.0 * n), at="yesterday"))
        still.clock += 60.0
        assert schedule.pause() == Polling().pause(60.0)


def _record(kind: type[Open | Seal], at: float) -> Any:
    written = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=at)
    fields = dict.fromkeys(kind.__struct_fields__) | {"at": written.isoformat(timespec="milliseconds")}
    return kind(**fields)
