"""Ten thousand versions of history cost a reader no more requests than a few do (must L5; docs/PROTOCOL.md)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stores.memory import MemoryStore
from support.streams.record_history import LAYOUT, HistoryWriter, vector_of

from dcr_daemon.cli.log import read_rows
from dcr_daemon.cli.status import read_status
from dcr_daemon.engine.port import TensorClass
from dcr_daemon.errors import Corrupt
from dcr_daemon.events import discard
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.fold import fold
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.objects import Objects
from dcr_daemon.ledger.read_ahead import MOST
from dcr_daemon.ledger.records import Seal, SealRef
from dcr_daemon.subscribe import locate as locate_module
from dcr_daemon.subscribe.locate import LiveWeights, locate

HEAD = 10_000
SEARCH = 34  #: 2 · log2 of the 20,000 records, and a few to be sure of what was found

LOOK = 12  #: ten GETs above the tail and two LISTs: that it is not the edge of a hole


@pytest.fixture(scope="module")
def long() -> MemoryStore:
    """10,000 versions, an anchor every 100; nothing collected yet."""
    store = MemoryStore()
    writer = HistoryWriter(store)
    writer.claim()
    writer.versions(HEAD, anchors_every=100)
    return store


@pytest.fixture(scope="module")
def bare() -> MemoryStore:
    """10,000 versions and no anchor at all."""
    store = MemoryStore()
    writer = HistoryWriter(store)
    writer.claim()
    writer.versions(HEAD)
    return store


def count(store: MemoryStore) -> int:
    """Requests since the last count."""
    total = sum(store.requests.values())
    store.requests.clear()
    return total


async def reader(store: MemoryStore) -> Ledger:
    store.requests.clear()
    ledger = Ledger(store)
    await ledger.read()
    return ledger


async def test_a_cold_reader_finds_the_tail(long: MemoryStore) -> None:
    ledger = await reader(long)
    assert ledger.state.seal.version == HEAD
    assert count(long) <= SEARCH + LOOK


@pytest.mark.parametrize("version", [1, 2, 17, 4_999, 5_000, 9_001, HEAD - 13, HEAD - 1, HEAD])
@pytest.mark.parametrize("history", ["long", "bare"])
async def test_one_old_version_is_jumped_to(history: str, version: int, request: pytest.FixtureRequest) -> None:
    store = request.getfixturevalue(history)
    ledger = await reader(store)
    count(store)
    assert (await ledger.history.seal(version)).version == version
    assert count(store) <= SEARCH
    assert (await ledger.history.seal(version)).version == version
    assert count(store) == 0, "what was read once is not read again"


async def found(store: MemoryStore, content: int, *, hint: int | None = None) -> int | None:
    ledger = await reader(store)
    count(store)
    objects = Objects(store, floor=lambda: ledger.state.floor, patience=0)
    classes = [TensorClass.EXACT] * len(LAYOUT)
    return await locate(
        ledger, LiveWeights(vector_of(content), classes), objects=objects, layout=LAYOUT, highest=HEAD, hint=hint,
        emit=discard,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("content", "hint", "most"),
    [(HEAD, None, 3), (HEAD - 3, None, 6), (HEAD - 3, HEAD - 3, 6), (7, 7, SEARCH), (0, 0, 2)],
)
async def test_an_engine_is_recognised(long: MemoryStore, content: int, hint: int | None, most: int) -> None:
    assert await found(long, content, hint=hint) == content
    assert count(long) <= most


@pytest.mark.parametrize("content", [1_000_000, 7])
async def test_weights_nobody_can_use_the_chain_for_are_not_searched_for_ever(long: MemoryStore, content: int) -> None:
    """Unknown ones, and ancient ones that do not say what they are: an anchor is the cheaper way."""
    assert await found(long, content) is None
    # Guesses of where seals lie are wrong where an anchor stands between them.
    assert count(long) <= locate_module.RECENT + 4 + 4 * MOST


async def test_without_an_anchor_the_whole_history_is_searched(bare: MemoryStore) -> None:
    assert await found(bare, 7) == 7


@pytest.mark.parametrize(("have", "hops", "most"), [(HEAD - 3, 3, 6), (None, 0, 70), (7, 0, 70), (9_990, 0, 70)])
async def test_a_route_reads_what_decides_it(long: MemoryStore, have: int | None, hops: int, most: int) -> None:
    """From 9,990 the chain is 10 deltas and the anchor of 10,000 as heavy as 50: the chain would win, were it read."""
    ledger = await reader(long)
    count(long)
    route = await ledger.history.route(have, HEAD)
    assert len(route.hops) == (10 if have == 9_990 else hops)
    assert count(long) <= most


async def test_status_costs_what_it_shows(long: MemoryStore) -> None:
    long.requests.clear()
    status = await read_status(long)
    assert status["head"]["version"] == HEAD
    assert len(status["anchors"]) == 100
    assert count(long) <= SEARCH + LOOK + 100 + 4


async def test_the_log_costs_what_it_shows(long: MemoryStore) -> None:
    long.requests.clear()
    rows = await read_rows(Ledger(long), 20)
    assert [row["version"] for row in rows] == list(range(HEAD - 19, HEAD + 1))
    assert count(long) <= 2 * SEARCH + 3 * 20


async def test_a_missing_record_in_the_way_is_an_error_and_not_a_guess() -> None:
    store = MemoryStore()
    writer = HistoryWriter(store)
    writer.claim()
    writer.versions(300)
    ledger = await reader(store)
    for seq in range(100, 500):
        del store.objects[names.record(seq)]
    with pytest.raises(Corrupt, match="is missing although later ones exist"):
        await ledger.history.seal(150)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_jump_finds_what_a_walk_finds(data: Any) -> None:
    """However uneven the history, and with void records that claim anything in it."""
    store = MemoryStore()
    writer = HistoryWriter(store)
    writer.claim()
    for _ in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(["versions", "aborts", "claims", "void"])):
            case "versions":
                writer.versions(data.draw(st.integers(1, 30)), anchors_every=data.draw(st.sampled_from([0, 1, 7])))
            case "aborts":
                for _ in range(data.draw(st.integers(1, 60))):
                    writer.open()
                    writer.abort()
            case "claims":
                for _ in range(data.draw(st.integers(1, 10))):
                    writer.claim()
            case "void":
                lie(writer, data.draw(st.integers(1, 20)), data.draw(st.integers(0, 40)))
    head = writer.tip.state.seal.version

    async def check() -> None:
        for version in data.draw(st.lists(st.integers(1, max(head, 1)), max_size=4)) if head else []:
            ledger = await reader(store)
            walked = await (await reader(store)).history.between(version)
            assert await ledger.history.seal(version) == walked[0]

    asyncio.run(check())


def lie(writer: HistoryWriter, count: int, version: int) -> None:
    """Void records that claim seals of versions that are none."""
    for _ in range(count):
        seq = writer.tip.seq + 1
        state = msgspec.structs.replace(writer.tip.state, seal=SealRef(min(seq - 1, version), version))
        liar = Seal(
            stream=writer.tip.stream, seq=seq, prev=writer.tip.digest, state=state, nonce="1", at="", epoch=1,
            version=version + 1, base=version, attempt=1, parts=[], before="0" * 16, after="0" * 16, previous=0,
            fingerprint=records.ObjectRef("data/1/1/fingerprint.bin", 0, "0" * 64), changed=0, elements=0, bytes=0,
            dense_bytes=0,
        )  # fmt: skip
        body = records.encode(liar)
        step = fold(writer.tip, body)
        assert step.record is None
        writer.store.objects[names.record(seq)] = body
        writer.tip = step.tip
