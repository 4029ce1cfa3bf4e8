"""The publisher collects behind its own work, holds nothing up by it, and stops when it is fenced (must L5)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from support.stores.wrapped import WrappedStore
from support.streams.publish_world import PublishWorld, same_weights, step_weights

from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.errors import Fenced, Incompatible, StoreUnavailable, UsageError
from dcr_daemon.events import Alarm, Collected, Degraded, FencedOut, Retrying
from dcr_daemon.ledger import names
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.retention.collector import collect
from dcr_daemon.ledger.retention.plan import RetentionPolicy
from dcr_daemon.publish.group import retention as module
from dcr_daemon.publish.group.leader import Leader
from dcr_daemon.publish.group.opening import open_leader
from dcr_daemon.publish.inputs.sources import FileSource
from dcr_daemon.publish.options import PublishOptions
from dcr_daemon.publish.publisher import Publisher
from dcr_daemon.publish.watch.watcher import WatchOptions, run_watch
from dcr_daemon.store.port import raise_refused


async def opened(world: PublishWorld, store: Any = None, **more: Any) -> Leader:
    defaults: dict[str, Any] = {"state": world.state, "base": world.base, "create": True, "patience": 1.0, "workers": 2}
    return await open_leader(PublishOptions(**defaults | more), store or world.store(), emit=world.events)


async def publish(session: Leader, weights: Any, world: PublishWorld) -> None:
    """One version, and an anchor if one is due."""
    attempt = await session.begin()
    place = world.root / f"checkpoint-{attempt.id}-{len(list(world.root.iterdir()))}"
    with Checkpoint(world.write(place, weights)) as checkpoint:
        inputs = [(session.layout.index(s.name), FileSource(file, s)) for file in checkpoint.files for s in file.specs]
        await attempt.diff(inputs)
    await attempt.finish()
    await session.seal(attempt)
    await session.anchor_if_due()


def chain(world: PublishWorld, count: int) -> list[Any]:
    weights = [world.weights]
    for n in range(count):
        weights.append(step_weights(weights[-1], seed=n))
    return weights[1:]


def listed(world: PublishWorld, prefix: str) -> set[int]:
    return {int(path.name) for path in (world.root / "bucket" / prefix).iterdir()}


def test_old_versions_go_behind_the_work(world: PublishWorld) -> None:
    async def run() -> None:
        session = await opened(world, keep_versions=2, anchor_every=2)
        for weights in chain(world, 6):
            await publish(session, weights, world)
            await session.retention.ended()
        assert session.ledger.state.floor == 4
        assert listed(world, "data") == {0, 4, 5, 6}
        assert listed(world, "anchors") == {4, 6}
        await session.close()

    asyncio.run(run())
    assert [event.floor for event in world.events.of(Collected)] == [2, 4]
    assert world.reader.kinds()[-1] == "Release"


def test_by_default_the_newest_256_stay(world: PublishWorld) -> None:
    assert PublishOptions(state=world.state).keep_versions == 256
    assert PublishOptions(state=world.state).keep_hours is None


@pytest.mark.parametrize("keep", [None, 0])
def test_without_a_policy_only_what_is_dead_goes(world: PublishWorld, keep: int | None) -> None:
    async def run() -> None:
        session = await opened(world, keep_versions=keep, anchor_every=1)
        for weights in chain(world, 3):
            await publish(session, weights, world)
            await session.retention.ended()
        assert session.ledger.state.floor == 0
        assert listed(world, "data") == {0, 1, 2, 3}
        await session.close()

    asyncio.run(run())


@pytest.mark.parametrize("keep", [{"keep_versions": -1}, {"keep_hours": -1.0}])
def test_a_policy_that_is_none_is_refused_at_the_start(world: PublishWorld, keep: Any) -> None:
    with pytest.raises(UsageError, match="cannot keep"):
        asyncio.run(opened(world, **keep))


def test_what_a_dead_publisher_left_goes_with_the_first_seal_of_the_next(world: PublishWorld) -> None:
    """Its attempt, its anchor, its probe; nothing of the living attempt, which this one has begun meanwhile."""
    first, second, third = chain(world, 3)
    bucket = world.root / "bucket"

    async def die() -> None:
        session = await opened(world, chunk_bytes=200)
        attempt = await session.begin()
        with Checkpoint(world.write(world.root / "torn", first)) as checkpoint:
            file = checkpoint.files[0]
            await attempt.diff([(session.layout.index(s.name), FileSource(file, s)) for s in file.specs])
        await attempt.finish()
        await attempt.upload(await attempt.contribution(), 1.0)
        place = names.anchor(0, session.ledger.tip.seq)
        await session.ledger.store.create(f"{place}model.safetensors", b"half an anchor")
        await session.ledger.store.create("probe/0123abcd/twice", b"?")
        session.context.state.close()  # no close of the session: it was killed

    async def go_on() -> None:
        session = await opened(world)
        await publish(session, second, world)
        await session.retention.ended()
        await publish(session, third, world)
        await session.close()

    asyncio.run(die())
    torn = set(bucket.glob("data/1/*"))
    assert len(torn) == 1
    asyncio.run(go_on())
    assert not [path for path in torn if path.exists()]
    assert not (bucket / "probe").exists()
    assert len(listed(world, "anchors/0")) == 1
    assert same_weights(world.reader.versions()[2], third)


def test_it_holds_no_update_up(world: PublishWorld) -> None:
    """The bucket answers no LIST and no DELETE; versions go on being sealed."""

    class Slow(WrappedStore):
        def list(self, prefix: str) -> Any:
            async def never() -> Any:
                self.asked = True
                await asyncio.Event().wait()
                yield

            return never()

    async def run() -> None:
        session = await opened(world, keep_versions=1, anchor_every=1)
        slow = Slow(world.store())
        session.ledger.store = slow
        for weights in chain(world, 3):
            await asyncio.wait_for(publish(session, weights, world), 60)
        assert slow.asked
        assert session.head == 3
        await asyncio.wait_for(session.close(), 60)

    asyncio.run(run())
    assert world.reader.kinds()[-1] == "Release"


def test_an_anchor_that_comes_during_a_round_is_followed_by_another(world: PublishWorld) -> None:
    class Holding(WrappedStore):
        async def delete(self, keys: Iterable[str]) -> None:
            await gate.wait()
            await self.inner.delete(keys)

    async def run() -> None:
        session = await opened(world, keep_versions=1, anchor_every=1)
        session.ledger.store = Holding(world.store())
        for weights in chain(world, 3):
            await publish(session, weights, world)
        gate.set()
        await session.retention.ended()
        assert session.ledger.state.floor == 3
        await session.close()

    gate = asyncio.Event()
    asyncio.run(run())
    assert listed(world, "anchors") == {3}


def test_errors_are_told_and_end_nothing(world: PublishWorld) -> None:
    class Broken(WrappedStore):
        broken = True

        async def delete(self, keys: Iterable[str]) -> None:
            if self.broken and not any(key.startswith("probe/") for key in keys):
                raise StoreUnavailable("the bucket takes no deletes")
            await self.inner.delete(keys)

    async def run() -> None:
        broken = Broken(world.store())
        session = await opened(world, broken, keep_versions=1, anchor_every=1)
        first, second = chain(world, 2)
        await publish(session, first, world)
        await session.retention.ended()
        assert any("the bucket takes no deletes" in event.what for event in world.events.of(Retrying))
        assert listed(world, "data") == {0, 1}
        Broken.broken = False
        await publish(session, second, world)
        await session.retention.ended()
        assert listed(world, "data") == {0, 2}
        await session.close()

    asyncio.run(run())


def test_what_may_not_be_deleted_is_told_once_with_why_and_the_rest_goes(world: PublishWorld) -> None:
    """A policy that allows deletes below anchors/ only."""

    class Guarded(WrappedStore):
        async def delete(self, keys: Iterable[str]) -> None:
            guarded = {key for key in keys if key.startswith("data/")}
            await self.inner.delete([key for key in keys if key not in guarded])
            denied = Incompatible("the store refused: 403 AccessDenied", hint="grant s3:DeleteObject")
            raise_refused(dict.fromkeys(guarded, denied))

    async def run() -> None:
        session = await opened(world, Guarded(world.store()), keep_versions=2, anchor_every=2)
        for weights in chain(world, 6):
            await publish(session, weights, world)
            await session.retention.ended()
        assert session.ledger.state.floor == 4
        assert listed(world, "data") == set(range(7))
        assert listed(world, "anchors") == {4, 6}
        await session.close()

    asyncio.run(run())
    (told,) = world.events.of(Degraded)
    assert "403 AccessDenied" in told.what
    assert "s3:DeleteObject" in told.what
    assert sum(event.objects for event in world.events.of(Collected)) > 0


@pytest.mark.parametrize("when", ["planning", "deleting"])
def test_a_fenced_publisher_deletes_nothing_more_and_says_so(world: PublishWorld, when: str) -> None:
    """Taken over before the floor record, or between the record and the deletes."""

    class Watched(WrappedStore):
        deleted = False

        async def delete(self, keys: Iterable[str]) -> None:
            self.deleted = self.deleted or any(not key.startswith("probe/") for key in keys)
            await self.inner.delete(keys)

        async def create(self, key: str, body: Any) -> Any:
            outcome = await self.inner.create(key, body)
            if when == "deleting" and b'"kind":"floor"' in bytes(body[:40]):
                await self.take_over()
            return outcome

        def list(self, prefix: str) -> Any:
            async def listed() -> Any:
                if when == "planning" and prefix == "anchors/" and self.armed:
                    await self.take_over()
                async for entry in self.inner.list(prefix):
                    yield entry

            return listed()

        armed = True

        async def take_over(self) -> None:
            self.armed = False
            await Ledger(self.inner).claim("another", take_over=True)

    async def run() -> None:
        store = Watched(world.store())
        session = await opened(world, store, keep_versions=1, anchor_every=1)
        with contextlib.suppress(Fenced):
            await publish(session, chain(world, 1)[0], world)
        await session.retention.ended()
        session.retention.anchored()
        await session.retention.ended()
        assert not store.deleted
        assert not store.armed
        await session.close()

    asyncio.run(run())
    said = [event.what for event in world.events.of(Degraded) if "deletes nothing more" in event.what]
    assert len(said) == 1
    assert "another" in said[0]
    assert listed(world, "data") == {0, 1}


def test_what_is_held_back_for_want_of_an_anchor_is_told_once(world: PublishWorld) -> None:
    async def run() -> None:
        session = await opened(world, keep_versions=1, anchor_share=None, upload_base=False)
        for weights in chain(world, 3):
            await publish(session, weights, world)
            session.retention.anchored()
            await session.retention.ended()
        await session.close()

    asyncio.run(run())
    held = [event.what for event in world.events.of(Degraded) if "no whole anchor" in event.what]
    assert len(held) == 1
    assert "--anchor-every" in held[0]


def test_a_round_comes_every_so_many_seals(world: PublishWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY", 3)
    rounds = []

    class Counted(WrappedStore):
        def list(self, prefix: str) -> Any:
            if prefix == "data/":
                rounds.append(self.head())
            return self.inner.list(prefix)

    async def run() -> None:
        store = Counted(world.store())
        session = await opened(world, store, anchor_share=None)
        store.head = lambda: session.head
        for weights in chain(world, 8):
            await publish(session, weights, world)
            await session.retention.ended()
        await session.close()

    asyncio.run(run())
    assert rounds == [0, 3, 6], "after the anchor of the base, then by the count"


def test_a_publisher_without_state_or_version_0_goes_by_anchor_and_chain(world: PublishWorld) -> None:
    weights = chain(world, 6)

    async def run() -> None:
        session = await opened(world, keep_versions=2, anchor_every=3)
        for version in weights[:5]:
            await publish(session, version, world)
        session.retention.anchored()
        await session.retention.ended()
        assert session.ledger.state.floor == 3
        await session.close()
        for more in ({"base": None, "create": False}, {}):  # with the base at hand, too
            cold = await opened(world, state=world.root / f"cold-{len(more)}", name="other", **more)
            assert cold.head == 5
            await cold.close()
        stale = await opened(world, state=world.root / "cold-0", name="other")
        await publish(stale, weights[5], world)
        await stale.close()

    asyncio.run(run())
    assert not world.events.of(Alarm)


def test_a_baseline_that_fell_below_the_floor_is_built_again(world: PublishWorld) -> None:
    """The state directory of a publisher that was away while another went on."""
    weights = chain(world, 5)

    async def run() -> None:
        old = await opened(world, anchor_every=1)
        await publish(old, weights[0], world)
        await old.close()
        other = await opened(world, state=world.root / "other", name="other", keep_versions=1, anchor_every=2)
        for version in weights[1:4]:
            await publish(other, version, world)
            await other.retention.ended()
        assert other.ledger.state.floor == 3
        await other.close()
        again = await opened(world)
        await publish(again, weights[4], world)
        assert again.head == 5
        await again.close()

    asyncio.run(run())
    assert not world.events.of(Alarm)


def test_gc_beside_a_publisher_in_the_middle_of_an_attempt(world: PublishWorld) -> None:
    """Without a policy it is anybody's; what the living attempt and anchor have uploaded stays."""
    first, second = chain(world, 2)

    async def run() -> None:
        session = await opened(world, chunk_bytes=200)
        await publish(session, first, world)
        await session.retention.ended()
        attempt = await session.begin()
        with Checkpoint(world.write(world.root / "second", second)) as checkpoint:
            file = checkpoint.files[0]
            half = len(file.specs) // 2
            for specs in (file.specs[:half], file.specs[half:]):
                await attempt.diff([(session.layout.index(s.name), FileSource(file, s)) for s in specs])
                _, done = await collect(Ledger(world.store()), RetentionPolicy())
                assert done.objects == 0
            await attempt.finish()
            await attempt.upload(await attempt.contribution(), 1.0)
            await collect(Ledger(world.store()), RetentionPolicy())
            await session.seal(attempt)
        await session.close()

    asyncio.run(run())
    assert same_weights(world.reader.versions()[2], second)


