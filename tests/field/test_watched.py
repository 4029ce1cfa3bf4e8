"""Watched directories as trainers and copiers leave them: never a mixture, never zeros, and a cost that grows with the
number of files, not with its square."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.processes.background import going_on
from support.streams.publish_world import PublishWorld, Weights, make_weights, same_weights, step_weights
from support.streams.watched import once, options, until, watching
from support.virtual_time import VirtualTimeRuntime

from dcr_daemon import runtime
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.safetensors import pack_safetensors
from dcr_daemon.events import Aborted, Degraded, Event, Sealed, Waiting
from dcr_daemon.ledger.records import RECORD_LIMIT
from dcr_daemon.publish.inputs.sources import FileSource, SourceChanged
from dcr_daemon.publish.watch.file_stability import STABLE_SCANS_UNCLOSED
from dcr_daemon.publish.watch.scanner import CheckpointScanner
from dcr_daemon.publish.watch.watcher import run_watch
from dcr_daemon.publish.watch.write_state import WriteState


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


@pytest.mark.parametrize("kernel", ["tells", "cannot tell"])
def test_bad_folders_do_not_delay_a_good_checkpoint(
    world: PublishWorld, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    """48 folders of pipes and rubbish, older than the checkpoint, delayed it by 30 s: nobody knows their writers."""
    if kernel == "cannot tell":
        monkeypatch.setattr(WriteState, "is_local", False)
    scans = Counter[str]()
    right = CheckpointScanner.scan

    def scan(self: CheckpointScanner, *args: Any) -> Any:
        scans["in all"] += 1
        return right(self, *args)

    monkeypatch.setattr(CheckpointScanner, "scan", scan)
    for n in range(48):
        folder = world.root / f"out/checkpoint-{n}"
        folder.mkdir(parents=True)
        if n % 2:
            os.mkfifo(folder / "model.safetensors")
        else:
            (folder / "model.safetensors").write_bytes(b"rubbish" * n)
    sealed = asyncio.Event()
    new = step_weights(world.weights, seed=1)

    def emit(told: Event) -> None:
        world.events(told)
        if isinstance(told, Sealed):
            sealed.set()

    async def run() -> None:
        async with going_on(run_watch(options(world, poll=None), world.store(), emit=emit)):
            await until(lambda: scans["in all"])
            (world.root / "out/checkpoint-100").mkdir()
            await until(lambda: scans["in all"] > 1)
            path = world.root / "out/checkpoint-100/model.safetensors"
            with path.open("wb") as file:  # inotify sees it being closed
                file.write(pack_safetensors([(spec, new[spec.name]) for spec in world.layout]))
            scans.clear()
            await sealed.wait()

    asyncio.run(run())
    assert scans["in all"] < STABLE_SCANS_UNCLOSED / 2
    assert same_weights(world.reader.versions()[1], new)


def test_a_checkpoint_that_cannot_be_read_does_not_hold_up_the_next(
    world: PublishWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header is sound and its disk is not: it was the oldest, and was tried for ever."""
    bad, good = world.root / "out/step_1", step_weights(world.weights, seed=2)
    world.write(bad, world.weights)
    right = FileSource.read

    def read(self: FileSource, *args: Any) -> Any:
        if self.file.path.parent == bad:
            raise SourceChanged(f"{self.file.path} cannot be read to its end: Input/output error")
        return right(self, *args)

    monkeypatch.setattr(FileSource, "read", read)

    async def run() -> None:
        async with watching(world):
            await until(lambda: len(world.events.of(Aborted)) > 1)
            world.write(world.root / "out/step_2", good)
            await until(lambda: world.events.of(Sealed))

    asyncio.run(run())
    assert "Input/output error" in world.events.of(Aborted)[0].reason
    assert same_weights(world.reader.versions()[1], good)


def test_what_only_its_date_says_to_be_published_is_named(world: PublishWorld) -> None:
    """A publisher that has lost its state reads few seals. A folder as old as the others was passed by silently."""
    for step in (1, 2):
        world.write(world.root / f"out/step_{step}", step_weights(world.weights, seed=step))
        once(world)
        shutil.rmtree(world.root / f"out/step_{step}")
    old = world.root / "out/step_0"

    async def run() -> None:
        async with watching(world, state=world.root / "lost", take_over=True):
            await until(lambda: any("a checkpoint below" in event.what for event in world.events.of(Waiting)))
            out = world.write(world.root / "made", step_weights(world.weights, seed=3))
            os.utime(out / "model.safetensors", (1000, 1000))
            out.rename(old)
            await until(lambda: any("step_0" in event.what for event in world.events.of(Degraded)))
            await asyncio.sleep(0.5)
            os.utime(old / "model.safetensors")
            await until(lambda: len(world.events.of(Sealed)) == 3)

    asyncio.run(run())
    (said,) = (event.what for event in world.events.of(Degraded) if "step_0" in event.what)
    assert "seals were not read" in said


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
