"""What is deleted, what never is, and in which order (musts L5 to L8)."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stores.memory import Fault, MemoryStore
from support.streams.record_history import HistoryWriter
from support.virtual_time import VirtualTimeRuntime

from dcr_daemon.errors import Corrupt, Fenced, NotFound, StoreUnavailable, UsageError
from dcr_daemon.ledger import names
from dcr_daemon.ledger.fold import begin, fold
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.records import Seal, decode_record
from dcr_daemon.ledger.retention.collector import Collected, Collector, collect
from dcr_daemon.ledger.retention.plan import AnchorFact, Plan, RetentionPolicy, Why, plan_floor
from dcr_daemon.store.port import Entry

KEEP_2 = RetentionPolicy(versions=2)
NOTHING = RetentionPolicy()


@pytest.fixture
def writer(store: MemoryStore) -> HistoryWriter:
    """Ten versions, anchors of 0, 4 and 8, an aborted attempt at version 5; released."""
    writer = HistoryWriter(store)
    writer.claim()
    writer.anchor(0)
    for version in range(1, 11):
        if version == 5:
            writer.put(chunk(5, writer.open().seq))
            writer.abort()
        writer.put(chunk(version, writer.open().seq))
        writer.seal()
        if version in (4, 8):
            writer.anchor(version)
    writer.release()
    return writer


def chunk(version: int, attempt: int, n: int = 0) -> str:
    return names.chunk(version, attempt, "g", 0, "a0", n)


def run(store: MemoryStore, policy: RetentionPolicy = NOTHING, **options: Any) -> tuple[Plan, Collected]:
    return asyncio.run(collect(Ledger(store), policy, **options))


def plan(store: MemoryStore, policy: RetentionPolicy = NOTHING) -> Plan:
    async def planned() -> Plan:
        ledger = Ledger(store)
        await ledger.read()
        return await Collector(ledger).plan(policy)

    return asyncio.run(planned())


def aborted(writer: HistoryWriter) -> str:
    """The object of the aborted attempt at version 5."""
    sealed = {key.split("/")[2] for key in writer.store.objects if key.endswith("fingerprint.bin")}
    return next(k for k in sorted(writer.store.objects) if k.startswith("data/5/") and k.split("/")[2] not in sealed)


def why(planned: Plan) -> dict[str, Why]:
    return {item.key: item.why for item in planned.items}


def folders(store: MemoryStore, prefix: str) -> set[int]:
    """The versions of which anything lies below `prefix`."""
    return {int(key.split("/")[1]) for key in store.objects if key.startswith(prefix)}


class TestFloor:
    def test_it_goes_to_the_newest_anchor_from_which_all_that_is_kept_can_be_had(self, writer: HistoryWriter) -> None:
        planned, done = run(writer.store, RetentionPolicy(versions=3))
        assert (planned.before, planned.floor.floor, planned.floor.oldest, planned.floor.held) == (0, 8, 8, "")
        assert done.objects == len(planned.items) > 0
        assert folders(writer.store, "data/") == {0, 8, 9, 10}
        assert folders(writer.store, "anchors/") == {8}

    def test_what_leads_from_the_anchor_to_the_oldest_version_stays(self, writer: HistoryWriter) -> None:
        planned, _ = run(writer.store, RetentionPolicy(versions=4))
        assert planned.floor.floor == 4
        assert planned.floor.held == "versions 4 to 6 are the way from the anchor to version 7, the oldest to keep"
        assert not planned.floor.blocked
        assert folders(writer.store, "data/") == {0, *range(4, 11)}

    def test_with_no_anchor_there_is_nothing_to_raise_it_to(self, store: MemoryStore) -> None:
        writer = HistoryWriter(store)
        writer.claim()
        writer.versions(9)
        before = dict(store.objects)
        planned, done = run(store, KEEP_2)
        assert planned.floor.blocked
        assert planned.floor.held == "versions 0 to 7 cannot go: there is no whole anchor at or below version 8"
        assert (planned.floor.floor, done.objects) == (0, 0)
        assert store.objects == before, "and nothing is claimed for nothing"

    @pytest.mark.parametrize("spoil", ["file gone", "file short", "index gone", "index junk"])
    def test_it_never_rests_on_an_anchor_that_is_not_whole(self, writer: HistoryWriter, spoil: str) -> None:
        file, index = (k for k in sorted(writer.store.objects, reverse=True) if k.startswith("anchors/8/"))
        key = file if spoil.startswith("file") else index
        if spoil.endswith("gone"):
            del writer.store.objects[key]
        else:
            writer.store.objects[key] = writer.store.objects[key][:3]
        planned, _ = run(writer.store, KEEP_2)
        assert planned.floor.floor == 4
        assert folders(writer.store, "data/") == {0, *range(4, 11)}

    def test_nor_on_a_listing_that_still_shows_what_is_gone(self, writer: HistoryWriter) -> None:
        """LIST is a hint (must L6)."""

        class Stale(MemoryStore):
            async def list(self, prefix: str) -> Any:
                for key in sorted(whole):
                    if key.startswith(prefix):
                        yield Entry(key, len(whole[key]))

        whole = dict(writer.store.objects)
        stale = Stale()
        stale.objects = {key: body for key, body in whole.items() if "anchors/8/" not in key or "index" in key}
        planned, _ = run(stale, KEEP_2)
        assert planned.floor.floor == 4

    def test_nor_on_an_anchor_with_another_sum(self, writer: HistoryWriter) -> None:
        writer.claim()
        writer.total = lambda version: "0" * 16  # type: ignore[method-assign]
        writer.anchor(9)
        writer.release()
        assert run(writer.store, KEEP_2)[0].floor.floor == 8

    def test_it_never_falls(self, writer: HistoryWriter) -> None:
        run(writer.store, KEEP_2)
        planned, done = run(writer.store, RetentionPolicy(versions=9))
        assert (planned.floor.floor, planned.before, done.objects) == (8, 8, 0)

    def test_without_a_policy_it_stays(self, writer: HistoryWriter) -> None:
        assert run(writer.store)[0].floor.floor == 0

    @given(st.integers(0, 30), st.integers(0, 30), st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=6))
    @settings(max_examples=300, deadline=None)
    def test_whatever_there_is(self, oldest: int, floor: int, anchors: list[tuple[int, bool]]) -> None:
        facts = [AnchorFact(v, v, frozenset(), "" if whole else "lacks x") for v, whole in sorted(anchors)[::-1]]
        planned = plan_floor(oldest, floor, facts)
        assert planned.floor >= floor
        if planned.floor > floor:
            assert planned.floor <= oldest
            assert (planned.floor, True) in anchors
        assert bool(planned.held) == (planned.floor < oldest)


class TestHours:
    """An operator's wish, told by clocks; safety is told by anchors (must L8)."""

    @pytest.fixture
    def dated(self, store: MemoryStore, still: VirtualTimeRuntime) -> HistoryWriter:
        """A version an hour, the newest an hour old; every one anchored."""
        writer, now = HistoryWriter(store), datetime(2026, 1, 1, tzinfo=UTC)
        writer.claim()
        for version in range(1, 21):
            writer.version(at=(now - timedelta(hours=21 - version)).isoformat())
            writer.anchor(version)
        return writer

    @pytest.mark.parametrize(("hours", "floor"), [(5.5, 16), (1.5, 20), (0.5, 20), (19.5, 2), (1000, 0)])
    def test_the_versions_of_the_last_hours(self, dated: HistoryWriter, hours: float, floor: int) -> None:
        assert plan(dated.store, RetentionPolicy(hours=hours)).floor.floor == floor

    def test_what_either_wish_asks_for_is_kept(self, dated: HistoryWriter) -> None:
        assert plan(dated.store, RetentionPolicy(hours=5.5, versions=10)).floor.floor == 11
        assert plan(dated.store, RetentionPolicy(hours=12.5, versions=3)).floor.floor == 9

    @pytest.mark.parametrize("at", ["1970-01-01T00:00:00+00:00", "9999-01-01T00:00:00", "no time at all", ""])
    def test_a_clock_that_is_wrong_endangers_nothing(self, store: MemoryStore, at: str) -> None:
        writer = HistoryWriter(store)
        writer.claim()
        for _ in range(9):
            writer.version(at=at)
        writer.anchor(4)
        assert plan(store, RetentionPolicy(hours=1)).floor.floor in (0, 4)


