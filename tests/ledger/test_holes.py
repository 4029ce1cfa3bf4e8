"""A record that is missing under a present one is found before anybody acts (must L2)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.stores.memory import MemoryStore
from support.streams.record_writer import RecordWriter

from dcr_daemon import runtime
from dcr_daemon.errors import Corrupt, Fenced
from dcr_daemon.ledger import names
from dcr_daemon.ledger.fold import Tip
from dcr_daemon.ledger.holes import NAMED, PAGE, HoleSearch, find_above, find_holes
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.store.port import Entry

TAIL = 40


class Unlisted(MemoryStore):
    """A store whose LIST shows nothing."""

    async def list(self, prefix: str) -> AsyncIterator[Entry]:
        for entry in ():
            yield entry


async def write(store: MemoryStore, *, until: int = TAIL) -> Tip:
    """An honest ledger up to record `until`."""
    writer = RecordWriter(Ledger(store))
    await writer.create()
    await writer.ledger.claim("trainer")
    while writer.ledger.tip.seq < until:
        await (writer.seal() if writer.ledger.state.open else writer.open())
    return writer.ledger.tip


def cut(store: MemoryStore, first: int, width: int) -> None:
    for seq in range(first, first + width):
        del store.objects[names.record(seq)]


HOLES = [(first, width) for first in range(TAIL) for width in range(1, TAIL - first + 1) if first + width <= TAIL]


async def test_nobody_claims_or_believes_the_edge_of_a_hole(store: MemoryStore) -> None:
    """A hole at every place and of every width: a cold reader refuses it, unless it has the true tail; no claim is
    made, and nothing is written."""
    tip = await write(store)
    whole, believed = dict(store.objects), 0
    for first, width in HOLES:
        store.objects = dict(whole)
        cut(store, first, width)
        present, reader = dict(store.objects), Ledger(store)
        with contextlib.suppress(Corrupt):
            await reader.read()
            assert reader.tip == tip, "the search passed the hole"
            believed += 1
        with pytest.raises(Corrupt, match=rf"damaged: records? {first}\b.*missing although later ones exist"):
            await Ledger(store).claim("trainer", take_over=True)
        assert store.objects == present
    assert 0 < believed < len(HOLES)


async def test_a_reader_with_a_mark_is_told_as_well(store: MemoryStore, tmp_path: Any) -> None:
    await write(store, until=10)
    await Ledger(store, mark=tmp_path / "mark").read()
    writer = RecordWriter(Ledger(store))
    await writer.ledger.claim("trainer")
    await writer.version()
    cut(store, 11, 2)
    for _ in range(2):
        with pytest.raises(Corrupt, match="record 11 is missing"):
            await Ledger(store, mark=tmp_path / "mark").read()


async def test_a_refused_reader_is_refused_again(store: MemoryStore) -> None:
    await write(store)
    cut(store, 31, 1)
    reader = Ledger(store)
    for _ in range(2):
        with pytest.raises(Corrupt, match="record 31 is missing"):
            await reader.read()


async def test_a_restored_record_heals_every_reader(store: MemoryStore, tmp_path: Any) -> None:
    """One that was refused as well, and one whose high-water mark is the edge of the hole."""
    tip = await write(store)
    record = store.objects.pop(names.record(7))
    refused = Ledger(store)
    with pytest.raises(Corrupt, match="record 7 is missing"):
        await refused.read()
    with pytest.raises(Corrupt, match="record 7 is missing"):
        await Ledger(store, mark=tmp_path / "mark").read()
    store.objects[names.record(7)] = record
    for ledger in (refused, Ledger(store), Ledger(store, mark=tmp_path / "mark")):
        await ledger.read()
        assert ledger.tip == tip
    await Ledger(store).claim("trainer")


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 100, 511, 512])
@pytest.mark.parametrize("place", [0, 1, 500])
async def test_gets_alone_find_a_hole_below_as_many_records(width: int, place: int) -> None:
    """What the search is proved to find where LIST shows nothing; one record fewer, and it may find nothing."""
    store = Unlisted()
    for seq in [*range(place), *range(place + width, place + 2 * width)]:
        store.objects[names.record(seq)] = b"{}"
    assert await find_above(store, place - 1) is not None
    assert store.requests["get"] <= 11, "the last one twice, since these bytes are no record"


@pytest.mark.parametrize("width", [3, 513, 1400])
async def test_a_listing_finds_the_others(store: MemoryStore, width: int) -> None:
    for seq in [*range(600), 600 + width]:
        store.objects[names.record(seq)] = b"{}"
    assert await find_above(Unlisted(), 599) is None
    assert await find_above(store, 599, by_list=False) is None
    assert (await find_above(store, 599) == 600 + width) is (600 + width < 2000)
    assert (await find_holes(store, 599))[:2] == [600, 601]


async def test_a_listing_decides_nothing(store: MemoryStore) -> None:
    """One that lacks records, and one that shows records that are not there."""
    await write(store)
    assert await find_holes(Hazy(store, lacks=[3, 39, 40]), TAIL) == []
    assert await find_holes(Hazy(store, shows=[TAIL + 5]), TAIL) == []
    assert await find_above(Hazy(store, shows=[TAIL + 5]), TAIL) is None
    cut(store, 3, 2)
    assert await find_holes(Hazy(store, lacks=range(30)), TAIL) == [3, 4]
    reads = store.requests["get"]
    assert len(await find_holes(Hazy(store, lacks=range(TAIL)), 500)) == NAMED
    assert store.requests["get"] - reads <= TAIL + 2 * (NAMED + 20), "what is free is looked at twice"


async def test_a_listing_that_lacks_many_records_hides_no_hole(store: MemoryStore) -> None:
    """As a stale one does, or one of a store that shows no names at all."""
    for seq in range(3 * NAMED):
        store.objects[names.record(seq)] = b"{}"
    cut(store, 2 * NAMED, 1)
    assert await find_holes(Hazy(store, lacks=range(3 * NAMED)), 3 * NAMED - 1) == [2 * NAMED]


async def test_looks_for_holes_cost_what_is_new(store: MemoryStore) -> None:
    """100 LISTs for 100,000 records, at every round of retention."""
    for seq in range(12 * PAGE + 1):
        store.objects[names.record(seq)] = b"{}"
    search, lists = HoleSearch(Pages(store)), list[int]()
    for tail in (11 * PAGE, 11 * PAGE + 5, 11 * PAGE + 900, 12 * PAGE, 12 * PAGE):
        before = store.requests["list"]
        assert await search.find(tail) == []
        lists.append(store.requests["list"] - before)
    assert lists == [13, 2, 2, 3, 2], "the new names, and one thousand of the older ones"


async def test_a_record_that_is_lost_later_is_found_again_and_again(store: MemoryStore) -> None:
    """Among the new records at once, among the older ones in turn, until it is restored."""
    for seq in range(4 * PAGE):
        store.objects[names.record(seq)] = b"{}"
    search = HoleSearch(store)
    assert await search.find(3 * PAGE + 5) == []
    new = store.objects.pop(names.record(3 * PAGE + 7))
    for _ in range(2):
        assert await search.find(4 * PAGE - 1) == [3 * PAGE + 7]
    store.objects[names.record(3 * PAGE + 7)] = new
    assert await search.find(4 * PAGE - 1) == []
    old = store.objects.pop(names.record(7))
    found = [await search.find(4 * PAGE - 1) for _ in range(5)]
    assert [] in found
    assert found[-2:] == [[7], [7]]
    store.objects[names.record(7)] = old
    assert await search.find(4 * PAGE - 1) == []


async def test_nobody_appends_into_a_hole_that_appeared_after_its_tip(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publisher slept; another took over, and the first record of that was lost. A seal in its place counted."""
    now = 0.0
    monkeypatch.setattr(runtime, "monotonic", lambda: now)
    zombie, other = RecordWriter(Ledger(store)), RecordWriter(Ledger(store))
    await zombie.create()
    await zombie.ledger.claim("zombie")
    await zombie.open()
    slot = zombie.ledger.tip.seq + 1
    await other.ledger.claim("other", take_over=True)
    await other.version()
    record = store.objects.pop(names.record(slot))
    now = 60.0
    present = dict(store.objects)
    for append in (zombie.seal, zombie.abort, zombie.ledger.release):
        with pytest.raises(Corrupt, match=f"record {slot} is missing although later ones exist"):
            await append()
    assert store.objects == present
    assert not zombie.ledger.undecided
    store.objects[names.record(slot)] = record
    with pytest.raises(Fenced):
        await zombie.seal()
    assert zombie.ledger.tip == other.ledger.tip


