"""The order of the routes to a version, and that each goes round what was found damaged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import pytest
from support.stores.memory import MemoryStore
from support.streams.record_writer import RecordWriter

from dcr_daemon.errors import Corrupt
from dcr_daemon.ledger import names
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.route import NoRoute, Route
from dcr_daemon.ledger.routes import Routes

NOTHING_BLAMED: Callable[[Routes, Route], None] = lambda routes, route: None  # noqa: E731


@pytest.fixture
def tried(store: MemoryStore) -> Callable[..., list[str]]:
    """The routes to version 6 of a stream with anchors of versions 0, 3 and 5, if each of them fails.

    `damage`: the records that are damaged, each "seal VERSION" or "anchor VERSION".
    """
    slots: dict[str, int] = {}

    async def build() -> None:
        writer = RecordWriter(Ledger(store))
        await writer.create()
        await writer.ledger.claim("trainer")
        await writer.anchor(0, 90)
        for version in range(1, 7):
            slots[f"seal {version}"] = (await writer.version(10)).seq
            if version in (3, 5):
                slots[f"anchor {version}"] = (await writer.anchor(version, 100)).seq
        await writer.open()  # so that the records above are no part of the tail

    async def run(fail: Callable[[Routes, Route], None], damage: Collection[str] = (), **starts: int) -> list[str]:
        bucket = MemoryStore()
        bucket.objects = store.objects | {names.record(slots[record]): b"no record" for record in damage}
        reader = Ledger(bucket)
        await reader.read()
        routes, found = Routes(reader.history, 6, **starts), []
        async for route in routes:
            found.append(f"{route}: {list(route.hops)}")
            assert len(found) < 10, "it ends"
            fail(routes, route)
        return found

    asyncio.run(build())
    return lambda fail=NOTHING_BLAMED, **starts: asyncio.run(run(fail, **starts))


def test_a_start_whose_route_failed_is_not_used_again(tried: Callable[..., list[str]]) -> None:
    anchors = [
        "the anchor of version 5: [6]",
        "the anchor of version 3: [4, 5, 6]",
        "the anchor of version 0: [1, 2, 3, 4, 5, 6]",
    ]
    assert tried() == anchors
    assert tried(base=0) == ["the chain from version 0: [1, 2, 3, 4, 5, 6]", *anchors]


def test_what_the_first_try_overwrote_is_not_started_from_again(tried: Callable[..., list[str]]) -> None:
    assert tried(held=4, base=0)[:2] == [
        "the chain from version 4: [5, 6]",
        "the chain from version 0: [1, 2, 3, 4, 5, 6]",
    ]
    assert len(tried(held=4, base=0)) == 5


def test_no_route_passes_a_damaged_delta(tried: Callable[..., list[str]]) -> None:
    def blame(routes: Routes, route: Route) -> None:
        routes.damaged_deltas.add(4)

    assert tried(blame, base=0) == ["the chain from version 0: [1, 2, 3, 4, 5, 6]", "the anchor of version 5: [6]"]
    assert tried(lambda routes, route: routes.damaged_deltas.add(6)) == ["the anchor of version 5: [6]"]


def test_a_damaged_seal_that_a_dearer_route_passes_stops_no_other(tried: Callable[..., list[str]]) -> None:
    newest = ["the anchor of version 5: [6]"]
    assert tried(damage=["seal 5"]) == newest
    assert tried(damage=["seal 5"], base=0) == newest
    assert tried(damage=["seal 5"], held=4, base=0) == newest
    assert tried(damage=["seal 5"], held=1, base=2) == newest
    # All anchors may be considered again, once the newest is known not to work.
    assert tried(damage=["seal 2"], base=0) == [*newest, "the anchor of version 3: [4, 5, 6]"]
    assert tried(damage=["seal 2"], held=1, base=4)[0] == "the chain from version 4: [5, 6]"


def test_a_damaged_record_of_an_anchor_leaves_the_newer_ones_and_the_chain(tried: Callable[..., list[str]]) -> None:
    chain = "the chain from version 0: [1, 2, 3, 4, 5, 6]"
    assert tried(damage=["anchor 3"], base=0) == ["the anchor of version 5: [6]", chain]
    assert tried(damage=["anchor 5"], base=0) == [chain]


def test_damaged_records_on_every_route_are_raised(tried: Callable[..., list[str]]) -> None:
    for starts in ({}, {"base": 0}, {"held": 1, "base": 0}):
        with pytest.raises(Corrupt, match="does not parse"):
            tried(damage=["seal 2", "anchor 5"], **starts)


def test_without_any_route_the_reason_is_raised(store: MemoryStore) -> None:
    async def run() -> None:
        writer = RecordWriter(Ledger(store))
        await writer.create()
        await writer.ledger.claim("trainer")
        await writer.version()
        async for _ in Routes(writer.ledger.history, 1):
            raise AssertionError("nothing leads there")

    with pytest.raises(NoRoute, match="no anchor at or below it"):
        asyncio.run(run())