class TestWhatGoes:
    def test_attempts_that_came_to_nothing(self, writer: HistoryWriter) -> None:
        aborted = next(key for key in writer.store.objects if key.startswith("data/5/"))
        writer.claim()
        dead = [writer.put(chunk(11, writer.open().seq)), writer.put(chunk(11, writer.tip.seq, 1))]
        writer.claim("another")
        assert why(plan(writer.store)) == dict.fromkeys([aborted, *dead], Why.UNSEALED)
        living = writer.put(chunk(11, writer.open().seq))
        run(writer.store)
        assert living in writer.store.objects
        assert not {aborted, *dead} & set(writer.store.objects)

    def test_what_comes_late_goes_in_the_next_sweep(self, writer: HistoryWriter) -> None:
        run(writer.store)
        late = writer.put(next(iter(why(plan(writer.store, KEEP_2)))))
        run(writer.store, KEEP_2)
        writer.put(late)
        assert list(why(plan(writer.store))) == [late]
        run(writer.store)
        assert late not in writer.store.objects

    def test_the_older_anchors_of_a_version(self, writer: HistoryWriter) -> None:
        old = [key for key in writer.store.objects if key.startswith("anchors/8/")]
        writer.claim()
        writer.anchor(8)
        assert {key for key, reason in why(plan(writer.store)).items() if reason is Why.SUPERSEDED} == set(old)

    def test_an_anchor_that_its_dead_publisher_never_recorded(self, writer: HistoryWriter) -> None:
        writer.claim()
        dead = writer.put(names.anchor(10, writer.tip.seq) + "model.safetensors")
        assert dead not in why(plan(writer.store)), "it may be under way"
        writer.claim()
        assert why(plan(writer.store))[dead] is Why.UNRECORDED

    def test_an_anchor_that_failed_once_its_publisher_has_recorded_another(self, writer: HistoryWriter) -> None:
        writer.claim()
        failed = writer.put(names.anchor(10, writer.tip.seq) + "model.safetensors")
        writer.version()
        under_way = writer.put(names.anchor(11, writer.tip.seq) + "model.safetensors")
        assert not {failed, under_way} & set(why(plan(writer.store)))
        writer.anchor(11)
        found = why(plan(writer.store))
        assert found[failed] is Why.UNRECORDED
        assert under_way not in found, "it has the place of the one that was recorded"

    def test_what_a_probe_left_behind(self, writer: HistoryWriter) -> None:
        left = writer.put("probe/00ff/twice")
        assert why(plan(writer.store))[left] is Why.PROBE

    def test_objects_that_are_gone_already(self, writer: HistoryWriter) -> None:
        """Somebody else collects too."""
        first, second = plan(writer.store, KEEP_2), plan(writer.store, KEEP_2)

        async def both() -> None:
            ledger = Ledger(writer.store)
            await ledger.read()
            await ledger.claim("trainer")
            await Collector(ledger).raise_floor(first)
            for planned in (first, second):
                assert (await Collector(ledger).delete(planned)).objects == len(first.items)

        asyncio.run(both())