async def test_a_writer_that_looked_a_while_ago_does_not_look_again(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(runtime, "monotonic", lambda: clock[0])
    writer = RecordWriter(Ledger(store))
    await writer.create()
    await writer.ledger.claim("trainer")
    gets = list[int]()
    for clock[0] in (10.0, 20.0, 30.0, 40.0):
        before = store.requests["get"]
        await writer.version()
        gets.append(store.requests["get"] - before)
    assert gets == [0, 1, 0, 1]
    clock[0] = 60.0
    await writer.ledger.look_above()
    clock[0] = 70.0
    before = store.requests["get"]
    await writer.version()
    assert store.requests["get"] == before


class Pages(MemoryStore):
    """The objects of another store, whose LIST is a request for each thousand of names."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__()
        self.objects, self.requests = store.objects, store.requests

    async def list(self, prefix: str) -> AsyncIterator[Entry]:
        shown = [entry async for entry in super().list(prefix)]
        self.requests["list"] += (len(shown) - 1) // PAGE
        for entry in shown:
            yield entry


class Hazy(MemoryStore):
    """The objects of another store, with a LIST that `lacks` records and `shows` others."""

    def __init__(self, store: MemoryStore, lacks: Any = (), shows: Any = ()) -> None:
        super().__init__()
        self.objects, self.requests = store.objects, store.requests
        self._lacks = {names.record(seq) for seq in lacks}
        self._shows = [names.record(seq) for seq in shows]

    async def list(self, prefix: str) -> AsyncIterator[Entry]:
        for key in sorted([*self.objects, *self._shows]):
            if key.startswith(prefix) and key not in self._lacks:
                yield Entry(key, 1)


async def test_records_that_appear_during_the_search_are_read(store: MemoryStore) -> None:
    """Whoever appends while a reader looks above its tail makes no hole."""
    await write(store, until=6)
    writer = RecordWriter(Ledger(store))
    await writer.ledger.read()
    reader, first = Ledger(store), True

    async def appear(operation: str, key: str) -> None:
        nonlocal first
        if first and key == names.record(9):
            first, store.before = False, None
            await writer.ledger.claim("trainer")
            for _ in range(3):
                await writer.version()

    store.before = appear
    await reader.read()
    assert reader.tip == writer.ledger.tip


def test_the_names_of_a_page_begin_alike() -> None:
    for seq in (0, 999, 1000, 123_456):
        assert names.record(seq).startswith(names.record_page(seq // 1000, 3))
        assert not names.record(seq + 1000).startswith(names.record_page(seq // 1000, 3))
