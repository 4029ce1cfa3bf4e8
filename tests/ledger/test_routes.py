"""The order of the routes to a version, and that each goes round what was found damaged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from support.stores.memory import MemoryStore
from support.streams.record_writer import RecordWriter

from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.route import NoRoute, Route
from dcr_daemon.ledger.routes import Routes

NOTHING_BLAMED: Callable[[Routes, Route], None] = lambda routes, route: None  # noqa: E731


@pytest.fixture
def tried(store: MemoryStore) -> Callable[..., list[str]]:
    """The routes to version 6 of a stream with anchors of versions 0, 3 and 5, if each of them fails."""

    async def build() -> None:
        writer = RecordWriter(Ledger(store))
        await writer.create()
        await writer.ledger.claim("trainer")
        await writer.anchor(0, 90)
        for version in range(1, 7):
            await writer.version(10)
            if version in (3, 5):
                await writer.anchor(version, 100)

    async def run(fail: Callable[[Routes, Route], None], **starts: int) -> list[str]:
        reader = Ledger(store)
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
