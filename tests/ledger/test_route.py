"""The cheapest route by bytes, against every route there is."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stores.memory import MemoryStore
from support.streams.record_writer import RecordWriter

from dcr_daemon.errors import NotFound, UsageError
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.read_ahead import MOST
from dcr_daemon.ledger.route import NoRoute, Route, plan_route

SIZES = st.integers(0, 9)
Sizes = dict[int, int]


def every_route(have: int | None, target: int, hops: Sizes, anchors: Sizes, floor: int) -> list[Route]:
    """All ways from `have` to `target`: start where we stand or at any anchor, then hop by hop."""
    routes = []
    for start in range(target + 1):
        path = range(start + 1, target + 1)
        if any(version not in hops or version < floor for version in path):
            continue
        cost = sum(hops[version] for version in path)
        if start == have and (start in (0, target) or start >= floor):
            routes.append(Route(None, tuple(path), cost))
        if start in anchors and start >= floor and (have is None or start > have):
            routes.append(Route(start, tuple(path), cost + anchors[start]))
    return routes


@st.composite
def situations(draw: st.DrawFn) -> tuple[int | None, int, Sizes, Sizes, int]:
    target = draw(st.integers(0, 8))
    have = draw(st.none() | st.integers(0, target))
    hops = draw(st.dictionaries(st.integers(1, 8), SIZES, min_size=4))
    anchors = draw(st.dictionaries(st.integers(0, 10), st.integers(0, 30), max_size=3))
    return have, target, hops, anchors, draw(st.integers(0, 5))


@settings(max_examples=2000, deadline=None)
@given(situations())
def test_no_route_is_cheaper(situation: tuple[int | None, int, Sizes, Sizes, int]) -> None:
    have, target, hops, anchors, floor = situation
    routes = every_route(have, target, hops, anchors, floor)
    if not routes:
        with pytest.raises(NoRoute, match=f"version {target}"):
            plan_route(have, target, hops=hops, anchors=anchors, floor=floor)
        return
    route = plan_route(have, target, hops=hops, anchors=anchors, floor=floor)
    assert route in routes
    assert route.bytes == min(other.bytes for other in routes)
    ties = [other for other in routes if other.bytes == route.bytes]
    chain = [other for other in ties if other.anchor is None]
    assert route == (chain[0] if chain else max(ties, key=lambda other: other.anchor or 0)), "a chain, or the newest"


def test_a_version_never_moves_down() -> None:
    """Must E2."""
    with pytest.raises(UsageError, match="version 1 is below 2"):
        plan_route(2, 1, hops={1: 1, 2: 1}, anchors={1: 1}, floor=0)


@pytest.mark.parametrize(
    ("have", "hops", "anchors", "floor", "why"),
    [
        (None, {1: 1, 2: 1}, {}, 0, "there is no anchor at or below it"),
        (None, {1: 1, 2: 1}, {3: 1}, 0, "there is no anchor at or below it"),
        (0, {2: 1}, {}, 0, "the delta of version 1 is not there"),
        (0, {1: 1, 2: 1}, {}, 2, "the delta of version 1 is below the floor 2"),
        (None, {2: 1}, {0: 1}, 0, "the delta of version 1 is not there"),
    ],
)
def test_why_there_is_none(have: int | None, hops: Sizes, anchors: Sizes, floor: int, why: str) -> None:
    with pytest.raises(NoRoute, match=why):
        plan_route(have, 2, hops=hops, anchors=anchors, floor=floor)


class TestInTheLedger:
    """`History.route` reads no more than decides, and decides as if it had read all."""

    @staticmethod
    async def stream(store: MemoryStore, sizes: list[int], anchors: dict[int, int], floor: int) -> Ledger:
        writer = RecordWriter(Ledger(store))
        await writer.create()
        await writer.ledger.claim("trainer")
        for version in range(len(sizes) + 1):
            if version:
                await writer.version(sizes[version - 1])
            if version in anchors:
                await writer.anchor(version, anchors[version])
        if floor:
            await writer.floor(floor)
        reader = Ledger(store)
        await reader.read()
        return reader

    @settings(max_examples=150, deadline=None)
    @given(data=st.data())
    def test_it_agrees_with_the_plan_over_everything(self, data: st.DataObject) -> None:
        sizes = data.draw(st.lists(SIZES, max_size=8))
        anchors = data.draw(st.dictionaries(st.integers(0, len(sizes)), st.integers(0, 30), max_size=3))
        floor = data.draw(st.integers(0, max(anchors, default=0)))
        target = data.draw(st.integers(0, len(sizes)))
        have = data.draw(st.none() | st.integers(0, target))
        avoid = data.draw(st.sets(st.sampled_from(sorted(anchors)), max_size=1)) if anchors else set()
        bad = data.draw(st.sets(st.integers(1, len(sizes)), max_size=1)) if sizes else set()

        async def check() -> None:
            reader = await self.stream(MemoryStore(), sizes, anchors, floor)
            hops = {version: size for version, size in enumerate(sizes, 1) if version not in bad}
            kept = {version: size for version, size in anchors.items() if version not in avoid}
            try:
                expected = plan_route(have, target, hops=hops, anchors=kept, floor=floor)
            except NoRoute:
                with pytest.raises(NoRoute):
                    await reader.history.route(have, target, avoid_anchors=avoid, avoid_deltas=bad)
            else:
                assert await reader.history.route(have, target, avoid_anchors=avoid, avoid_deltas=bad) == expected

        asyncio.run(check())

    def test_a_replica_close_behind_reads_no_old_history(self, store: MemoryStore) -> None:
        async def check() -> None:
            reader = await self.stream(store, [5] * 200, {0: 100, 150: 100}, 0)
            store.requests.clear()
            assert await reader.history.route(197, 200) == Route(None, (198, 199, 200), 15)
            assert store.requests["get"] <= 4 + 2

        asyncio.run(check())

    def test_a_replica_far_behind_reads_down_to_what_an_anchor_costs(self, store: MemoryStore) -> None:
        async def check() -> None:
            reader = await self.stream(store, [5] * 200, {0: 100, 190: 100}, 0)
            store.requests.clear()
            route = await reader.history.route(0, 200)
            assert (route.anchor, route.bytes) == (190, 150)
            assert store.requests["get"] < 40 + 2 * MOST, "beside what was guessed wrong"

        asyncio.run(check())

    def test_an_unsealed_target_is_said_so(self, store: MemoryStore) -> None:
        async def check() -> None:
            reader = await self.stream(store, [5], {}, 0)
            with pytest.raises(NotFound, match=r"version 2 .* is not sealed; the newest is 1"):
                await reader.history.route(0, 2)

        asyncio.run(check())
