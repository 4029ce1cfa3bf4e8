"""Retention under a reader that is slow: it plans again from an anchor, and never corrupts, spins or waits for ever.

Must L6, with the real subscriber, `materialize` and the real collector, stopped in the middle of a fetch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.streams.writer import StreamWriter

from dcr_daemon.errors import EngineRefused, NotFound
from dcr_daemon.events import Committed, Retrying, Serving
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.retention.collector import collect
from dcr_daemon.ledger.retention.plan import RetentionPolicy
from dcr_daemon.store.port import Entry, Outcome, Store
from dcr_daemon.subscribe.materialize import Materialized, materialize


class Held:
    """A store whose GETs of some keys wait until `go`, as a slow link's would. Counts what is asked for."""

    def __init__(self, inner: Store, held: Callable[[str], bool]) -> None:
        self.inner, self.url, self.held = inner, inner.url, held
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        self.gets = 0

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """The body runs while a GET waits: it begins once there is one, and its end lets all GETs go on."""
        await self.reached.wait()
        yield
        self.go.set()

    async def get(self, key: str, *, limit: int, keep: Any = None) -> bytes:
        self.gets += 1
        if self.held(key) and not self.go.is_set():
            self.reached.set()
            await self.go.wait()
        return await self.inner.get(key, limit=limit)

    async def create(self, key: str, body: bytes | memoryview) -> Outcome:
        return await self.inner.create(key, body)

    async def overwrite(self, key: str, body: bytes) -> None:
        await self.inner.overwrite(key, body)

    async def list(self, prefix: str) -> AsyncIterator[Entry]:
        async for entry in self.inner.list(prefix):
            yield entry

    async def delete(self, keys: Iterable[str]) -> None:
        await self.inner.delete(keys)

    async def close(self) -> None:
        await self.inner.close()


async def gc(stream: StreamWriter, keep: int) -> None:
    """By somebody else, in a process of their own."""
    await stream.ledger.read()
    epoch = stream.ledger.state.epoch
    if stream.ledger.holds and epoch and not epoch.released:
        await stream.ledger.release()
    await collect(Ledger(stream.store), RetentionPolicy(versions=keep))
    await stream.ledger.claim("test")


def data(version: int) -> Callable[[str], bool]:
    return lambda key: key.startswith(f"data/{version}/") and key.endswith(".dcr")


def anchor(version: int) -> Callable[[str], bool]:
    return lambda key: key.startswith(f"anchors/{version}/") and key.endswith(".safetensors")


async def test_a_replica_whose_chain_vanishes_under_it_goes_by_an_anchor(make_stream, make_replica):
    stream = await make_stream(6)
    await stream.publish(1, 2, 3)
    replica = make_replica(stream).at_base(stream)
    replica.store = held = Held(stream.store, data(2))
    async with replica.running() as task:
        async with held.waiting():
            await stream.publish(4, 5)
            await stream.anchor(5)
            await stream.publish(6)
            await gc(stream, 1)
        await replica.until_serving(6, task)
    assert stream.versions.version_of(replica.directory) == 6
    assert [event.route for event in replica.events.of(Committed)][-2:] == ["anchor", "chain"]
    assert held.gets < 200, "no hot loop"


async def test_an_anchor_that_vanishes_in_the_middle_gives_way_to_a_newer_one(make_stream, make_replica):
    stream = await make_stream(4)
    await stream.publish(1)
    await stream.anchor(1)
    replica = make_replica(stream)
    replica.store = held = Held(stream.store, anchor(1))
    async with replica.running() as task:
        async with held.waiting():
            await stream.publish(2, 3)
            await stream.anchor(3)
            await stream.publish(4)
            await gc(stream, 1)
        await replica.until_serving(4, task)
    assert stream.versions.version_of(replica.directory) == 4
    assert not list(replica.home.rglob("anchor-*")), "nothing of the one that vanished is left"


async def test_a_replica_that_slept_through_many_floors_wakes_and_catches_up(make_stream, make_replica):
    """Weights below the floor, whose own vector is gone: recognised as nothing, brought up by an anchor."""
    stream = await make_stream(6)
    replica = make_replica(stream).at_base(stream)
    await stream.publish(1, 2)
    await replica.once()
    await stream.publish(3, 4)
    await stream.anchor(4)
    await gc(stream, 1)
    await stream.publish(5, 6)
    await stream.anchor(6)
    await gc(stream, 1)
    await replica.once()
    assert stream.versions.version_of(replica.directory) == 6


async def test_a_replica_right_below_the_floor_does_not_spin(make_stream, make_replica):
    """The delta from it to the floor is there, and the vector that the delta is checked against is not."""
    stream = await make_stream(3)
    replica = make_replica(stream).at_base(stream)
    await stream.publish(1)
    await replica.once()
    replica.store = held = Held(stream.store, data(2))
    async with replica.serving() as task:
        await stream.publish(2)
        async with held.waiting():
            await stream.anchor(2)
            await stream.publish(3)
            await gc(stream, 2)
        await replica.until_serving(3, task)
    assert stream.versions.version_of(replica.directory) == 3
    assert held.gets < 200


async def test_a_fresh_replica_starts_where_the_chain_is_gone(make_stream, make_replica):
    """At the base, whose vector is never collected, or empty: by anchor and chain."""
    stream = await make_stream(5)
    await stream.publish(1, 2, 3)
    await stream.anchor(3)
    await stream.publish(4, 5)
    await gc(stream, 2)
    for replica in (make_replica(stream).at_base(stream), make_replica(stream)):
        await replica.once()
        assert stream.versions.version_of(replica.directory) == 5


