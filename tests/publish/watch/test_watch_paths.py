"""Where checkpoints are looked for, and which of them are the policy."""

from __future__ import annotations

import asyncio

import pytest
from support.streams.publish_world import PublishWorld, same_weights, step_weights
from support.streams.watched import once, options, put, sealed, skipped

from dcr_daemon.checkpoint.safetensors import write_safetensors
from dcr_daemon.events import (
    CheckpointSkipped,
)
from dcr_daemon.publish.watch.watcher import run_watch


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