class TestWhatStays:
    def test_ledger_layout_replicas_and_the_vector_of_version_0(self, writer: HistoryWriter) -> None:
        writer.put(names.replica("r1"), b'{"version": 0, "state": "serving"}')
        kept = [k for k in writer.store.objects if k.split("/")[0] in ("ledger", "layouts", "replicas")]
        run(writer.store, RetentionPolicy(versions=1))
        for key in [*kept, names.vector(0, 0)]:
            assert key in writer.store.objects

    def test_no_report_of_a_replica_moves_the_floor(self, writer: HistoryWriter) -> None:
        """Must L7."""
        plain = plan(writer.store, KEEP_2)
        writer.put(names.replica("r1"), b'{"version": 10}')
        assert plan(writer.store, KEEP_2) == plain

    def test_the_open_attempt(self, writer: HistoryWriter) -> None:
        writer.claim()
        living = writer.put(chunk(11, writer.open().seq))
        run(writer.store)
        assert living in writer.store.objects

    def test_what_is_not_recognised_is_told(self, writer: HistoryWriter) -> None:
        strange = [
            "anchors/notes.txt", "data/0/0/other.bin", "data/007/2/x.dcr", "data/1/2/deep/x.dcr", "data/1/2/x.txt",
            "data/1/x.dcr", "probe/x",
        ]  # fmt: skip
        for key in strange:
            writer.put(key)
        planned, _ = run(writer.store, KEEP_2)
        assert sorted(planned.unknown) == strange
        assert set(strange) <= set(writer.store.objects)

    def test_all_of_an_anchor_whose_index_cannot_be_read(self, writer: HistoryWriter) -> None:
        index = next(k for k in writer.store.objects if k.startswith("anchors/8/") and k.endswith("index.json"))
        del writer.store.objects[index]
        assert not [key for key in why(plan(writer.store)) if key.startswith("anchors/8/")]

    def test_nothing_is_written_by_a_plan(self, writer: HistoryWriter) -> None:
        before = dict(writer.store.objects)
        plan(writer.store, KEEP_2)
        assert writer.store.objects == before
        assert not {"create", "delete", "overwrite"} & set(writer.store.requests)


