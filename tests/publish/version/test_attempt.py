"""What an attempt puts between its last change and its seal: in which order, in how many round trips."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.faults.failing_requests import SmallWorld
from support.measure.round_trips import RoundTrips
from support.ranks.in_process import Group
from support.stores.memory import MemoryStore
from support.streams.publish_world import PublishWorld, step_weights

from dcr_daemon.ledger import records
from dcr_daemon.ledger.records import Seal, decode_record
from dcr_daemon.publish.options import PublishOptions


def test_a_version_takes_three_round_trips(small_world: SmallWorld) -> None:
    """The open; the chunks, the sums, the part and the vector beside each other; the seal."""

    async def run() -> list[list[str]]:
        store = RoundTrips(MemoryStore(), writes=True)
        session = await small_world.open(store, uploads=8, chunk_bytes=1 << 20, anchor_every=None, keep_versions=None)
        await small_world.publish(session, small_world.draw(1))
        await session.retention.ended()
        before = store.trips
        await small_world.publish(session, small_world.draw(2))
        rounds = store.rounds[before:]
        await session.close()
        return rounds

    opened, put, sealed = asyncio.run(run())
    assert len(opened) == len(sealed) == 1
    ends = [key.rpartition("-")[2].partition(".")[2] for key in put if key.startswith("data/")]
    assert {"dcr", "sums", "part.json"} < set(ends)
    assert any(key.endswith("fingerprint.bin") for key in put)


@pytest.mark.parametrize("late", [".dcr", ".sums", ".part.json", "fingerprint.bin"])
def test_a_seal_waits_for_whichever_object_is_last(small_world: SmallWorld, late: str) -> None:
    """Must L4: all that the seal names is in the bucket when the seal is sent."""
    store, absent = MemoryStore(), list[str]()

    async def before(operation: str, key: str) -> None:
        if operation == "create" and key.endswith(late):
            for _ in range(50):
                await asyncio.sleep(0.001)

    right = store._put

    def put(key: str, body: bytes) -> Any:
        if key.startswith("ledger/") and isinstance(seal := decode_record(body), Seal):
            parts = [records.decode_part(store.objects[ref.key]) for ref in seal.parts if ref.key in store.objects]
            named = [*seal.parts, seal.fingerprint, *(part.sums for part in parts)]
            named += [chunk for part in parts for chunk in part.chunks]
            absent.extend(ref.key for ref in named if ref.key not in store.objects)
        return right(key, body)

    async def run() -> None:
        session = await small_world.open(store, uploads=8)
        store.before, store._put = before, put  # type: ignore[method-assign]
        await small_world.publish(session, small_world.draw(1))
        assert session.head == 1
        await session.close()

    asyncio.run(run())
    assert not absent


async def test_the_part_of_a_rank_comes_last(world: PublishWorld) -> None:
    """Must L4: rank 0 takes another rank's part for a sign that all it names is durable."""
    store = MemoryStore()
    options = {"base": world.base, "create": True, "workers": 1, "name": "trainer", "upload_base": False}

    def make(number: int) -> PublishOptions:
        return PublishOptions(state=world.state, **options)

    async def before(operation: str, key: str) -> None:
        if operation == "create" and key.endswith((".dcr", ".sums")):
            for _ in range(20):
                await asyncio.sleep(0.001)

    store.before = before
    async with Group(2, make, lambda number: store, world.events) as group:
        await group.publish(step_weights(world.weights, seed=1), 1)
    created = list(store.objects)
    [part] = [key for key in created if "-1-" in key and key.endswith(".part.json")]
    named = records.decode_part(store.objects[part])
    assert max(created.index(ref.key) for ref in [named.sums, *named.chunks]) < created.index(part)