def test_a_publisher_that_gc_took_over_from_says_who_it_was(world: PublishWorld) -> None:
    async def run() -> None:
        session = await opened(world, name="trainer", anchor_every=1)
        first, second = chain(world, 2)
        await publish(session, first, world)
        await session.retention.ended()
        await collect(Ledger(world.store()), RetentionPolicy(versions=1), take_over=True)
        with pytest.raises(Fenced, match="claimed"):
            await publish(session, second, world)
        await session.close()

    asyncio.run(run())
    assert world.events.of(FencedOut)


def test_a_version_that_turns_out_to_be_sealed_at_the_end_starts_no_round(world: PublishWorld) -> None:
    """The answer to the seal was lost; closing learns of it, and has nobody collect in a stream that is released."""

    class Deaf(WrappedStore):
        deaf = False

        async def create(self, key: str, body: bytes | memoryview) -> Any:
            outcome = await self.inner.create(key, body)
            if self.deaf and b'"kind":"seal"' in bytes(body):
                raise StoreUnavailable("nobody answers")
            return outcome

    async def run() -> None:
        store = Deaf(world.store())
        session = await opened(world, store, upload_base=False)
        attempt = await session.begin()
        with Checkpoint(world.write(world.root / "first", chain(world, 1)[0])) as checkpoint:
            file = checkpoint.files[0]
            await attempt.diff([(session.layout.index(s.name), FileSource(file, s)) for s in file.specs])
        await attempt.finish()
        store.deaf = True
        with contextlib.suppress(TimeoutError, StoreUnavailable):
            await asyncio.wait_for(session.seal(attempt), 0.2)
        store.deaf = False
        assert session.ledger.undecided
        await session.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
    assert [type(record).__name__ for record in world.reader.records()][-2:] == ["Seal", "Release"]