class TestUnexplained:
    """Objects that the ledger should know of are no rubbish: it has lost records, and nothing is deleted."""

    @pytest.mark.parametrize(
        "key",
        [
            names.chunk(11, 99, "g", 0, "a0", 0),
            names.chunk(3, 99, "g", 0, "a0", 0),
            names.chunk(12, 5, "g", 0, "a0", 0),
            names.chunk(7, 1, "g", 0, "a0", 0),
            names.anchor(9, 99) + "index.json",
            names.anchor(11, 5) + "index.json",
        ],
    )
    def test_an_object_of_a_later_record_is_an_alarm(self, writer: HistoryWriter, key: str) -> None:
        writer.put(key)
        before = dict(writer.store.objects)
        assert plan(writer.store, KEEP_2).unexplained == (key,)
        for policy in (NOTHING, KEEP_2):
            with pytest.raises(Corrupt, match=f"does not know of {key}"):
                run(writer.store, policy)
        assert writer.store.objects == before

    def test_a_ledger_that_lost_its_tail_deletes_nothing(self, writer: HistoryWriter) -> None:
        """From any record on. As long as nothing but an end of an attempt or an anchor is lost, nobody can tell."""
        whole, told, rubbish = dict(writer.store.objects), 0, aborted(writer)
        for first in range(2, writer.tip.seq):
            lost = {names.record(seq) for seq in range(first, writer.tip.seq + 1)}
            writer.store.objects = {key: body for key, body in whole.items() if key not in lost}
            with contextlib.suppress(Corrupt):
                run(writer.store)
                told -= 1
            told += 1
            gone = {key for key in whole if key not in writer.store.objects} - lost
            assert {key for key in gone if key.startswith("data/")} <= {rubbish}
        assert told > 20

    def test_a_second_history_over_the_first_deletes_nothing_of_it(self, writer: HistoryWriter) -> None:
        """A claim in a hole, as an older release made it: the records of the first history are void after it."""
        whole, rubbish = dict(writer.store.objects), aborted(writer)
        for hole in range(3, writer.tip.seq - 1):
            writer.store.objects = dict(whole)
            second = copy.copy(writer)
            second.tip = begin(whole[names.record(0)])[0]
            for seq in range(1, writer.tip.seq + 1):
                if seq == hole:
                    second.claim()
                else:
                    second.tip = fold(second.tip, whole[names.record(seq)]).tip
            for version in range(second.tip.state.seal.version + 1, 12):
                writer.put(chunk(version, second.open().seq))
                second.seal()
            with contextlib.suppress(Corrupt):
                run(writer.store)
            first = {key for key in whole if key.startswith("data/")} - {rubbish}
            assert first <= set(writer.store.objects), f"a second history from record {hole} on"

    def test_objects_of_an_attempt_that_opens_now_are_explained(self, writer: HistoryWriter) -> None:
        """They come after the ledger was read, and before they are listed."""
        ledger = Ledger(writer.store)

        async def check() -> Plan:
            await ledger.read()
            writer.claim()
            writer.put(chunk(11, writer.open().seq))
            return await Collector(ledger).plan(NOTHING)

        assert asyncio.run(check()).unexplained == ()


