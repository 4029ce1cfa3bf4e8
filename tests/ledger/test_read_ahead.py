"""A walk through the ledger costs few round trips, and finds what one that reads slot by slot finds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stores.counted import CountedStore
from support.stores.memory import MemoryStore
from support.streams.record_history import HistoryWriter

from dcr_daemon.ledger import names
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.read_ahead import MOST, ReadOn
from dcr_daemon.ledger.slot import read_slot


def history(versions: int, *, anchors_every: int = 0, digests: bool = True) -> HistoryWriter:
    writer = HistoryWriter(MemoryStore(), digests=digests)
    writer.claim()
    writer.versions(versions, anchors_every=anchors_every)
    return writer


async def test_a_restart_reads_what_is_new_abreast(tmp_path: Path) -> None:
    writer = history(3)
    await Ledger(writer.store, mark=tmp_path / "mark").read()
    writer.versions(30)
    store = CountedStore(writer.store, of=lambda key: key.startswith(names.LEDGER))
    ledger = Ledger(store, mark=tmp_path / "mark")
    assert (await ledger.read()).seal.version == 33
    assert store.most > 8
    assert store.count(names.LEDGER) <= 60 + 2 * MOST


@pytest.mark.parametrize(("new", "reads"), [(0, 1), (1, 2), (2, 4)])
async def test_little_that_is_new_costs_next_to_nothing_more(new: int, reads: int) -> None:
    writer = history(0)
    ledger = Ledger(writer.store)
    await ledger.read()
    for _ in range(new):
        writer.claim()
    writer.store.requests.clear()
    await ledger.read()
    assert sum(writer.store.requests.values()) <= reads


async def test_records_without_a_digest_are_read_one_by_one() -> None:
    """Each is read twice, and again in its turn: not sixteen of them for every one that is used."""
    writer = history(30, digests=False)
    slots = ReadOn(writer.store)
    writer.store.requests.clear()
    for seq in range(60):
        assert await slots.slot(seq) == writer.store.objects[names.record(seq)]
    assert sum(writer.store.requests.values()) == 2 * 60


async def test_anchors_are_read_abreast() -> None:
    writer = history(200, anchors_every=10)
    store = CountedStore(writer.store, of=lambda key: key.startswith(names.LEDGER))
    ledger = Ledger(store)
    await ledger.read()
    store.gets.clear()
    store.most = 0
    assert [anchor.version for anchor in await ledger.history.anchors()] == list(range(200, 0, -10))
    assert store.most > 4
    assert store.count(names.LEDGER) <= 20 + MOST


async def test_the_newest_anchor_alone_costs_one_request() -> None:
    writer = history(50, anchors_every=5)
    ledger = Ledger(writer.store)
    await ledger.read()
    writer.store.requests.clear()
    async for anchor in ledger.history.anchors_back():
        assert anchor.version == 50
        break
    assert sum(writer.store.requests.values()) <= 1


@settings(max_examples=60, deadline=None)
@given(versions=st.integers(0, 20), damaged=st.sets(st.integers(0, 45), max_size=3))
def test_slots_read_abreast_are_those_read_one_by_one(versions: int, damaged: set[int]) -> None:
    writer = history(versions)
    for seq in damaged & set(range(writer.tip.seq + 1)):
        writer.store.objects[names.record(seq)] = b"{" + bytes([seq])

    async def check() -> None:
        slots = ReadOn(writer.store)
        for seq in range(writer.tip.seq + 3):
            assert await slots.slot(seq) == await read_slot(writer.store, seq)

    asyncio.run(check())


async def test_a_slot_that_was_free_too_early_is_read_again() -> None:
    """It was written after it was read, and before the one above it was."""
    writer, late = history(10), names.record(6)
    body = writer.store.objects.pop(late)

    async def arrives(operation: str, key: str) -> None:
        if key == names.record(7):
            writer.store.objects[late] = body

    slots = ReadOn(writer.store)
    for seq in range(4):
        await slots.slot(seq)
    writer.store.before = arrives
    assert await slots.slot(4)
    assert await slots.slot(5)
    assert await slots.slot(6) == body