async def test_once_goes_on_if_its_goal_falls_below_the_floor(make_stream, make_replica):
    stream = await make_stream(4)
    await stream.publish(1, 2)
    replica = make_replica(stream).at_base(stream)
    replica.store = held = Held(stream.store, data(1))
    running = asyncio.create_task(replica.once())
    async with held.waiting():
        await stream.publish(3, 4)
        await stream.anchor(4)
        await gc(stream, 1)
    await running
    assert stream.versions.version_of(replica.directory) == 4


async def test_a_view_of_the_floor_that_is_old_is_not_relied_upon(make_stream, make_replica):
    """Nothing tells this reader of the new floor but its own look at the ledger when an object is missing."""
    stream = await make_stream(6)
    await stream.publish(1, 2, 3)
    replica = make_replica(stream).at_base(stream)
    replica.store = held = Held(stream.store, data(1))
    async with replica.running(poll=600.0) as task:
        async with held.waiting():
            await stream.publish(4, 5)
            await stream.anchor(5)
            await gc(stream, 1)
        await replica.until(lambda: replica.events.of(Serving), task, seconds=20)
    assert stream.versions.version_of(replica.directory) == 5
    assert any("below the floor" in event.what for event in replica.events.of(Retrying))


class TestMaterialize:
    async def test_what_vanishes_in_the_middle_is_gone_round(self, make_stream, tmp_path):
        stream = await make_stream(6)
        stream.versions.save(tmp_path / "base", 0)
        await stream.publish(1, 2, 3, 4)
        held = Held(stream.store, data(3))
        building = asyncio.create_task(materialize(held, version=4, out=tmp_path / "out", base=tmp_path / "base"))
        async with held.waiting():
            await stream.anchor(4)
            await stream.publish(5)
            await gc(stream, 2)
        assert (await asyncio.wait_for(building, 30)).version == 4
        assert stream.versions.version_of(tmp_path / "out") == 4

    async def test_an_anchor_that_vanishes_in_the_middle(self, make_stream, tmp_path):
        stream = await make_stream(4)
        await stream.publish(1)
        await stream.anchor(1)
        await stream.publish(2, 3, 4)
        held = Held(stream.store, anchor(1))
        building = asyncio.create_task(materialize(held, out=tmp_path / "out"))
        async with held.waiting():
            await stream.anchor(3)
            await gc(stream, 2)
        assert (await asyncio.wait_for(building, 30)).version == 4
        assert stream.versions.version_of(tmp_path / "out") == 4

    async def test_the_newest_is_whichever_is_newest_once_it_is_built(self, make_stream, tmp_path):
        """It kept so few versions that the newest one at the start was below the floor before it was read."""
        stream = await make_stream(4)
        await stream.publish(1)
        await stream.anchor(1)
        held = Held(stream.store, anchor(1))
        building = asyncio.create_task(materialize(held, out=tmp_path / "out"))
        async with held.waiting():
            await stream.publish(2, 3)
            await stream.anchor(3)
            await gc(stream, 1)
        assert (await asyncio.wait_for(building, 30)).version == 3
        assert stream.versions.version_of(tmp_path / "out") == 3

    @pytest.mark.parametrize("when", ["before", "meanwhile"])
    async def test_a_version_that_was_collected_is_refused_and_says_what_can_be_had(self, when, make_stream, tmp_path):
        stream = await make_stream(4)
        await stream.publish(1)
        await stream.anchor(1)
        await stream.publish(2, 3)
        held = Held(stream.store, anchor(1))
        if when == "before":
            held.go.set()
        building = asyncio.create_task(self.later(held, tmp_path / "out", when))
        if when == "meanwhile":
            await held.reached.wait()
        await stream.anchor(3)
        await gc(stream, 1)
        self.collected.set()
        held.go.set()
        with pytest.raises(NotFound, match="version 2 is below the floor") as refused:
            await asyncio.wait_for(building, 30)
        assert refused.value.hint == "version 3 is the oldest that can be had"
        assert not (tmp_path / "out").exists()

    @pytest.fixture(autouse=True)
    def _collected(self) -> None:
        self.collected = asyncio.Event()

    async def later(self, held: Held, out: Path, when: str) -> Materialized:
        if when == "before":
            await self.collected.wait()
        return await materialize(held, version=2, out=out)


@pytest.mark.parametrize("version", [0, 2])
async def test_a_directory_at_a_version_below_the_floor_is_adopted_and_an_unknown_one_is_not(
    make_stream, make_replica, version
):
    """A copy of what `dcr materialize` once built: its version's objects are deleted, but its record is not."""
    stream = await make_stream(5)
    await stream.publish(1, 2, 3, 4)
    await stream.anchor(4)
    await stream.publish(5)
    await gc(stream, 1)
    replica, stranger = make_replica(stream), make_replica(stream)
    stream.versions.save(replica.directory, version)
    await replica.once()
    assert stream.versions.version_of(replica.directory) == 5
    assert [event.route for event in replica.events.of(Committed)] == ["anchor", "chain"]
    values = {name: bits ^ 1 for name, bits in stream.versions.values[version].items()}
    unknown = stream.versions.put(values)
    stream.versions.save(stranger.directory, unknown)
    with pytest.raises(EngineRefused, match="neither empty nor at a version of this stream"):
        await stranger.once()
    assert stream.versions.version_of(stranger.directory) == unknown
