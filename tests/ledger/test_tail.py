"""Cold readers: few requests, and the same answer as whoever read every record (must L2)."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stores.memory import MemoryStore
from support.streams.record_writer import RecordWriter, make_open, make_seal

from dcr_daemon.errors import Corrupt, NotFound
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.audit.replay import replay
from dcr_daemon.ledger.fold import Tip, begin, fold
from dcr_daemon.ledger.holes import REACH, find_above
from dcr_daemon.ledger.ledger import Header, Ledger
from dcr_daemon.ledger.tail import Tail


class Bench:
    """Writes slots directly: honest records, and every kind that is void."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        asyncio.run(RecordWriter(Ledger(store)).create())
        self.tip = begin(store.objects[names.record(0)])[0]
        self.decided = self.tip  #: how far readers go

    def header(self, **changes: Any) -> Header:
        tip = self.tip
        fields = {
            "stream": tip.stream, "seq": tip.seq + 1, "prev": tip.digest, "state": tip.state, "nonce": "0", "at": "",
            "epoch": tip.state.epoch.seq if tip.state.epoch else 0,
        }  # fmt: skip
        return Header(tip.state, tip.seq + 1, fields | changes)

    def put(self, body: bytes) -> None:
        self.store.objects[names.record(self.tip.seq + 1)] = body
        step = fold(self.tip, body)
        if not step.foreign or (self.decided == self.tip and not step.damaged):
            self.decided = step.tip
        self.tip = step.tip

    def claim(self) -> None:
        self.put(records.encode_record(records.Epoch(**self.header(epoch=self.tip.seq + 1).fields, name="trainer")))

    def honest(self) -> None:
        """The next record of an honest publisher."""
        if self.tip.state.epoch is None:
            self.claim()
        elif self.tip.state.open is None:
            self.put(records.encode_record(make_open(self.header())))
        else:
            self.put(records.encode_record(make_seal(self.header())))

    def void(self, kind: str) -> None:
        liar = msgspec.structs.replace(self.tip.state, floor=7)
        match kind:
            case "junk":
                self.put(b"junk")
            case "oversized":
                key = names.record(self.tip.seq + 1)
                self.put(records.Oversized())
                self.store.objects[key] = b"x" * (records.RECORD_LIMIT + 1)
            case "stale":
                self.put(records.encode_record(make_open(self.header(epoch=99_999))))
            case "state":
                self.put(records.encode_record(make_open(self.header(state=liar))))
            case "prev":
                self.put(records.encode_record(make_open(self.header(prev="0" * 64))))
            case "stream":
                self.put(records.encode_record(make_open(self.header(stream="0ther"))))

    async def sequential(self) -> Tip:
        tip = None
        async for step in replay(self.store):
            tip = step.tip if step.decided else tip
        assert tip is not None
        return tip


@pytest.fixture
def bench(store: MemoryStore) -> Bench:
    return Bench(store)


def test_ten_thousand_records_cost_about_two_log_n_requests(bench: Bench) -> None:
    for _ in range(10_000):
        bench.honest()
    bench.store.requests.clear()
    reader = Ledger(bench.store)
    state = asyncio.run(reader.read())
    assert reader.tip == bench.tip
    assert state == bench.tip.state
    assert bench.store.requests["get"] <= 2 * math.ceil(math.log2(10_000)) + 4 + REACH
    assert bench.store.requests["list"] == 2, "of the names above the tail"


@pytest.mark.parametrize("count", [*range(18), 63, 64, 65, 255, 256, 257])
def test_the_tail_is_found_at_every_length(bench: Bench, count: int) -> None:
    for _ in range(count):
        bench.honest()

    async def check() -> None:
        assert await Tail(bench.store).find(0) == count
        reader = Ledger(bench.store)
        await reader.read()
        assert reader.tip == bench.tip == await bench.sequential()

    asyncio.run(check())


