"""Where checkpoints are looked for, and which of them are the policy."""

from __future__ import annotations

import asyncio
import os

import pytest
from support.streams.publish_world import PublishWorld, same_weights, step_weights
from support.streams.watched import once, options, put, sealed, skipped, until, watching

from dcr_daemon.checkpoint.safetensors import write_safetensors
from dcr_daemon.events import CheckpointSkipped, Sealed, ShardTaken, Waiting
from dcr_daemon.publish.watch.watcher import run_watch

#: Trainer: its tree of (path, what), in the order of writing; what is published, with its step; what is passed by.
TREES: dict[str, tuple[list[tuple[str, str]], list[tuple[str, int]], list[str]]] = {
    "OpenRLHF": (
        [
            ("_actor/global_step10/mp_rank_00_model_states.pt", "pickle"),
            ("_critic/global_step10/mp_rank_00_model_states.pt", "pickle"),
            ("global_step10_hf", "policy"),
            ("global_step20_hf", "policy"),
        ],
        [("global_step10_hf", 10), ("global_step20_hf", 20)],
        [],
    ),
    "Lightning, an export beside its own file": (
        [
            ("version_0/checkpoints/epoch=1-step=100.ckpt/checkpoint/mp_rank_00_model_states.pt", "pickle"),
            ("version_0/checkpoints/epoch=1-step=100.ckpt/hf", "policy"),
            ("version_0/checkpoints/epoch=2-step=200.ckpt/hf", "policy"),
            ("version_0/checkpoints/last.ckpt/hf", "average"),
        ],
        [
            ("version_0/checkpoints/epoch=1-step=100.ckpt/hf", 100),
            ("version_0/checkpoints/epoch=2-step=200.ckpt/hf", 200),
        ],
        ["version_0/checkpoints/last.ckpt/hf"],
    ),
    "verl": (
        [
            ("latest_checkpointed_iteration.txt", "pickle"),
            ("global_step_10/actor/huggingface", "policy"),
            ("global_step_10/actor/model_world_size_2_rank_0.pt", "pickle"),
            ("global_step_10/critic/huggingface", "average"),
            ("global_step_20/actor/huggingface", "policy"),
        ],
        [("global_step_10/actor/huggingface", 10), ("global_step_20/actor/huggingface", 20)],
        ["global_step_10/critic/huggingface"],
    ),
    "torchtitan, exported": (
        [("checkpoint/step-10", "policy"), ("checkpoint/step-20", "policy"), ("tb/20260101-1200/events", "pickle")],
        [("checkpoint/step-10", 10), ("checkpoint/step-20", 20)],
        [],
    ),
    "prime-rl": (
        [
            ("weights/step_5", "policy"),
            ("weights/step_5/STABLE", "pickle"),
            ("checkpoints/step_5/trainer/rank_0.pt", "pickle"),
            ("broadcasts/step_6", "average"),
            ("weights/step_10", "policy"),
        ],
        [("weights/step_5", 5), ("weights/step_10", 10)],
        ["broadcasts/step_6"],
    ),
    "ms-swift": (
        [
            ("Qwen3-4B/v0-20260101-120000/checkpoint-50", "policy"),
            ("Qwen3-4B/v0-20260101-120000/checkpoint-100", "policy"),
            ("Qwen3-4B/v1-20260102-120000/checkpoint-50", "policy"),
            ("Qwen3-4B/v1-20260102-120000/checkpoint-50-merged", "average"),
        ],
        [
            ("Qwen3-4B/v0-20260101-120000/checkpoint-50", 50),
            ("Qwen3-4B/v0-20260101-120000/checkpoint-100", 100),
            ("Qwen3-4B/v1-20260102-120000/checkpoint-50", 50),
        ],
        ["Qwen3-4B/v1-20260102-120000/checkpoint-50-merged"],
    ),
    "LLaMA-Factory": (
        [
            ("qwen/full/sft/checkpoint-100", "policy"),
            ("qwen/full/sft/checkpoint-100/global_step100/mp_rank_00_model_states.pt", "pickle"),
            ("qwen/full/sft/checkpoint-200", "policy"),
            ("qwen/full/sft", "average"),
        ],
        [("qwen/full/sft/checkpoint-100", 100), ("qwen/full/sft/checkpoint-200", 200)],
        ["qwen/full/sft"],
    ),
}


@pytest.mark.parametrize("trainer", TREES)
def test_of_a_trainers_tree_the_policy_is_published_in_order(world: PublishWorld, trainer: str) -> None:
    tree, published, passed_by = TREES[trainer]
    for n, (path, what) in enumerate(tree):
        if what == "pickle":
            put(world.root / "out" / path, b"\x80\x02")
            continue
        made = world.write(world.root / f"made-{n}", step_weights(world.weights, seed=n)) / "model.safetensors"
        os.utime(made, (10**9 + n, 10**9 + n))
        (world.root / "out" / path).mkdir(parents=True, exist_ok=True)
        made.rename(world.root / "out" / path / made.name)
    report = once(world)
    assert [(one.path, one.step) for one in report.published] == published
    assert {one.path: one.cause for one in report.not_published} == dict.fromkeys(passed_by, "other_shape")


def test_shards_that_an_index_lists_and_that_are_not_there_are_waited_for_by_name(world: PublishWorld) -> None:
    out = world.write(world.root / "out/step_1", step_weights(world.weights, seed=1), shard_bytes=2000)
    late = sorted(out.glob("model-*"))[1]
    late.rename(world.root / late.name)

    async def run() -> None:
        async with watching(world):
            await until(lambda: world.events.of(ShardTaken))
            await until(lambda: any(f"{late.name}: not there yet" in said.what for said in world.events.of(Waiting)))
            (world.root / late.name).rename(late)
            await until(lambda: world.events.of(Sealed))

    asyncio.run(run())
    assert sealed(world) == [1]


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
