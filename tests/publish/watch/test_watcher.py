from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes.background import going_on
from support.stores.wrapped import WrappedStore
from support.streams.publish_world import PublishWorld, make_weights, same_weights, step_weights

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.safetensors import pack_safetensors, write_safetensors
from dcr_daemon.errors import Fenced, Incompatible, InputIncomplete, NotFound
from dcr_daemon.events import (
    Aborted,
    CheckpointSkipped,
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
from dcr_daemon.publish.watch.once import OnceReport
from dcr_daemon.publish.watch.watcher import WatchOptions, run_watch
from dcr_daemon.store.partial import PartialFile

DEADLINE = 60.0


def options(world: PublishWorld, **more: Any) -> WatchOptions:
    (world.root / "out").mkdir(exist_ok=True)
    defaults: dict[str, Any] = {
        "state": world.state, "base": world.base, "create": True,
        "workers": 2, "watch": world.root / "out", "poll": 0.05,
    }  # fmt: skip
    return WatchOptions(**defaults | more)


def once(world: PublishWorld, **more: Any) -> OnceReport:
    """`dcr publish --once`: what it prints, or the error of its exit code."""
    report = asyncio.run(run_watch(options(world, once=True, **more), world.store(), emit=world.events))
    report.check()
    return report


def watching(world: PublishWorld, **more: Any) -> AbstractAsyncContextManager[None]:
    return going_on(run_watch(options(world, **more), world.store(), emit=world.events))


async def until(condition: Callable[[], object]) -> None:
    for _ in range(int(DEADLINE / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not happen")


def sealed(world: PublishWorld) -> list[int | None]:
    return [event.step for event in world.events.of(Sealed)]


def shards(world: PublishWorld, weights: Any, out: Path, count: int = 3) -> list[tuple[Path, bytes]]:
    """The files of a sharded checkpoint, as bytes still to be written."""
    names = [spec.name for spec in world.layout]
    files = []
    for n in range(count):
        items = [(spec, weights[spec.name]) for spec in world.layout if spec.name in names[n::count]]
        files.append((out / f"model-{n + 1:05d}-of-{count:05d}.safetensors", bytes(pack_safetensors(items))))
    return files


def put(path: Path, body: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)


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


def test_a_rewritten_checkpoint_is_a_new_version_even_if_its_step_goes_back(world: PublishWorld) -> None:
    weights = [step_weights(world.weights, seed=n) for n in range(3)]
    world.write(world.root / "out/step_5", weights[0])
    world.write(world.root / "out/step_6", weights[1])
    once(world)
    shutil.rmtree(world.root / "out/step_5")
    world.write(world.root / "out/step_5", weights[2])
    once(world)
    assert sealed(world) == [5, 6, 5]
    assert same_weights(world.reader.versions()[3], weights[2])


def test_once_with_nothing_to_publish_says_so(world: PublishWorld) -> None:
    once(world)
    assert any("nothing to publish" in event.what for event in world.events.of(Waiting))


def test_a_backlog_may_be_skipped_to_the_newest(world: PublishWorld) -> None:
    for n in (1, 2, 3):
        world.write(world.root / f"out/step_{n}", step_weights(world.weights, seed=n))
    once(world, newest=True)
    once(world, newest=True)
    assert sealed(world) == [3]


@pytest.mark.parametrize("place", ["checkpoint-7", "global_step_7/actor/huggingface", "weights/step_7", "a/b/c/step_7"])
def test_checkpoints_are_found_where_frameworks_write_them(world: PublishWorld, place: str) -> None:
    world.write(world.root / "out" / place, step_weights(world.weights, seed=1))
    once(world)
    assert sealed(world) == [7]


def test_what_is_no_checkpoint_is_left_alone(world: PublishWorld) -> None:
    """Too deep, hidden, a link, at the top, the base, the state, the bucket."""
    weights = step_weights(world.weights, seed=1)
    watch = world.root / "watched"
    for place in ("a/b/c/d/step_1", ".hidden/step_1", "base"):
        world.write(watch / place, weights)
    write_safetensors(watch / "model.safetensors", [(s, weights[s.name]) for s in world.layout])
    (watch / "latest").symlink_to(watch / "base")
    world.url, world.state = f"file://{watch / 'bucket'}", watch / "state"
    from dcr_daemon.store.file import FileStore

    asyncio.run(
        run_watch(
            options(world, once=True, watch=watch, base=watch / "base", anchor_every=1),
            FileStore(watch / "bucket"),
            emit=world.events,
        )
    )
    assert sealed(world) == []


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


def test_a_checkpoint_that_never_completes_is_overtaken(world: PublishWorld) -> None:
    stuck, new = (step_weights(world.weights, seed=n) for n in (1, 2))

    async def run() -> None:
        async with watching(world):
            put(*shards(world, stuck, world.root / "out/checkpoint-1")[0])
            await until(lambda: world.events.of(ShardTaken))
            world.write(world.root / "out/checkpoint-2", new)
            await until(lambda: world.events.of(Sealed))

    asyncio.run(run())
    assert sealed(world) == [2]
    assert any("checkpoint-2 was complete before checkpoint-1" in event.reason for event in world.events.of(Aborted))
    assert same_weights(world.reader.versions()[1], new)


def test_a_checkpoint_nobody_saw_being_closed_is_not_overtaken_by_its_successor(world: PublishWorld) -> None:
    """inotify watches a new directory a moment late, and one that was written before the start not at all."""
    chain = {n: step_weights(world.weights, seed=n) for n in (1, 2)}
    world.write(world.root / "out/step_1", chain[1])

    async def run() -> None:
        async with watching(world, poll=None):
            await until(lambda: world.events.of(Waiting))
            (world.root / "out/step_2").mkdir()
            await asyncio.sleep(0.2)
            world.write(world.root / "tmp", chain[2])
            shutil.copy(world.root / "tmp/model.safetensors", world.root / "out/step_2")
            await until(lambda: len(sealed(world)) == 2)

    asyncio.run(run())
    assert sealed(world) == [1, 2]
    assert [same_weights(world.reader.versions()[n], chain[n]) for n in (1, 2)] == [True, True]


def test_a_trainer_that_takes_away_its_oldest_checkpoints_is_caught_up_with(world: PublishWorld) -> None:
    """A publisher that rested over each one that went found the next one gone, too, and never came to the newest."""
    many = 12
    new = step_weights(world.weights, seed=1)
    for step in range(1, many + 1):
        world.write(world.root / f"out/step_{step}", new if step == many else world.weights)

    def emit(event: Any) -> None:
        world.events(event)
        if isinstance(event, Opened) and event.step is not None and event.step < many:
            shutil.rmtree(world.root / f"out/step_{event.step}")

    async def run() -> None:
        task = asyncio.create_task(run_watch(options(world), world.store(), emit=emit))
        await until(lambda: world.events.of(Sealed) or task.done())
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert sealed(world) == [many]
    assert len(world.events.of(Aborted)) == many - 1
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


BAD = {
    "added: new.weight": lambda specs: [*specs, TensorSpec("new.weight", "BF16", (3,))],
    "missing: tiny": lambda specs: [s for s in specs if s.name != "tiny"],
    "added: little; missing: tiny": lambda specs: [
        TensorSpec("little", "U8", (5,)) if s.name == "tiny" else s for s in specs
    ],
    "retyped: norm.weight .is F16, should be BF16": lambda specs: [
        TensorSpec("norm.weight", "F16", (32,)) if s.name == "norm.weight" else s for s in specs
    ],
    "reshaped: norm.weight .is .16, 2., should be .32.": lambda specs: [
        TensorSpec("norm.weight", "BF16", (16, 2)) if s.name == "norm.weight" else s for s in specs
    ],
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("shard_bytes", [1 << 30, 2000])
def test_a_checkpoint_that_does_not_fit_is_named_and_nothing_of_it_published(
    world: PublishWorld, what: str, shard_bytes: int
) -> None:
    layout = Layout(BAD[what](list(world.layout)))
    good = step_weights(world.weights, seed=1)
    world.write(world.root / "out/checkpoint-1", good)
    bad = make_weights(layout, seed=2)
    world.write(world.root / "out/checkpoint-2", bad, layout=layout, shard_bytes=shard_bytes)
    with pytest.raises(Incompatible, match=what) as caught:
        once(world)
    assert "checkpoint-2" in str(caught.value)
    assert sealed(world) == [1]
    assert len(world.events.of(Opened)) == 1
    shutil.rmtree(world.root / "out/checkpoint-2")
    world.write(world.root / "out/checkpoint-3", step_weights(good, seed=3))
    once(world)
    assert sealed(world) == [1, 3]


def test_a_shard_that_does_not_fit_ends_its_attempt_and_no_other(world: PublishWorld) -> None:
    new, other = (step_weights(world.weights, seed=n) for n in (1, 2))
    out = world.root / "out/checkpoint-1"

    async def run() -> None:
        async with watching(world):
            put(*shards(world, new, out)[0])
            await until(lambda: world.events.of(ShardTaken))
            put(out / "z.safetensors", bytes(pack_safetensors([(TensorSpec("what", "F16", (3,)), np.zeros(3, "<u2"))])))
            await until(lambda: world.events.of(CheckpointSkipped))
            world.write(world.root / "out/checkpoint-2", other)
            await until(lambda: world.events.of(Sealed))

    asyncio.run(run())
    assert "added: what" in world.events.of(Aborted)[0].reason
    assert [(event.path, event.cause) for event in world.events.of(CheckpointSkipped)] == [("checkpoint-1", "misfit")]
    with pytest.raises(InputIncomplete):  # still two shards short
        once(world, ignore=("wh*",))
    assert sealed(world) == [2]
    for path, body in shards(world, new, out)[1:]:
        put(path, body)
    once(world, ignore=("wh*",))
    assert [same_weights(world.reader.versions()[n], w) for n, w in ((1, other), (2, new))] == [True, True]


def test_a_second_copy_of_a_tied_head_is_dropped_and_an_untied_one_is_not(world: PublishWorld) -> None:
    new = step_weights(world.weights, seed=1)
    layout = Layout([*world.layout, TensorSpec("lm_head.weight", "BF16", (64, 32))])
    world.write(world.root / "out/step_1", {**new, "lm_head.weight": new["embed.weight"]}, layout=layout)
    once(world)
    assert same_weights(world.reader.versions()[1], new)
    other = {**new, "lm_head.weight": new["embed.weight"] ^ 1}
    world.write(world.root / "out/step_2", other, layout=layout)
    with pytest.raises(Incompatible, match=r"added: lm_head\.weight"):
        once(world)
    assert sealed(world) == [1]


def test_fp32_masters_are_rounded_and_said(world: PublishWorld) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    masters = {s.name: rng.normal(size=s.elements).astype("<f4") for s in world.layout if s.dtype == "BF16"}
    layout = Layout(TensorSpec(s.name, "F32" if s.dtype == "BF16" else s.dtype, s.shape) for s in world.layout)
    weights = {**world.weights, **{name: values.view("<u4") for name, values in masters.items()}}
    world.write(world.root / "out/step_1", weights, layout=layout)
    once(world)
    found = world.reader.versions()[1]
    for name, values in masters.items():
        assert np.array_equal(found[name], torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view("<u2"))
    assert [type(event).__name__ for event in world.events].count("Rounded") == 1


def test_an_index_that_disagrees_is_an_error(world: PublishWorld) -> None:
    out = world.write(world.root / "out/step_1", step_weights(world.weights, seed=1), shard_bytes=2000)
    index = next(out.glob("*.index.json"))
    table = json.loads(index.read_bytes())
    files = sorted(set(table["weight_map"].values()))
    table["weight_map"]["tiny"] = files[0] if table["weight_map"]["tiny"] != files[0] else files[1]
    index.write_text(json.dumps(table))
    with pytest.raises(Incompatible, match="disagrees"):
        once(world)
    assert sealed(world) == []


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


def skipped(world: PublishWorld) -> list[tuple[str, str]]:
    return [(event.path, event.cause) for event in world.events.of(CheckpointSkipped)]


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("restart", [False, True])
def test_a_run_that_numbers_its_checkpoints_anew_is_the_newest(
    world: PublishWorld, newest: bool, restart: bool
) -> None:
    """With `--newest` it was never published again, and a backlog ended with the older run."""
    weights = {n: step_weights(world.weights, seed=n) for n in (500, 700, 100)}

    def save(step: int, written: int) -> None:
        out = world.write(world.root / f"made-{step}", weights[step])
        os.utime(out / "model.safetensors", (written, written))
        out.rename(world.root / f"out/checkpoint-{step}")

    (world.root / "out").mkdir()
    save(700, 2000)
    save(500, 1000)
    if restart:
        once(world, newest=newest)
    save(100, 3000)
    report = once(world, newest=newest)
    assert sealed(world) == ([700, 100] if newest and restart else [100] if newest else [500, 700, 100])
    assert same_weights(max(world.reader.versions().items())[1], weights[100])
    dropped = {skip.path for skip in report.not_published if skip.cause == "outdated"}
    assert dropped == (({"checkpoint-500"} if restart else {"checkpoint-500", "checkpoint-700"}) if newest else set())


def test_a_file_dated_in_the_future_does_not_end_the_stream(world: PublishWorld) -> None:
    out = world.write(world.root / "out/checkpoint-100", step_weights(world.weights, seed=1))
    os.utime(out / "model.safetensors", (4e9, 4e9))
    once(world)
    world.write(world.root / "out/checkpoint-110", step_weights(world.weights, seed=2))
    once(world)
    world.write(world.root / "out/checkpoint-120", step_weights(world.weights, seed=3))
    once(world, newest=True)
    assert sealed(world) == [100, 110, 120]


@pytest.mark.parametrize("lost", [False, True])
def test_a_checkpoint_that_appears_later_and_is_older_is_not_published(world: PublishWorld, lost: bool) -> None:
    """A backup that is restored must not become the policy."""
    world.write(world.root / "out/checkpoint-100", step_weights(world.weights, seed=1))
    once(world)
    options = {"state": world.root / "lost"} if lost else {}
    old = world.write(world.root / "made", step_weights(world.weights, seed=2))
    os.utime(old / "model.safetensors", (1000, 1000))
    old.rename(world.root / "out/checkpoint-90")
    report = once(world, **options)
    assert sealed(world) == [100]
    assert [(skip.path, skip.cause) for skip in report.not_published] == [("checkpoint-90", "outdated")]
    assert "touch" in report.not_published[0].reason
    os.utime(world.root / "out/checkpoint-90/model.safetensors")
    once(world, **options)
    assert sealed(world) == [100, 90]


def test_what_newest_drops_is_said_once(world: PublishWorld) -> None:
    for n in (1, 2):
        world.write(world.root / f"out/step_{n}", step_weights(world.weights, seed=n))

    async def run() -> None:
        async with watching(world, newest=True):
            await until(lambda: sealed(world) == [2])
            await asyncio.sleep(0.5)

    asyncio.run(run())
    assert skipped(world) == [("step_1", "outdated")]


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("beside", ["ema/step_{}", "step_{}/ema", "best"])
def test_a_model_beside_the_policy_is_passed_by_and_select_is_named(
    world: PublishWorld, beside: str, restart: bool
) -> None:
    """It has the policy's names and shapes, and is complete later: an average, a copy of the best checkpoint."""
    policy, average = (step_weights(world.weights, seed=n) for n in (1, 9))
    world.write(world.root / "out/step_1", policy)
    if restart:
        once(world)
    world.write(world.root / "out" / beside.format(1), average)
    report = once(world)
    assert sealed(world) == [1]
    assert [(skip.path, skip.cause) for skip in report.not_published] == [(beside.format(1), "other_shape")]
    assert "step_*" in report.not_published[0].reason
    assert "--select" in world.events.of(CheckpointSkipped)[0].reason
    assert same_weights(world.reader.versions()[1], policy)
    once(world, select=(beside.format("*"),))
    assert same_weights(world.reader.versions()[2], average)


def test_select_names_the_policy_before_anything_is_published(world: PublishWorld) -> None:
    critic, policy = (step_weights(world.weights, seed=n) for n in (1, 2))
    world.write(world.root / "out/global_step_1/critic/huggingface", critic)
    world.write(world.root / "out/global_step_1/actor/huggingface", policy)
    put(world.root / "out/global_step_1/reward/model.safetensors", b"half a fi")
    report = once(world, select=("global_step_*/actor/huggingface",))
    assert [(one.path, one.version, one.step) for one in report.published] == [
        ("global_step_1/actor/huggingface", 1, 1)
    ]
    assert not report.not_published
    assert same_weights(world.reader.versions()[1], policy)


def test_a_numbered_checkpoint_is_the_policy_rather_than_one_without_a_number(world: PublishWorld) -> None:
    world.write(world.root / "out/best", step_weights(world.weights, seed=9))
    world.write(world.root / "out/checkpoint-1", step_weights(world.weights, seed=1))
    once(world)
    assert sealed(world) == [1]
    assert skipped(world) == [("best", "other_shape")]


def test_a_checkpoint_of_another_model_does_not_end_the_publisher(world: PublishWorld) -> None:
    layout = Layout([*world.layout, TensorSpec("score.weight", "BF16", (1, 32))])
    other, good = make_weights(layout, seed=2), step_weights(world.weights, seed=1)

    async def run() -> None:
        async with watching(world):
            world.write(world.root / "out/step_1", other, layout=layout)
            await until(lambda: skipped(world))
            await asyncio.sleep(0.3)
            world.write(world.root / "out/step_2", good)
            await until(lambda: sealed(world) == [2])

    asyncio.run(run())
    assert skipped(world) == [("step_1", "misfit")]
    assert not world.events.of(Aborted)
    reason = world.events.of(CheckpointSkipped)[0].reason
    assert "added: score.weight" in reason


@pytest.mark.parametrize("name", ["score.weight", "v_head.summary.weight", "value_head.weight", "critic.bias"])
def test_no_advice_would_make_a_critic_the_policy(world: PublishWorld, name: str) -> None:
    layout = Layout([*world.layout, TensorSpec(name, "BF16", (1, 32))])
    world.write(world.root / "out/step_1", make_weights(layout, seed=2), layout=layout)
    with pytest.raises(Incompatible, match=name) as caught:
        once(world)
    assert "--ignore" not in str(caught.value)
    assert "--select" in caught.value.hint


def stale_index(world: PublishWorld, out: Path, weights: Any) -> list[str]:
    """Leave a checkpoint in shards at `out`, of which the index alone is a stale one; names of its files."""
    world.write(out, weights, shard_bytes=2000)
    return sorted(path.name for path in out.glob("*.safetensors*"))


@pytest.mark.parametrize("gone", [True, False])
def test_one_file_goes_before_an_index_and_what_is_not_read_is_named(world: PublishWorld, gone: bool) -> None:
    """transformers loads the file: a directory was saved in shards, and then again as one file."""
    old, new = (step_weights(world.weights, seed=n) for n in (1, 2))
    out = world.root / "out/step_1"
    names = stale_index(world, out, old)
    once(world)
    if gone:
        for path in out.glob("model-*"):
            path.unlink()
    write_safetensors(out / "model.safetensors", [(spec, new[spec.name]) for spec in world.layout])
    report = once(world)
    assert same_weights(world.reader.versions()[2], new)
    assert list(report.published[0].not_read) == [name for name in names if not gone or name.endswith("json")]
    assert any("index.json" in event.what for event in world.events.of(Degraded))
    assert not once(world).published


def test_one_file_that_lacks_tensors_does_not_go_before_the_index(world: PublishWorld) -> None:
    new = step_weights(world.weights, seed=1)
    out = world.write(world.root / "out/step_1", new, shard_bytes=2000)
    write_safetensors(out / "model.safetensors", [(world.layout[0], new[world.layout[0].name])])
    once(world)
    assert same_weights(world.reader.versions()[1], new)


def test_one_file_is_waited_for_while_an_older_index_lies_beside_it(world: PublishWorld) -> None:
    out = world.write(world.root / "out/step_1", step_weights(world.weights, seed=1), shard_bytes=2000)
    put(out / "model.safetensors", b"half a fi")
    with pytest.raises(InputIncomplete, match=r"model\.safetensors"):
        once(world)
    assert sealed(world) == []


def test_shards_that_an_older_file_hides_from_loaders_are_named(world: PublishWorld) -> None:
    out = world.write(world.root / "out/step_1", step_weights(world.weights, seed=1))
    once(world)
    made = world.write(world.root / "made", step_weights(world.weights, seed=2), shard_bytes=2000)
    for path in made.glob("*.safetensors*"):
        path.rename(out / path.name)
    with pytest.raises(Incompatible, match=r"newer than model\.safetensors"):
        once(world)
    assert sealed(world) == [1]


def test_an_index_that_has_outlived_its_files_hides_no_others(world: PublishWorld) -> None:
    out = world.write(world.root / "out/step_1", step_weights(world.weights, seed=1), shard_bytes=2000)
    for path in out.glob("model-*"):
        path.unlink()
    new = step_weights(world.weights, seed=2)
    write_safetensors(out / "weights.safetensors", [(spec, new[spec.name]) for spec in world.layout])
    once(world)
    assert same_weights(world.reader.versions()[1], new)


def test_a_value_head_in_a_file_of_its_own_is_no_part_of_the_policy(world: PublishWorld) -> None:
    new = step_weights(world.weights, seed=1)
    for step, shard_bytes in ((1, 1 << 30), (2, 2000)):
        out = world.write(world.root / f"out/step_{step}", new, shard_bytes=shard_bytes)
        head = TensorSpec("v_head.summary.weight", "BF16", (1, 4))
        write_safetensors(out / "value_head.safetensors", [(head, np.zeros(4, "<u2"))])
    report = once(world)
    assert [one.not_read for one in report.published] == [("value_head.safetensors",)] * 2