class TestOrder:
    def watch(self, store: MemoryStore) -> list[str]:
        """What is written and deleted, in order."""
        seen = []

        async def see(operation: str, key: str) -> None:
            if operation in ("create", "delete"):
                seen.append(f"{operation} {key.split('/')[0]}")

        store.before = see
        return seen

    def test_claim_floor_release_deletes(self, writer: HistoryWriter) -> None:
        seen, first = self.watch(writer.store), writer.tip.seq + 1
        run(writer.store, KEEP_2)
        kinds = [type(decode_record(writer.store.objects[names.record(first + n)])).__name__ for n in range(3)]
        assert kinds == ["Epoch", "Floor", "Release"]
        assert seen[:3] == ["create ledger"] * 3
        assert set(seen[3:]) == {"delete data", "delete anchors"}

    def test_no_delete_before_the_floor_is_in_the_ledger(self, writer: HistoryWriter) -> None:
        async def check() -> None:
            ledger = Ledger(writer.store)
            await ledger.read()
            collector = Collector(ledger)
            with pytest.raises(UsageError, match="before the ledger says so"):
                await collector.delete(await collector.plan(KEEP_2))

        asyncio.run(check())
        assert "delete" not in writer.store.requests

    def test_a_floor_record_whose_fate_is_open_deletes_nothing(self, writer: HistoryWriter) -> None:
        seen = self.watch(writer.store)
        ledger, floors = Ledger(writer.store), []

        async def lose(operation: str, key: str) -> None:
            if operation == "create" and ledger.epoch is not None and not floors:
                floors.append(key)
                writer.store.faults.extend([Fault.REQUEST_LOST] * 20)

        writer.store.before = lose
        with pytest.raises(StoreUnavailable):
            asyncio.run(collect(ledger, KEEP_2))
        assert "delete" not in writer.store.requests
        assert seen == []

    def test_an_interrupted_sweep_is_taken_up_by_anybody(self, writer: HistoryWriter) -> None:
        planned, left = plan(writer.store, KEEP_2), 3

        async def die(operation: str, key: str) -> None:
            nonlocal left
            left -= operation == "delete"
            if left < 0:
                raise StoreUnavailable("the bucket went away")

        writer.store.before = die
        with pytest.raises(StoreUnavailable):
            run(writer.store, KEEP_2)
        writer.store.before = None
        again, done = run(writer.store)
        assert (again.floor.floor, done.objects) == (8, len(planned.items) - 3)
        assert not plan(writer.store, KEEP_2).items


