"""Walking back through seals and anchors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.stores.memory import MemoryStore
from support.streams.record_writer import RecordWriter

from dcr_daemon.errors import Corrupt, NotFound
from dcr_daemon.ledger import history as module
from dcr_daemon.ledger import names
from dcr_daemon.ledger.ledger import Ledger


@pytest.fixture
def writer(store: MemoryStore) -> RecordWriter:
    """Ten versions; every third had an aborted attempt before, every fourth is anchored."""

    async def write() -> Any:
        writer = RecordWriter(Ledger(store))
        await writer.create()
        await writer.ledger.claim("trainer")
        for version in range(1, 11):
            if version % 3 == 0:
                await writer.open()
                await writer.abort()
            await writer.version(version)
            if version % 4 == 0:
                await writer.anchor(version)
        return writer

    return asyncio.run(write())


async def reader(store: MemoryStore) -> Ledger:
    ledger = Ledger(store)
    await ledger.read()
    return ledger


@pytest.mark.parametrize(("first", "last"), [(0, None), (1, 10), (3, 7), (10, 10), (11, None), (5, 4), (0, 0)])
def test_the_seals_between_two_versions(store: MemoryStore, writer: RecordWriter, first: int, last: int | None) -> None:
    async def check() -> None:
        ledger = await reader(store)
        for _ in range(2):
            found = [seal.version for seal in await ledger.history.between(first, last)]
            assert found == list(range(max(first, 1), (last if last is not None else 10) + 1))

    asyncio.run(check())


def test_what_was_read_once_is_not_read_again(store: MemoryStore, writer: RecordWriter) -> None:
    async def check() -> None:
        ledger = await reader(store)
        await ledger.history.between(5)
        assert set(range(5, 11)) <= set(ledger.history.seals)
        store.requests.clear()
        assert (await ledger.history.seal(7)).bytes == 7
        assert store.requests["get"] == 0
        await ledger.history.seal(3)
        assert store.requests["get"] == 2

    asyncio.run(check())


def test_memory_is_bounded_and_nothing_is_lost_by_it(
    store: MemoryStore, writer: RecordWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT", 3)

    async def check() -> None:
        ledger = await reader(store)
        for _ in range(2):
            assert [seal.version for seal in await ledger.history.between(0)] == list(range(1, 11))
            assert len(ledger.history.seals) <= 3

    asyncio.run(check())


@pytest.mark.parametrize("version", [0, 11])
def test_a_version_without_a_seal(store: MemoryStore, writer: RecordWriter, version: int) -> None:
    async def check() -> None:
        with pytest.raises(NotFound, match=f"version {version}"):
            await (await reader(store)).history.seal(version)

    asyncio.run(check())


def test_anchors_newest_first_down_to_the_floor(store: MemoryStore, writer: RecordWriter) -> None:
    async def check() -> None:
        ledger = await reader(store)
        assert [anchor.version for anchor in await ledger.history.anchors()] == [8, 4]
        repaired = await writer.anchor(8)
        assert await ledger.history.anchors() != [repaired], "as of what this reader has read"
        await ledger.read()
        anchors = await ledger.history.anchors()
        assert [anchor.version for anchor in anchors] == [8, 4]
        assert anchors[0].seq == repaired.seq, "the newest of one version"
        await writer.floor(5)
        await ledger.read()
        assert [anchor.version for anchor in await ledger.history.anchors()] == [8]

    asyncio.run(check())


def test_a_route_costs_the_same_however_long_the_history(store: MemoryStore) -> None:
    async def check() -> None:
        writer = RecordWriter(Ledger(store))
        await writer.create()
        await writer.ledger.claim("trainer")
        for version in range(1, 301):
            await writer.version(100)
            if version % 5 == 0:
                await writer.anchor(version)
        for have, hops in ((299, (300,)), (None, ())):
            ledger = await reader(store)
            store.requests.clear()
            route = await ledger.history.route(have, 300)
            assert route.hops == hops
            assert store.requests["get"] < 20, "neither every anchor nor every seal"

    asyncio.run(check())


def test_an_old_version_is_found_by_way_of_the_anchors_above_it(store: MemoryStore, writer: RecordWriter) -> None:
    async def check() -> None:
        ledger = await reader(store)
        await ledger.history.anchors()
        store.requests.clear()
        assert (await ledger.history.seal(2)).bytes == 2
        assert store.requests["get"] == 3, "from the anchor of version 4 down"

    asyncio.run(check())


def test_the_anchor_of_one_version(store: MemoryStore, writer: RecordWriter) -> None:
    async def check() -> None:
        history = (await reader(store)).history
        assert (await history.anchor(4)).version == 4
        for version in (0, 6, 10):
            with pytest.raises(NotFound, match=f"version {version} "):
                await history.anchor(version)

    asyncio.run(check())


@pytest.mark.parametrize("have", [None, 3, 11])
def test_no_route_to_a_version_that_is_not_sealed(store: MemoryStore, writer: RecordWriter, have: int | None) -> None:
    async def check() -> None:
        with pytest.raises(NotFound, match=r"version 11 .* is not sealed; the newest is 10"):
            await (await reader(store)).history.route(have, 11)

    asyncio.run(check())


@pytest.mark.parametrize("damage", ["gone", "junk", "another record"])
def test_a_damaged_record_is_named(store: MemoryStore, writer: RecordWriter, damage: str) -> None:
    async def check() -> None:
        ledger = await reader(store)
        seq = (await ledger.history.seal(3)).previous
        if damage == "gone":
            del store.objects[names.record(seq)]
        else:
            store.objects[names.record(seq)] = b"{}" if damage == "junk" else store.objects[names.record(seq - 1)]
        with pytest.raises(Corrupt, match=f"record {seq} "):
            await (await reader(store)).history.seal(1)

    asyncio.run(check())
