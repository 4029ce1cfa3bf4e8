"""Damage of the baseline and of the bucket: it is found, it is repaired, the fleet ends at the trainer's weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.faults.failing_requests import FaultyStore, SmallWorld, kill, run, same
from support.streams.publish_world import PublishWorld, step_weights
from support.streams.replica import Replica

from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.errors import StoreUnavailable
from dcr_daemon.events import Alarm, AnchorPut, Committed, Retrying
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.records import Seal
from dcr_daemon.publish.group.leader import Leader


def alarms(world: SmallWorld) -> list[str]:
    return [alarm.must for alarm in world.events.of(Alarm)]


async def newest(world: SmallWorld, store: Any) -> Any:
    """The newest anchor, as a stranger loads it, and its version."""
    ledger = Ledger(store)
    await ledger.read()
    anchor = (await ledger.history.anchors())[0]
    return anchor.version, await world.anchor(store, anchor)


async def tended(session: Leader) -> None:
    """Until the scrub has found something."""
    await asyncio.wait_for(session.run_idle_checks(), 60)
    await session.repair()


@pytest.mark.parametrize("spot", [(0, 5), (1, 6), (2, 0)])
def test_the_scrub_finds_one_flipped_bit_and_the_baseline_is_rebuilt_and_anchored(
    small_world: SmallWorld, spot: tuple[int, int]
) -> None:
    world = small_world

    async def check() -> None:
        store = FaultyStore()
        session = await world.open(store, scrub_rate=1e6, anchor_every=None, anchor_share=None)
        await world.publish(session, world.draw(1))
        session.context.baseline[spot[0]][spot[1]] ^= 4
        await tended(session)
        assert await world.proved(session)
        version, weights = await newest(world, store)
        assert version == 1
        assert same(weights, world.draw(1))
        await world.publish(session, world.draw(2))
        await session.close()
        assert alarms(world) == ["P4"]
        assert len(await world.versions(store)) == 3

    run(check())


def test_a_scrub_of_a_sound_baseline_finds_nothing_whatever_was_published_or_undone(small_world: SmallWorld) -> None:
    world = small_world

    async def check() -> None:
        session = await world.open(FaultyStore(), scrub_rate=1e9)
        for seed in range(1, 6):
            await world.publish(session, world.draw(seed))
            await world.diff(session, world.draw(90 + seed))
            await session.abort_unless_sealed("given up")
            assert all([await session.context.baseline.intact(n) for n in range(len(session.context.baseline.blocks))])
        await session.close()
        assert alarms(world) == []

    run(check())


@pytest.mark.parametrize("restart", ["no", "with its state", "without its state", "before the anchor"])
def test_damage_that_went_into_a_sealed_version_is_gone_round_by_the_next(
    small_world: SmallWorld, restart: str
) -> None:
    """Nobody can build such a version: the one after it stands on no chain, and has an anchor at once."""
    world = small_world

    async def check() -> None:
        store = FaultyStore()
        session = await world.open(store, scrub_rate=1e6, anchor_every=None, anchor_share=None)
        await world.publish(session, world.draw(1))
        session.context.baseline[0][7] ^= 0x40
        await world.publish(session, world.draw(2))  # sealed, with a vector that no bytes have
        assert not await world.proved(session)
        if restart in ("no", "before the anchor"):
            await tended(session)
        else:
            kill(session)
            if restart == "without its state":
                world.forget("one")
            session = await world.open(store, scrub_rate=1e6, anchor_every=None, anchor_share=None)
        assert "P4" in alarms(world)
        assert session.context.baseline.unverified_base
        await world.publish(session, world.draw(3))
        assert not session.context.baseline.unverified_base
        if restart == "before the anchor":
            kill(session)
            session = await world.open(store, anchor_every=None, anchor_share=None)
        else:
            await session.anchor_if_due()
        version, weights = await newest(world, store)
        assert version == 3
        assert same(weights, world.draw(3))
        await world.publish(session, world.draw(4))
        assert await world.proved(session)
        await session.anchor_if_due()
        assert len([event for event in world.events.of(AnchorPut) if event.version == 4]) == 0, "one was enough"
        kill(session)
        world.forget("one")  # whoever builds the head later goes by the anchor
        session = await world.open(store, anchor_every=None, anchor_share=None)
        assert await world.proved(session)
        assert not session.context.baseline.unverified_base
        await session.close()

    run(check())


def test_an_abort_finds_damage_by_the_fingerprint_and_rebuilds(small_world: SmallWorld) -> None:
    world = small_world

    async def check() -> None:
        store = FaultyStore()
        session = await world.open(store)
        await world.publish(session, world.draw(1))
        session.context.baseline[0][7] ^= 0x40
        await world.diff(session, world.draw(2))
        await session.abort_unless_sealed("given up")
        assert alarms(world) == ["P7"]
        assert session.context.baseline.version is None
        await world.publish(session, world.draw(3))
        assert same((await world.versions(store))[2], world.draw(3))
        await session.close()

    run(check())


@pytest.mark.parametrize("what", ["chunk", "vector", "part", "anchor and chunk"])
@pytest.mark.parametrize("how", ["damaged", "deleted"])
def test_a_bucket_from_which_the_head_cannot_be_built_any_more(small_world: SmallWorld, what: str, how: str) -> None:
    """Damage is gone round by the next version; what is merely missing may come yet, and is waited for."""
    world = small_world
    suffixes = {"chunk": (".dcr",), "vector": ("fingerprint.bin",), "part": (".part.json",)}

    async def check() -> None:
        store = FaultyStore()
        session = await world.open(store, anchor_every=None, anchor_share=None, upload_base=what == "anchor and chunk")
        for seed in (1, 2):
            await world.publish(session, world.draw(seed))
        kill(session)
        world.forget("one")
        for key in [key for key in store.objects if key.startswith(("data/2/", "anchors/"))]:
            if key.endswith(suffixes.get(what, (".dcr", ".safetensors"))):
                if how == "damaged":
                    store.objects[key] = bytes(reversed(store.objects[key]))
                else:
                    del store.objects[key]
        if how == "deleted":
            with pytest.raises(StoreUnavailable, match="did not appear"):
                await world.open(store, anchor_every=None, anchor_share=None)
            again = [event.what for event in world.events.of(Retrying) if "trying" in event.what]
            assert not again or what == "anchor and chunk", "no other way leads round it: it is waited for once"
            return
        session = await world.open(store, anchor_every=None, anchor_share=None)
        assert alarms(world) == ["P4"]
        await world.publish(session, world.draw(3))
        await session.anchor_if_due()
        version, weights = await newest(world, store)
        assert version == 3
        assert same(weights, world.draw(3))
        await session.close()

    run(check())


def test_an_anchor_of_bytes_that_change_while_they_are_read_is_never_recorded(small_world: SmallWorld) -> None:
    world = small_world

    async def check() -> None:
        store = FaultyStore()
        session = await world.open(store, anchor_every=None, anchor_share=None)
        await world.publish(session, world.draw(1))

        def flip(number: int, operation: str, key: str) -> None:
            if key == "ledger/0000000000000005.json":  # the read before the anchor: after the proof, before the bytes
                session.context.baseline[0][3] ^= 1

        store.spoil = flip
        await session.anchor_if_due(at_once=True)
        store.spoil = lambda number, operation, key: None
        assert [event.version for event in world.events.of(AnchorPut)] == [0]
        assert alarms(world) == ["P4"]
        await session.anchor_if_due(at_once=True)  # under names that are taken: later
        await world.publish(session, world.draw(2))
        await session.anchor_if_due()  # it is owed
        assert [event.version for event in world.events.of(AnchorPut)] == [0, 2]
        assert len(await world.versions(store)) == 3
        await session.close()

    run(check())


def test_a_fleet_ends_bit_equal_to_the_trainer_after_a_poisoned_version(world: PublishWorld) -> None:
    """A real replica refuses the version made from a damaged baseline, waits, and comes by the anchor of the next."""
    from dcr_daemon.publish.group.opening import open_leader
    from dcr_daemon.publish.inputs.sources import FileSource
    from dcr_daemon.publish.options import PublishOptions

    chain = [world.weights, *(step_weights(world.weights, seed=seed) for seed in (1, 2, 3))]
    home: Path = world.root / "replica"
    home.mkdir()
    world.write(home / "current", world.weights)
    replica = Replica(world.url, home, home / "current")

    async def publish(session: Leader, version: int) -> Seal:
        attempt = await session.begin()
        with Checkpoint(world.write(world.root / f"v{version}", chain[version])) as checkpoint:
            files = [(file, spec) for file in checkpoint.files for spec in file.specs]
            await attempt.diff([(session.layout.index(s.name), FileSource(f, s)) for f, s in files])
            await attempt.finish()
            await session.seal(attempt)
        return await session.ledger.history.seal(version)

    async def check() -> None:
        options = PublishOptions(state=world.state, base=world.base, create=True, workers=2, scrub_rate=1e9)
        session = await open_leader(options, world.store(), emit=world.events)
        async with replica.running() as task:
            await publish(session, 1)
            await replica.until(lambda: [e for e in replica.events.of(Committed) if e.version == 1], task)
            session.context.baseline[0][11] ^= 0x10
            await publish(session, 2)
            await replica.until(lambda: [e for e in replica.events.of(Alarm) if "poisoned" in e.what], task)
            await asyncio.wait_for(session.run_idle_checks(), 60)
            await session.repair()
            await publish(session, 3)
            await session.anchor_if_due()
            await replica.until(lambda: [e for e in replica.events.of(Committed) if e.version == 3], task)
        await session.close()

    asyncio.run(check())
    with Checkpoint(home / "current") as served:
        assert all(np.array_equal(served.bits(name), bits) for name, bits in chain[3].items())
    assert [event.version for event in replica.events.of(Committed)] == [1, 3]
