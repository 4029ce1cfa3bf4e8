from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import suppress
from typing import Any

import pytest
from support.stores.wrapped import WrappedStore
from support.streams.publish_world import PublishWorld, make_weights, same_weights, step_weights
from support.streams.watched import DEADLINE, once, options, put, sealed, shards, until, watching

from dcr_daemon.errors import Fenced, InputIncomplete, NotFound
from dcr_daemon.events import (
    Aborted,
    ChunkPut,
    Claimed,
    Degraded,
    Opened,
    Retrying,
    Sealed,
    ShardTaken,
    Waiting,
    discard,
)
from dcr_daemon.publish.group.opening import open_leader
from dcr_daemon.publish.watch import watcher as module
from dcr_daemon.publish.watch.watcher import run_watch
from dcr_daemon.store.partial import PartialFile


def test_once_publishes_what_is_complete_oldest_first_and_names_the_rest(world: PublishWorld) -> None:
    chain = {n: step_weights(world.weights, seed=n) for n in (2, 9, 10)}
    for n, weights in chain.items():
        world.write(world.root / f"out/checkpoint-{n}", weights, shard_bytes=2000 if n == 9 else 1 << 30)
    for path, body in shards(world, chain[2], world.root / "out/checkpoint-11")[:2]:
        put(path, body)
    put(world.root / "out/checkpoint-12/model.safetensors", b"half a fi")
    with pytest.raises(InputIncomplete, match=r"2 checkpoints .* checkpoint-11: .* checkpoint-12: "):
        once(world)
    assert sealed(world) == [2, 9, 10]
    said = " ".join(event.what for event in world.events.of(Degraded))
    assert "checkpoint-11 is incomplete" in said
    assert "checkpoint-12 is incomplete" in said
    versions = world.reader.versions()
    assert [same_weights(versions[v], chain[n]) for v, n in enumerate((2, 9, 10), start=1)] == [True] * 3
    with pytest.raises(InputIncomplete):
        once(world)
    assert sealed(world) == [2, 9, 10]


def test_once_with_nothing_to_publish_says_so(world: PublishWorld) -> None:
    once(world)
    assert any("nothing to publish" in event.what for event in world.events.of(Waiting))


@pytest.mark.parametrize("poll", [None, 0.05])
def test_shards_are_taken_up_while_later_ones_are_still_being_written(world: PublishWorld, poll: float | None) -> None:
    new = make_weights(world.layout, seed=4)
    files = shards(world, new, world.root / "out/checkpoint-1", count=4)

    async def run() -> None:
        async with watching(world, poll=poll, chunk_bytes=250):
            await until(lambda: world.events.of(Waiting))
            for n, (path, body) in enumerate(files[:-1], start=1):
                put(path, body)
                await until(lambda n=n: len(world.events.of(ShardTaken)) == n)
            last, body = files[-1]
            with last.open("wb") as file:
                file.write(body[:-7])
                file.flush()
                await until(lambda: world.events.of(ChunkPut))
                assert not world.events.of(Sealed)
                file.write(body[-7:])
            put(last.with_name("config.json"), b"{}")
            await until(lambda: world.events.of(Sealed))

    asyncio.run(run())
    assert len(world.events.of(ChunkPut)) >= 8
    assert len(world.events.of(Opened)) == 1
    assert same_weights(world.reader.versions()[1], new)