@pytest.mark.parametrize("behind", [0, 1, 63, 64, 65, 300])
def test_a_reader_with_memory_goes_on_from_its_mark(bench: Bench, tmp_path: Any, behind: int) -> None:
    async def read() -> Ledger:
        reader = Ledger(bench.store, mark=tmp_path / "mark")
        await reader.read()
        return reader

    for _ in range(100):
        bench.honest()
    asyncio.run(read())
    for _ in range(behind):
        bench.honest()
    bench.store.requests.clear()
    assert asyncio.run(read()).tip == bench.tip
    assert bench.store.requests["get"] <= (behind + 5 if behind < 64 else 2 * math.log2(behind) + 7) + REACH


KINDS = ["junk", "oversized", "stale", "state", "prev", "stream"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_void_records_at_the_tail_do_not_mislead_a_cold_reader(bench: Bench, kind: str, count: int, after: int) -> None:
    for _ in range(20):
        bench.honest()
    for _ in range(count):
        bench.void(kind)
    for _ in range(after):
        bench.honest()

    async def check() -> None:
        reader = Ledger(bench.store)
        assert await reader.read() == bench.tip.state
        assert reader.tip == bench.decided == await bench.sequential()
        assert bool(reader.doubt) is (bench.decided != bench.tip)

    asyncio.run(check())


@settings(max_examples=150, deadline=None)
@given(data=st.lists(st.sampled_from(["honest", "claim", *KINDS]), max_size=40))
def test_cold_and_sequential_readers_agree_on_any_ledger(data: list[str]) -> None:
    """Also what a reader saw at any time before is a prefix of what it sees later."""
    bench = Bench(MemoryStore())
    tips, decided = [bench.tip], [bench.decided]
    for kind in data:
        if kind == "honest":
            bench.honest()
        elif kind == "claim":
            bench.claim()
        else:
            bench.void(kind)
        tips.append(bench.tip)
        decided.append(bench.decided)

    async def check() -> None:
        reader = Ledger(bench.store)
        await reader.read()
        assert reader.tip == bench.decided
        steps = [step async for step in replay(bench.store, ahead=3)]
        assert [step.tip for step in steps] == tips
        assert [step.tip for step in steps if step.decided][-1] == bench.decided

    asyncio.run(check())


class TestGaps:
    """A missing low seq under a present high one is an error (must L2)."""

    @pytest.mark.parametrize("lost", [0, 1, 5, 18, 19])
    def test_a_lost_record_is_an_error(self, bench: Bench, lost: int) -> None:
        for _ in range(20):
            bench.honest()
        del bench.store.objects[names.record(lost)]

        async def sequential() -> None:
            async for _ in replay(bench.store):
                pass

        with pytest.raises((Corrupt, NotFound)):
            asyncio.run(sequential())

    def test_a_reader_at_a_gap_is_told_on_demand(self, bench: Bench) -> None:
        for _ in range(5):
            bench.honest()
        reader = Ledger(bench.store)
        asyncio.run(reader.read())
        for _ in range(8):
            bench.honest()
        del bench.store.objects[names.record(6)]

        async def check() -> None:
            await reader.read()
            assert reader.tip.seq == 5
            assert await find_above(bench.store, 5) == 7
            with pytest.raises(Corrupt, match=r"is damaged: record 6 is missing although later ones exist"):
                await reader.check_gap()

        asyncio.run(check())

    def test_a_free_tail_is_no_gap(self, bench: Bench) -> None:
        for _ in range(5):
            bench.honest()
        reader = Ledger(bench.store)

        async def check() -> None:
            await reader.read()
            await reader.check_gap()

        asyncio.run(check())

    def test_records_that_appear_while_we_look_are_no_gap(self, bench: Bench) -> None:
        for _ in range(5):
            bench.honest()
        reader = Ledger(bench.store)
        asyncio.run(reader.read())

        async def appear(operation: str, key: str) -> None:
            if operation == "get" and key == names.record(7):
                bench.store.before = None
                for _ in range(2):
                    bench.honest()

        bench.store.before = appear
        asyncio.run(reader.check_gap())
        assert asyncio.run(reader.read()) == bench.tip.state
