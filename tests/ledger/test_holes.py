"""A record that is missing under a present one is found before anybody acts (must L2)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.stores.memory import MemoryStore
from support.streams.record_writer import RecordWriter

from dcr_daemon.errors import Corrupt
from dcr_daemon.ledger import names
from dcr_daemon.ledger.fold import Tip
from dcr_daemon.ledger.holes import CONFIRMED, find_above, find_holes
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
    await find_holes(Hazy(store, lacks=range(TAIL)), 500)
    assert store.requests["get"] - reads <= CONFIRMED + 1


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