def test_a_checkpoint_of_very_many_files_is_taken_up_file_by_file(
    world: PublishWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its identity is one digest, of which that of the files read so far is no part."""
    monkeypatch.setattr("dcr_daemon.publish.watch.file_identity.MAX_FILES_LISTED", 2)
    new = make_weights(world.layout, seed=4)

    async def run() -> None:
        async with watching(world, poll=0.05):
            for n, (path, body) in enumerate(shards(world, new, world.root / "out/checkpoint-1", count=5), start=1):
                put(path, body)
                await until(lambda n=n: len(world.events.of(ShardTaken)) == n)
            await until(lambda: world.events.of(Sealed))

    asyncio.run(run())
    assert len(world.events.of(Opened)) == 1
    assert same_weights(world.reader.versions()[1], new)


@pytest.mark.parametrize("poll", [None, 0.05])
def test_a_file_rewritten_after_it_was_read_voids_the_attempt(world: PublishWorld, poll: float | None) -> None:
    old, new = (step_weights(world.weights, seed=n) for n in (1, 2))
    out = world.root / "out/checkpoint-1"

    async def run() -> None:
        async with watching(world, poll=poll):
            first = shards(world, old, out)
            put(*first[0])
            await until(lambda: world.events.of(ShardTaken))
            for path, body in shards(world, new, out):
                put(path, body)
            await until(lambda: world.events.of(Sealed))

    asyncio.run(run())
    assert any("after it was read" in event.reason for event in world.events.of(Aborted))
    versions = world.reader.versions()
    assert len(versions) == 2
    assert same_weights(versions[1], new)


def test_a_directory_renamed_when_complete_becomes_one_version(world: PublishWorld) -> None:
    new = step_weights(world.weights, seed=1)
    temporary = world.root / "out/tmp-checkpoint-1"

    async def run() -> None:
        async with watching(world):
            files = shards(world, new, temporary)
            for path, body in files[:2]:
                put(path, body)
            await until(lambda: len(world.events.of(ShardTaken)) == 2)
            put(*files[2])
            temporary.rename(world.root / "out/checkpoint-1")
            await until(lambda: world.events.of(Sealed))

    asyncio.run(run())
    assert len(world.reader.versions()) == 2
    assert world.reader.records()[-2].source["path"] == "checkpoint-1"


@pytest.mark.parametrize("place", ["out", "elsewhere"])
@pytest.mark.parametrize("moved", ["directory", "files"])
def test_what_is_moved_in_is_complete_without_a_timed_scan(
    world: PublishWorld, place: str, moved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename says as much as a close: nothing waits for two scans. Here there is none but the one at the start."""
    monkeypatch.setattr(module, "SCAN_INTERVAL", 3600.0)
    new = step_weights(world.weights, seed=1)
    temporary, final = world.root / place / ".tmp-1", world.root / "out/checkpoint-1"

    async def run() -> None:
        for path, body in shards(world, new, temporary):
            put(path, body)
        if moved == "files":
            final.mkdir(parents=True)  # what is moved into a directory that nobody watches yet is seen as new
        async with watching(world, poll=None):
            await until(lambda: world.events.of(Waiting))
            await asyncio.sleep(0.2)
            assert not world.events.of(Opened)
            if moved == "directory":
                temporary.rename(final)
            else:
                for path in sorted(temporary.iterdir()):
                    path.rename(final / path.name)
            await until(lambda: world.events.of(Sealed))

    asyncio.run(run())
    assert same_weights(world.reader.versions()[1], new)


def test_a_marker_completes_a_checkpoint(world: PublishWorld) -> None:
    new = step_weights(world.weights, seed=1)

    async def run() -> None:
        async with watching(world, marker="STABLE"):
            world.write(world.root / "out/step_1", new)
            await until(lambda: any("marker" in event.what for event in world.events.of(Waiting)))
            assert not world.events.of(Sealed)
            (world.root / "out/step_1/STABLE").touch()
            await until(lambda: world.events.of(Sealed))

    asyncio.run(run())
    assert same_weights(world.reader.versions()[1], new)


def test_a_restart_in_the_middle_of_a_checkpoint_starts_it_anew(world: PublishWorld) -> None:
    new = step_weights(world.weights, seed=1)
    files = shards(world, new, world.root / "out/checkpoint-1")

    async def run() -> None:
        async with watching(world):
            put(*files[0])
            await until(lambda: world.events.of(ShardTaken))
        assert [event.reason for event in world.events.of(Aborted)] == ["the publisher closed"]
        async with watching(world):
            for path, body in files[1:]:
                put(path, body)
            await until(lambda: world.events.of(Sealed))

    asyncio.run(run())
    assert same_weights(world.reader.versions()[1], new)


def test_a_bucket_that_goes_away_for_a_while_delays_and_loses_nothing(
    world: PublishWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dcr_daemon.errors import StoreUnavailable
    from dcr_daemon.store.port import Outcome

    class Flaky(WrappedStore):
        down = False

        async def create(self, key: str, body: bytes | memoryview) -> Outcome:
            return Outcome.UNKNOWN if self.down else await self.inner.create(key, body)

        async def get(self, key: str, *, limit: int, keep: Any = None) -> bytes:
            if self.down:
                raise StoreUnavailable("the bucket is down")
            return await self.inner.get(key, limit=limit)  # type: ignore[no-any-return]

    monkeypatch.setattr(module, "STORE_PAUSE", 0.05)
    new = step_weights(world.weights, seed=1)
    store = Flaky(world.store())

    async def run() -> None:
        task = asyncio.create_task(run_watch(options(world, patience=0.1), store, emit=world.events))
        await until(lambda: world.events.of(Waiting))
        store.down = True
        world.write(world.root / "out/step_1", new)
        await until(lambda: any("the bucket" in event.what for event in world.events.of(Retrying)))
        store.down = False
        await until(lambda: world.events.of(Sealed))
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert sealed(world) == [1]
    assert same_weights(world.reader.versions()[1], new)


def test_a_directory_that_is_not_there_is_said(world: PublishWorld) -> None:
    with pytest.raises(NotFound, match="no directory"):
        asyncio.run(run_watch(options(world, watch=world.root / "nowhere"), world.store(), emit=world.events))


def test_a_file_that_changes_without_changing_size_or_content_still_voids(world: PublishWorld) -> None:
    """Identity is name, size, mtime and inode: a replacement of equal size is another file."""
    new = step_weights(world.weights, seed=1)
    files = shards(world, new, world.root / "out/checkpoint-1")

    async def run() -> None:
        async with watching(world):
            put(*files[0])
            await until(lambda: world.events.of(ShardTaken))
            path, body = files[0]
            put(path.with_suffix(".new"), body)
            path.with_suffix(".new").replace(path)
            await until(lambda: world.events.of(Aborted))
            for path, body in files[1:]:
                put(path, body)
            await until(lambda: world.events.of(Sealed))

    asyncio.run(run())
    assert same_weights(world.reader.versions()[1], new)


@pytest.mark.parametrize("restart", [False, True])
def test_a_checkpoint_renamed_after_it_was_published_is_no_new_version(world: PublishWorld, restart: bool) -> None:
    weights = step_weights(world.weights, seed=1)
    tmp, final = world.root / "out/tmp-40", world.root / "out/checkpoint-40"

    async def check() -> None:
        async with watching(world):
            world.write(tmp, weights)
            await until(lambda: sealed(world) == [40])
            if not restart:
                tmp.rename(final)
                world.write(world.root / "out/checkpoint-41", weights)
                await until(lambda: sealed(world)[-1] == 41)

    asyncio.run(check())
    if restart:
        tmp.rename(final)
        once(world)
        once(world)
    assert sealed(world) == ([40] if restart else [40, 41])


def test_checkpoints_moved_to_another_disk_with_their_times_are_no_new_versions(world: PublishWorld) -> None:
    """A publisher on another machine sent the fleet back to the first step, and through all of them again."""
    old, new = (step_weights(world.weights, seed=n) for n in (1, 2))
    world.write(world.root / "out/step_1", old)
    once(world)
    (world.root / "out").rename(world.root / "gone")
    shutil.copytree(world.root / "gone", world.root / "out")
    shutil.rmtree(world.root / "gone")
    shutil.rmtree(world.state)
    world.write(world.root / "out/step_2", new)
    once(world, take_over=True)
    assert sealed(world) == [1, 2]
    shutil.rmtree(world.root / "out/step_1")
    world.write(world.root / "out/step_1", new)
    once(world)
    assert sealed(world) == [1, 2, 1], "what was rewritten in its place is another checkpoint"


def test_links_to_a_published_checkpoint_are_one_of_their_own(world: PublishWorld) -> None:
    """A controller may wait for its number; it costs a version without a change."""
    world.write(world.root / "out/checkpoint-40", step_weights(world.weights, seed=1))
    once(world)
    shutil.copytree(world.root / "out/checkpoint-40", world.root / "out/checkpoint-50", copy_function=os.link)
    once(world)
    assert [(event.step, bool(event.changed)) for event in world.events.of(Sealed)] == [(40, True), (50, False)]


@pytest.mark.parametrize("poll", [0.05, None])
def test_a_watched_directory_that_vanishes_is_said_and_waited_for(world: PublishWorld, poll: float | None) -> None:
    chain = [step_weights(world.weights, seed=n) for n in range(2)]

    async def check() -> None:
        async with watching(world, poll=poll):
            world.write(world.root / "out/checkpoint-1", chain[0])
            await until(lambda: sealed(world) == [1])
            (world.root / "out").rename(world.root / "away")
            await until(lambda: any("not there any more" in e.what for e in world.events.of(Waiting)))
            world.write(world.root / "out/checkpoint-2", chain[1])
            await until(lambda: sealed(world) == [1, 2])

    asyncio.run(check())
    assert same_weights(world.reader.versions()[2], chain[1])


def test_a_watcher_with_nothing_to_do_notices_a_newer_claim_and_ends(world: PublishWorld) -> None:
    async def check() -> None:
        idle = asyncio.create_task(run_watch(options(world, name="a", look=0.1), world.store(), emit=world.events))
        await until(lambda: any("a checkpoint below" in event.what for event in world.events.of(Waiting)))
        other = await open_leader(
            options(world, name="b", take_over=True, state=world.root / "b"), world.store(), emit=discard
        )
        with pytest.raises(Fenced, match="publisher b has claimed"):
            await asyncio.wait_for(idle, DEADLINE)
        assert other.ledger.holds
        await other.close()

    asyncio.run(check())


def test_a_newer_claim_is_noticed_in_a_bucket_that_is_slower_than_the_looks_at_the_directory(
    world: PublishWorld,
) -> None:
    store = world.store()
    right = store.get

    async def slow(key: str, *, limit: int, keep: PartialFile | None = None) -> bytes:
        await asyncio.sleep(0.3 if key.startswith("ledger/") else 0)
        return bytes(await right(key, limit=limit, keep=keep))

    store.get = slow

    async def check() -> None:
        idle = asyncio.create_task(run_watch(options(world, name="a", look=0.1), store, emit=world.events))
        await until(lambda: any("a checkpoint below" in event.what for event in world.events.of(Waiting)))
        other = await open_leader(
            options(world, name="b", take_over=True, state=world.root / "b"), world.store(), emit=discard
        )
        with pytest.raises(Fenced, match="publisher b has claimed"):
            await asyncio.wait_for(idle, DEADLINE)
        await other.close()

    asyncio.run(check())


def test_two_publishers_of_one_name_are_told_so(world: PublishWorld) -> None:
    async def check() -> None:
        first = asyncio.create_task(run_watch(options(world, name="a", look=0.1), world.store(), emit=world.events))
        await until(lambda: any("a checkpoint below" in event.what for event in world.events.of(Waiting)))
        second = await open_leader(options(world, name="a", state=world.root / "b"), world.store(), emit=world.events)
        with pytest.raises(Fenced, match="two processes run as publisher 'a'"):
            await asyncio.wait_for(first, DEADLINE)
        await second.close()

    asyncio.run(check())
    assert [event.ousted for event in world.events.of(Claimed)] == [None, "a"]
