"""Which checkpoint is next, and that none is published as newer than one that is."""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import suppress
from typing import Any

import pytest
from support.streams.publish_world import PublishWorld, same_weights, step_weights
from support.streams.watched import once, options, put, sealed, shards, skipped, until, watching

from dcr_daemon.events import (
    Aborted,
    Opened,
    Sealed,
    ShardTaken,
    Waiting,
)
from dcr_daemon.publish.watch.watcher import run_watch


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


def test_a_backlog_may_be_skipped_to_the_newest(world: PublishWorld) -> None:
    for n in (1, 2, 3):
        world.write(world.root / f"out/step_{n}", step_weights(world.weights, seed=n))
    once(world, newest=True)
    once(world, newest=True)
    assert sealed(world) == [3]


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
