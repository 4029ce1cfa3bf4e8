"""Watched directories as trainers and copiers leave them: never a mixture, never zeros, and a cost that grows with the
number of files, not with its square."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.processes.background import going_on
from support.streams.publish_world import PublishWorld, Weights, make_weights, same_weights, step_weights
from support.streams.watched import options, until, watching
from support.virtual_time import VirtualTimeRuntime

from dcr_daemon import runtime
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.safetensors import pack_safetensors
from dcr_daemon.events import Event, Sealed, Waiting
from dcr_daemon.ledger.records import RECORD_LIMIT
from dcr_daemon.publish.watch.scanner import CheckpointScanner
from dcr_daemon.publish.watch.watcher import run_watch


@pytest.fixture
def world(tmp_path: Path) -> PublishWorld:
    return PublishWorld(tmp_path)


def shards(world: PublishWorld, weights: Weights, out: Path, count: int = 2) -> dict[Path, bytes]:
    """The files of a sharded checkpoint with its index, in the order in which `save_pretrained` writes them."""
    files, homes = {}, {}
    out.mkdir(parents=True, exist_ok=True)
    for n in range(count):
        path = out / f"model-{n + 1:05d}-of-{count:05d}.safetensors"
        specs = world.layout.specs[n::count]
        files[path] = bytes(pack_safetensors([(spec, weights[spec.name]) for spec in specs]))
        homes |= {spec.name: path.name for spec in specs}
    files[out / "model.safetensors.index.json"] = json.dumps({"weight_map": homes}).encode()
    return files


@pytest.mark.parametrize("poll", [None, 0.05])
@pytest.mark.parametrize("replace", [False, True])
def test_a_step_saved_again_into_its_old_directory_is_two_versions_and_no_mixture(
    world: PublishWorld, poll: float | None, *, replace: bool
) -> None:
    """A resumed run writes over the files of the first one, shard by shard."""
    old, new = (step_weights(world.weights, seed=n) for n in (1, 2))
    out = world.root / "out/checkpoint-40"

    async def run() -> None:
        async with watching(world, poll=poll):
            for path, body in shards(world, old, out).items():
                path.write_bytes(body)
            await until(lambda: len(world.events.of(Sealed)) == 1)
            for path, body in shards(world, new, out).items():
                written = path.with_suffix(".partial") if replace else path
                written.write_bytes(body)
                written.rename(path)
                if "00001" in path.name:
                    await until(lambda: any("rewritten in place" in event.what for event in world.events.of(Waiting)))
            await until(lambda: len(world.events.of(Sealed)) == 2)

    asyncio.run(run())
    versions = world.reader.versions()
    assert [same_weights(versions[n], weights) for n, weights in ((1, old), (2, new))] == [True, True]
    assert len(versions) == 3


@pytest.mark.parametrize("poll", [None, 0.05])
def test_a_checkpoint_written_again_before_it_was_read_to_its_end_is_no_mixture(
    world: PublishWorld, monkeypatch: pytest.MonkeyPatch, poll: float | None
) -> None:
    """It was complete and is not a version yet: its second shard is replaced while the first one is read."""
    old, new = (step_weights(world.weights, seed=n) for n in (1, 2))
    out = world.root / "out/checkpoint-40"
    last = sorted(shards(world, new, out))[1]
    for path, body in shards(world, old, out).items():
        path.write_bytes(body)
    from dcr_daemon.publish.watch.ingest import CheckpointIngest

    right = CheckpointIngest.ingest

    async def ingest(self: CheckpointIngest, unit: Any) -> None:
        await right(self, unit)
        if last.read_bytes() != shards(world, new, out)[last]:
            last.write_bytes(shards(world, new, out)[last])

    monkeypatch.setattr(CheckpointIngest, "ingest", ingest)

    async def run() -> None:
        async with watching(world, poll=poll):
            await until(lambda: any("rewritten in place" in event.what for event in world.events.of(Waiting)))
            for path, body in shards(world, new, out).items():
                if path != last:
                    path.write_bytes(body)
            await until(lambda: world.events.of(Sealed))

    asyncio.run(run())
    versions = world.reader.versions()
    assert len(versions) == 2
    assert same_weights(versions[1], new)


@pytest.mark.parametrize("poll", [None, 0.05])
def test_a_file_with_its_full_size_is_not_read_while_a_copier_fills_it(world: PublishWorld, poll: float | None) -> None:
    """Its size and its head are there from the start; the watch of its directory came after its creation."""
    new = make_weights(world.layout, seed=1)
    body = bytes(pack_safetensors([(spec, new[spec.name]) for spec in world.layout]))
    path = world.root / "out/checkpoint-1/model.safetensors"

    async def run() -> None:
        path.parent.mkdir(parents=True)
        with path.open("wb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, len(body))
            file.write(body[:4096])
            async with watching(world, poll=poll):
                await until(lambda: any("open for writing" in event.what for event in world.events.of(Waiting)))
                await asyncio.sleep(0.5)
                file.write(body[4096:])
                file.close()
                await until(lambda: world.events.of(Sealed))

    asyncio.run(run())
    assert len(world.reader.versions()) == 2
    assert same_weights(world.reader.versions()[1], new)


class Counted(VirtualTimeRuntime):
    """Time passes in sleeps alone, so the number of scans does not depend on the machine."""


def many_files(root: Path, count: int) -> tuple[PublishWorld, Weights]:
    layout = Layout([TensorSpec(f"layer.{n:05d}", "U8", (4,)) for n in range(count)])
    world = PublishWorld(root, layout=layout)
    return world, step_weights(world.weights, seed=1, rate=1.0)


@pytest.mark.parametrize("once", [True, False])
def test_the_cost_of_a_checkpoint_grows_with_its_files_and_not_with_their_square(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, once: bool
) -> None:
    calls: Counter[str] = Counter()
    for owner, name in ((Path, "stat"), (CheckpointScanner, "scan")):
        right = getattr(owner, name)

        def counted(*args: Any, right: Any = right, name: str = name, **more: Any) -> Any:
            calls[name] += 1
            return right(*args, **more)

        monkeypatch.setattr(owner, name, counted)
    costs = {}
    for count in (100, 400):
        world, new = many_files(tmp_path / str(count), count)
        for path, body in shards(world, new, world.root / "out/checkpoint-1", count).items():
            path.write_bytes(body)
        calls.clear()
        runtime.install(Counted())

        async def run(world: PublishWorld = world) -> None:
            sealed = asyncio.Event()

            def emit(told: Event) -> None:
                world.events(told)
                if isinstance(told, Sealed):
                    sealed.set()

            async with going_on(run_watch(options(world, once=once, poll=1.0), world.store(), emit=emit)):
                await sealed.wait()

        try:
            asyncio.run(run())
        finally:
            runtime.install(runtime.SystemRuntime())
        assert [one.step for one in world.events.of(Sealed)] == [1]
        costs[count] = calls["stat"] / count
        assert calls["scan"] <= 8
    assert max(costs.values()) <= 12
    assert costs[400] <= costs[100] + 1


def test_what_a_seal_says_of_its_source_is_bounded_and_recognised_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dcr_daemon.publish.watch.file_identity.MAX_NAME_BYTES", 1000)
    world, new = many_files(tmp_path, 50)
    for path, body in shards(world, new, world.root / "out/checkpoint-1", 50).items():
        path.write_bytes(body)
    for _ in range(2):
        asyncio.run(run_watch(options(world, once=True), world.store(), emit=world.events))
    assert [one.step for one in world.events.of(Sealed)] == [1]
    (sealed,) = (record for record in world.reader.records() if getattr(record, "source", None))
    assert [file["name"] for file in sealed.source["files"]] == ["50 files"]


def test_a_seal_that_lists_more_files_than_today_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, new = many_files(tmp_path, 50)
    for path, body in shards(world, new, world.root / "out/checkpoint-1", 50).items():
        path.write_bytes(body)
    asyncio.run(run_watch(options(world, once=True), world.store(), emit=world.events))
    monkeypatch.setattr("dcr_daemon.publish.watch.file_identity.MAX_NAME_BYTES", 1000)
    (world.state / "published.json").unlink(missing_ok=True)
    asyncio.run(run_watch(options(world, once=True), world.store(), emit=world.events))
    assert [one.step for one in world.events.of(Sealed)] == [1]


def test_the_longest_source_fits_a_record() -> None:
    from dcr_daemon.publish.watch.file_identity import MAX_FILES_LISTED, MAX_NAME_BYTES

    numbers = len('{"name":"","size":,"mtime_ns":,"inode":},') + 3 * 20
    assert MAX_FILES_LISTED * numbers + MAX_NAME_BYTES < RECORD_LIMIT - (64 << 10)