class TestWhoMay:
    def test_a_held_stream_is_the_holders(self, writer: HistoryWriter) -> None:
        writer.claim()
        before = dict(writer.store.objects)
        with pytest.raises(Fenced, match=r"publisher trainer holds .* only the holder raises the floor") as refused:
            run(writer.store, KEEP_2)
        assert "--keep-versions" in refused.value.hint
        assert writer.store.objects == before

    def test_beside_a_publisher_what_is_dead_goes(self, writer: HistoryWriter) -> None:
        writer.claim()
        living = writer.put(chunk(11, writer.open().seq))
        planned, _ = run(writer.store)
        assert {item.why for item in planned.items} == {Why.UNSEALED}
        assert living in writer.store.objects

    @pytest.mark.parametrize("options", [{"take_over": True}, {"name": "trainer"}, {"name": "x", "take_over": True}])
    def test_a_dead_publisher_is_claimed_from(self, writer: HistoryWriter, options: Any) -> None:
        writer.claim()
        assert run(writer.store, KEEP_2, **options)[0].floor.floor == 8

    def test_another_name_needs_a_take_over(self, writer: HistoryWriter) -> None:
        writer.claim()
        with pytest.raises(Fenced, match="x may not claim from trainer"):
            run(writer.store, KEEP_2, name="x")

    def test_whoever_dies_between_claim_and_release_keeps_no_publisher_out(self, writer: HistoryWriter) -> None:
        """Must P6: it claimed under the publisher's own name."""

        async def die() -> None:
            ledger = Ledger(writer.store)

            async def cut(operation: str, key: str) -> None:
                if operation == "create" and ledger.epoch is not None:
                    raise StoreUnavailable("the bucket went away")

            writer.store.before = cut
            with pytest.raises(StoreUnavailable):
                await collect(ledger, KEEP_2)
            writer.store.before = None
            again = Ledger(writer.store)
            await again.claim("trainer")
            assert again.holds

        asyncio.run(die())

    def test_there_must_be_a_stream(self, store: MemoryStore) -> None:
        with pytest.raises(NotFound):
            run(store)

    @pytest.mark.parametrize(("versions", "hours"), [(-1, None), (None, -1.0), (None, float("nan")), (1, 1e9)])
    def test_a_policy_that_is_none(self, versions: int | None, hours: float | None) -> None:
        with pytest.raises(UsageError):
            RetentionPolicy.of(versions, hours)


class TestRaces:
    """Must L5 under every interleaving that matters: what is dead stays dead, whoever decides it."""

    def whole(self, store: MemoryStore) -> None:
        """Everything at or above the floor is there, and the newest anchor at the floor or above leads to the head."""

        async def check() -> None:
            ledger = Ledger(store)
            state = await ledger.read()
            anchors = await ledger.history.anchors()
            assert state.floor <= (state.anchor.version if state.anchor else 0)
            assert not state.floor or min(a.version for a in anchors) == state.floor
            for anchor in anchors:
                assert anchor.index.key in store.objects
            for seal in await ledger.history.between(max(state.floor, 1)):
                assert isinstance(seal, Seal)
                assert seal.fingerprint.key in store.objects
                assert chunk(seal.version, seal.attempt) in store.objects

        asyncio.run(check())

    @given(st.integers(0, 40), st.integers(0, 40), st.sampled_from(["gc", "publish", "anchor", "take over"]))
    @settings(max_examples=120, deadline=None)
    def test_a_second_actor_at_any_request(self, at: int, then: int, what: str) -> None:
        """Two collectors, a publisher that goes on, and a takeover between floor and delete."""
        store = MemoryStore()
        writer = HistoryWriter(store)
        writer.claim()
        for version in range(1, 8):
            writer.put(chunk(version, writer.open().seq))
            writer.seal()
            if version in (3, 6):
                writer.anchor(version)
        writer.release()
        count = -1

        async def interfere(operation: str, key: str) -> None:
            nonlocal count
            count += 1
            if count not in (at, at + then):
                return
            store.before, before = None, store.before
            await self.act(store, writer, what)
            store.before = before

        store.before = interfere
        with contextlib.suppress(Fenced):
            run(store, KEEP_2)
        store.before = None
        self.whole(store)

    async def act(self, store: MemoryStore, writer: HistoryWriter, what: str) -> None:
        tip = Ledger(store)
        await tip.read()
        writer.tip = tip.tip
        if what == "gc":
            with contextlib.suppress(Fenced):
                await collect(Ledger(store), RetentionPolicy(versions=1), take_over=True)
            return
        epoch = writer.tip.state.epoch
        if what == "take over" or epoch is None or epoch.released or epoch.seq != writer.epoch:
            writer.claim()
        if writer.tip.state.open is None:
            writer.put(chunk(writer.tip.state.seal.version + 1, writer.open().seq))
        writer.seal()  # perhaps of an attempt that was open when the collector planned
        if what == "anchor":
            writer.anchor(writer.tip.state.seal.version)
        writer.put(chunk(writer.tip.state.seal.version + 1, writer.open().seq))