def test_a_script_collects_too(world: PublishWorld) -> None:
    with Publisher(
        world.url, base=world.base, create=True, state=world.state, keep_versions=1, anchor_every=1, emit=world.events
    ) as publisher:
        for weights in chain(world, 3):
            publisher.publish(world.tensors(weights)).wait_sealed()
    assert world.events.of(Collected)


def test_a_watch_that_runs_once_ends_its_round(world: PublishWorld, tmp_path: Path) -> None:
    for n, weights in enumerate(chain(world, 3), start=1):
        world.write(tmp_path / "watched" / f"step-{n}", weights)
    options = WatchOptions(
        state=world.state, base=world.base, create=True, watch=tmp_path / "watched", once=True, poll=0.05,
        keep_versions=1, anchor_every=1,
    )  # fmt: skip
    run: Callable[[], Any] = lambda: run_watch(options, world.store(), emit=world.events)  # noqa: E731
    asyncio.run(run())
    assert listed(world, "data") <= {0, 2, 3}


def test_a_ledger_that_lost_records_is_an_alarm_and_nothing_is_deleted(world: PublishWorld) -> None:
    """A hole below the tip of a running publisher, and then data of which the ledger does not know."""

    async def run() -> None:
        session = await opened(world, keep_versions=1, anchor_every=1)
        versions = iter(chain(world, 5))
        await publish(session, next(versions), world)
        await session.retention.ended()
        hole = world.root / "bucket" / names.record(3)
        record = hole.read_bytes()
        hole.unlink()
        await publish(session, next(versions), world)
        await session.retention.ended()
        (told,) = world.events.of(Alarm)
        assert "record 3 is missing" in told.what
        assert listed(world, "data") == {0, 1, 2}, "it publishes on, and deletes nothing"
        hole.write_bytes(record)
        stray = world.root / "bucket" / names.chunk(2, 999, "g", 0, "a0", 0)
        stray.parent.mkdir(parents=True)
        stray.write_bytes(b"x")
        await publish(session, next(versions), world)
        await session.retention.ended()
        assert [alarm.must for alarm in world.events.of(Alarm)] == ["L2", "L2"]
        assert "does not know of data/2/999/" in world.events.of(Alarm)[1].what
        assert listed(world, "data") == {0, 1, 2, 3}
        stray.unlink()
        await publish(session, next(versions), world)
        await session.retention.ended()
        assert listed(world, "data") == {0, 2, 4}, "the empty directory of what was removed by hand stays"
        await session.close()

    asyncio.run(run())
