"""Appending with the outcome known (musts L0, L1), fencing (P6), and what a reader with memory refuses (T1)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.events import RecordedEvents
from support.stores.memory import Fault, MemoryStore
from support.streams.record_writer import RecordWriter, make_open, make_seal
from support.virtual_time import VirtualTimeRuntime

from dcr_daemon.errors import Corrupt, Fenced, Incompatible, NotFound, ResourceExhausted, StoreUnavailable, UsageError
from dcr_daemon.events import Alarm, Claimed, FencedOut, Retrying
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.holes import REACH
from dcr_daemon.ledger.ledger import Header, Ledger
from dcr_daemon.ledger.records import Open, Seal
from dcr_daemon.ledger.slot import TRIES, Undecided
from dcr_daemon.store.port import Outcome


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


async def publisher(store: MemoryStore, *, name: str = "trainer", **options: Any) -> Any:
    """A writer whose stream exists and is claimed."""
    writer = RecordWriter(Ledger(store, **options))
    await writer.create()
    await writer.ledger.claim(name)
    return writer


async def state_of(store: MemoryStore) -> records.State:
    return await Ledger(store).read()


class TestOutcomes:
    """Must L1: the slot decides, nothing else does."""

    def test_an_append_is_in_the_ledger_when_it_returns(self, store: MemoryStore) -> None:
        async def check() -> None:
            writer = await publisher(store)
            seal = await writer.version()
            assert records.decode_record(store.objects[names.record(seal.seq)]) == seal
            assert writer.ledger.state == await state_of(store)
            assert await writer.ledger.resolve() is None, "nothing is open"

        run(check())

    @pytest.mark.parametrize("fault", ["REQUEST_LOST", "ANSWER_LOST", "GHOST"])
    def test_a_lost_answer_is_resolved_by_reading_the_slot(
        self, store: MemoryStore, events: RecordedEvents, fault: str
    ) -> None:
        async def check() -> None:
            writer = await publisher(store, emit=events)
            await writer.open()
            store.faults.append(Fault[fault])
            seal = await writer.seal()
            store.land_ghosts()
            assert (await state_of(store)).seal == records.SealRef(seal.seq, 1)
            assert len(store.objects) == 2 + seal.seq + 1, "layout, vector, and one record per slot"

        run(check())

    def test_our_own_record_is_recognised_when_a_retry_loses_to_it(self, store: MemoryStore) -> None:
        """The first PUT lands between our look at the slot and our second PUT: that one loses, to us."""

        async def check() -> None:
            writer = await publisher(store)
            await writer.open()
            store.faults.append(Fault.GHOST)

            async def land(operation: str, _key: str) -> None:
                if operation == "create" and store.ghosts:
                    store.land_ghosts()

            store.before = land
            seal = await writer.seal()
            store.before = None
            assert (await state_of(store)).seal.seq == seal.seq
            assert store.requests["create"] > 0

        run(check())

    def test_an_answer_of_lost_for_a_free_slot_decides_nothing(self, store: MemoryStore) -> None:
        """Some stores answer 409 or 412 for a race that then nobody wins."""

        class Confused(type(store)):  # type: ignore[misc]
            lies = 1

            async def create(self, key: str, body: bytes) -> Outcome:
                if self.lies and key.startswith("ledger/") and len(self.objects) > 4:
                    self.lies -= 1
                    return Outcome.LOST
                return await super().create(key, body)

        async def check() -> None:
            confused = Confused()
            writer = await publisher(confused)
            seal = await writer.version()
            assert confused.lies == 0
            assert (await state_of(confused)).seal.seq == seal.seq

        run(check())

    @pytest.mark.parametrize("lands", [True, False])
    def test_an_undecided_record_is_kept_and_settled_first(
        self, store: MemoryStore, events: RecordedEvents, still: VirtualTimeRuntime, lands: bool
    ) -> None:
        async def check() -> None:
            writer = await publisher(store, emit=events)
            ledger = writer.ledger
            await writer.open()
            still.slept.clear()
            store.faults.extend([Fault.GHOST] * TRIES)
            with pytest.raises(Undecided) as raised:
                await writer.seal()
            assert isinstance(raised.value, StoreUnavailable)
            assert ledger.undecided
            assert ledger.state.seal.version == 0, "nothing is reported before it is read"
            assert len(events.of(Retrying)) == TRIES
            assert len(still.slept) == TRIES - 1
            assert still.slept == sorted(still.slept), "tries grow rarer"
            if lands:
                store.land_ghosts()
            settled = await ledger.resolve()
            assert isinstance(settled, Seal)
            assert ledger.state.seal == records.SealRef(settled.seq, 1)
            assert not ledger.undecided
            assert await ledger.resolve() is None, "told once"
            store.land_ghosts()
            assert (await state_of(store)).seal == records.SealRef(settled.seq, 1)

        run(check())

    def test_the_next_append_settles_first(self, store: MemoryStore) -> None:
        async def check() -> None:
            writer = await publisher(store)
            store.faults.extend([Fault.REQUEST_LOST] * TRIES)
            with pytest.raises(Undecided):
                await writer.open()
            with pytest.raises(UsageError, match="attempt 2 is undecided"):
                await writer.open()
            assert (await state_of(store)).open is not None

        run(check())

    def test_a_cancelled_append_stays_undecided(self, store: MemoryStore) -> None:
        async def check() -> None:
            writer = await publisher(store)
            stuck = asyncio.Event()

            async def hang(operation: str, _key: str) -> None:
                if operation == "create":
                    stuck.set()
                    await asyncio.Event().wait()

            store.before = hang
            task = asyncio.create_task(writer.open())
            await stuck.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            store.before = None
            assert writer.ledger.undecided
            assert isinstance(await writer.ledger.resolve(), Open)

        run(check())

    def test_reading_on_settles_too(self, store: MemoryStore) -> None:
        async def check() -> None:
            writer = await publisher(store)
            store.faults.extend([Fault.GHOST] * TRIES)
            with pytest.raises(Undecided):
                await writer.open()
            store.land_ghosts()
            await writer.ledger.read()
            assert not writer.ledger.undecided
            assert isinstance(await writer.ledger.resolve(), Open)

        run(check())

    def test_an_undecided_record_that_lost_its_slot_is_settled_as_lost(self, store: MemoryStore) -> None:
        async def check() -> None:
            writer = await publisher(store)
            await writer.open()
            store.faults.extend([Fault.REQUEST_LOST] * TRIES)
            with pytest.raises(Undecided):
                await writer.seal()
            other = Ledger(store)
            await other.claim("other", take_over=True)
            assert await writer.ledger.resolve() is None
            with pytest.raises(Fenced):
                await writer.seal()
            assert (await state_of(store)).seal.version == 0

        run(check())


class TestWhoMayWrite:
    def test_without_a_claim_nothing_is_written(self, store: MemoryStore) -> None:
        async def check() -> None:
            writer = RecordWriter(Ledger(store))
            await writer.create()
            with pytest.raises(UsageError, match="without a claim"):
                await writer.open()

        run(check())

    def test_a_fenced_publisher_writes_nothing_and_is_told_by_whom(
        self, store: MemoryStore, events: RecordedEvents
    ) -> None:
        async def check() -> None:
            writer = await publisher(store, emit=events)
            await writer.open()
            await Ledger(store).claim("other", take_over=True)
            for _ in range(2):
                with pytest.raises(Fenced, match="other has claimed"):
                    await writer.seal()
            assert [event.by for event in events.of(FencedOut)] == ["other"]  # an event, not a refrain
            assert (await state_of(store)).seal.version == 0
            assert len([key for key in store.objects if key.startswith("ledger/")]) == 4

        run(check())

    def test_another_name_needs_a_release_or_to_take_over(self, store: MemoryStore) -> None:
        async def check() -> None:
            writer = await publisher(store)
            with pytest.raises(Fenced, match="--take-over"):
                await Ledger(store).claim("other")
            await writer.ledger.release()
            assert await Ledger(store).claim("other") == 3

        run(check())

    @pytest.mark.parametrize("name", ["", "a b", "-a", "a" * 65, "ä", "a\n"])
    def test_a_name_that_may_not_stand_in_a_record_is_misuse(self, store: MemoryStore, name: str) -> None:
        async def check() -> None:
            writer = RecordWriter(Ledger(store))
            await writer.create()
            with pytest.raises(UsageError, match="not a publisher's name"):
                await writer.ledger.claim(name)

        run(check())

    def test_a_restart_under_the_same_name_claims_and_voids_the_dead_attempt(
        self, store: MemoryStore, events: RecordedEvents
    ) -> None:
        async def check() -> None:
            await (await publisher(store)).open()
            again = Ledger(store, emit=events)
            assert await again.claim("trainer") == 3
            assert again.state.open is None
            assert events.of(Claimed) == [Claimed(epoch=3, name="trainer", ousted="trainer")]

        run(check())

    def test_a_claim_that_loses_its_slot_reads_on_and_decides_again(self, store: MemoryStore) -> None:
        async def check() -> None:
            writer = await publisher(store)
            other = Ledger(store)
            await other.read()
            await writer.version()
            assert await other.claim("other", take_over=True) == 4
            assert other.state.seal.version == 1

        run(check())

    def test_a_zombies_seal_is_void_and_raises_an_alarm(self, store: MemoryStore, events: RecordedEvents) -> None:
        """A publisher without must L0 and without our checks, whose stale seal gets into a slot."""

        async def check() -> None:
            writer = await publisher(store)
            await writer.open()
            other = RecordWriter(Ledger(store, emit=events))
            await other.ledger.claim("other", take_over=True)
            tip = other.ledger.tip
            zombie = Header(tip.state, tip.seq + 1, {**other.ledger._header().fields, "epoch": writer.ledger.epoch})
            store.objects[names.record(tip.seq + 1)] = records.encode(make_seal(zombie, attempt=2))
            seal = await other.version()
            assert seal.seq == tip.seq + 3
            assert [alarm.must for alarm in events.of(Alarm)] == ["L2"]
            assert "stale" in events.of(Alarm)[0].what
            assert (await state_of(store)).seal == records.SealRef(seal.seq, 1)

        run(check())

    def test_a_record_that_would_not_count_is_not_sent(self, store: MemoryStore) -> None:
        async def check() -> None:
            writer = await publisher(store)
            before = store.requests["create"]
            with pytest.raises(UsageError, match="would not count: attempt 0 is not open"):
                await writer.seal()
            for reason in ("\udcff", object()):
                with pytest.raises(UsageError, match="cannot be written as JSON"):
                    await writer.ledger.append(
                        lambda header, reason=reason: records.Abort(
                            **header.fields, attempt=2, version=1, reason=reason
                        )
                    )
            with pytest.raises(UsageError, match="over the limit"):
                await writer.ledger.append(
                    lambda header: records.Keys(**header.fields, keys=["x" * (records.RECORD_LIMIT + 1)])
                )
            assert store.requests["create"] == before

        run(check())

    def test_a_writer_may_give_up_when_it_is_asked_again(self, store: MemoryStore) -> None:
        async def check() -> None:
            writer = await publisher(store)
            tip = writer.ledger.tip
            other = make_open(Header(tip.state, 2, writer.ledger._header().fields | {"prev": records.NO_RECORD}))
            store.objects[names.record(tip.seq + 1)] = records.encode_record(other)
            seqs = []

            def once(header: Header) -> Open:
                seqs.append(header.seq)
                if len(seqs) > 1:
                    raise RuntimeError("no longer wanted")
                return make_open(header)

            with pytest.raises(RuntimeError, match="no longer"):
                await writer.ledger.append(once)
            assert seqs == [2, 3]
            assert not writer.ledger.undecided

        run(check())


class TestMemory:
    """Must T1: a reader with memory accepts only what extends it."""

    def test_it_reads_on_from_where_it_was(self, store: MemoryStore, tmp_path: Path) -> None:
        async def check() -> None:
            writer = await publisher(store)
            await Ledger(store, mark=tmp_path / "mark").read()
            await writer.version()
            reader = Ledger(store, mark=tmp_path / "mark")
            assert await reader.read() == writer.ledger.state
            assert reader.high_water_mark is not None
            assert reader.high_water_mark.mark is not None
            assert reader.high_water_mark.mark.tip == writer.ledger.tip

        run(check())

    @pytest.mark.parametrize("kept", [0, 1, 3])
    def test_a_truncated_ledger_is_refused(self, store: MemoryStore, tmp_path: Path, kept: int) -> None:
        async def check() -> None:
            writer = await publisher(store, mark=tmp_path / "mark")
            await writer.version()
            for seq in range(kept, writer.ledger.tip.seq + 1):
                del store.objects[names.record(seq)]
            with pytest.raises(Corrupt, match="does not extend what was seen"):
                await Ledger(store, mark=tmp_path / "mark").read()

        run(check())

    def test_a_forked_ledger_is_refused(self, store: MemoryStore, tmp_path: Path) -> None:
        """Rolled back, then continued by a publisher without memory: every record verifies, and it is not ours."""

        async def check() -> None:
            writer = await publisher(store)
            snapshot = dict(store.objects)
            await writer.version()
            await Ledger(store, mark=tmp_path / "mark").read()
            store.objects = snapshot
            fork = RecordWriter(Ledger(store))
            await fork.ledger.claim("trainer")
            await fork.version()
            await fork.version()
            with pytest.raises(Corrupt, match="another record stands there"):
                await Ledger(store, mark=tmp_path / "mark").read()

        run(check())

    def test_another_stream_in_its_place_is_refused(self, store: MemoryStore, tmp_path: Path) -> None:
        async def check() -> None:
            await publisher(store, mark=tmp_path / "mark")
            replacement = MemoryStore()
            await publisher(replacement)
            with pytest.raises(Incompatible, match="has seen stream"):
                await Ledger(replacement, mark=tmp_path / "mark").read()

        run(check())

    def test_a_vanished_ledger_is_not_made_again(self, store: MemoryStore, tmp_path: Path) -> None:
        async def check() -> None:
            await publisher(store, mark=tmp_path / "mark")
            store.objects.clear()
            with pytest.raises(Corrupt, match="its first record is gone"):
                await RecordWriter(Ledger(store, mark=tmp_path / "mark")).create()
            assert store.objects == {}

        run(check())

    def test_a_live_reader_remembers_before_anybody_sees(self, store: MemoryStore, tmp_path: Path) -> None:
        async def check() -> None:
            writer = await publisher(store)
            reader = Ledger(store, mark=tmp_path / "mark")
            await reader.read()
            follower = reader.follow()
            await writer.open()
            record = await anext(follower)
            mark = msgspec.json.decode((tmp_path / "mark").read_bytes())
            assert mark["seq"] == record.seq

        run(check())

    def test_a_record_that_cannot_be_remembered_is_not_shown(
        self, store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def check() -> None:
            writer = await publisher(store)
            reader = Ledger(store, mark=tmp_path / "mark")
            await reader.read()
            follower = reader.follow()
            await writer.open()
            assert reader.high_water_mark is not None

            def full(_tip: object) -> None:
                raise ResourceExhausted("disk full")

            with monkeypatch.context() as patch:
                patch.setattr(reader.high_water_mark, "saw", full)
                with pytest.raises(ResourceExhausted):
                    await anext(follower)
            await writer.seal()
            assert [type(await anext(follower)) for _ in range(2)] == [Open, Seal], "shown once it is remembered"

        run(check())


class TestReading:
    def test_no_stream_is_said_so(self, store: MemoryStore) -> None:
        with pytest.raises(NotFound, match="there is no stream"):
            run(Ledger(store).read())
        with pytest.raises(UsageError, match="not read yet"):
            _ = Ledger(store).state

    def test_an_oversized_record_is_void_for_everybody(self, store: MemoryStore, events: RecordedEvents) -> None:
        async def check() -> None:
            writer = await publisher(store)
            store.objects[names.record(2)] = b"x" * (records.RECORD_LIMIT + 1)
            await writer.version()
            reader = Ledger(store, emit=events)
            assert await reader.read() == writer.ledger.state
            assert writer.ledger.state.seal == records.SealRef(4, 1)

        run(check())

    def test_a_cold_start_that_was_interrupted_is_as_cold_again(self, store: MemoryStore) -> None:
        """It must not fall back to reading ten thousand records one by one."""

        async def check() -> None:
            writer = await publisher(store)
            for _ in range(200):
                await writer.version()
            reader = Ledger(store)

            async def fail(_operation: str, key: str) -> None:
                if key == names.record(400):
                    store.before = None
                    raise StoreUnavailable("down")

            store.before = fail
            with pytest.raises(StoreUnavailable):
                await reader.read()
            store.requests.clear()
            assert await reader.read() == writer.ledger.state
            assert store.requests["get"] < 30 + REACH

        run(check())

    def test_an_answer_mixed_up_on_the_way_voids_nothing(self, store: MemoryStore) -> None:
        async def check() -> None:
            writer = await publisher(store)
            await writer.version()
            once = [names.record(2)]

            async def mix_up(operation: str, key: str) -> None:
                if operation == "get" and key in once:
                    once.remove(key)
                    raise Corrupt("more bytes came than were announced")

            reader = Ledger(store)
            store.before = mix_up
            assert await reader.read() == writer.ledger.state
            assert not once

        run(check())

    def test_overlapping_calls_are_taken_one_at_a_time(self, store: MemoryStore) -> None:
        async def check() -> None:
            writer = await publisher(store)
            follower = writer.ledger.follow()
            seen = []

            async def listen() -> None:
                while len(seen) < 10:
                    seen.append(await anext(follower))

            async def write() -> None:
                for _ in range(5):
                    await writer.version()

            await asyncio.gather(listen(), write(), *(writer.ledger.read() for _ in range(5)))
            assert [record.seq for record in seen] == list(range(2, 12))

        run(check())
