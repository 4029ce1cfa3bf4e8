"""What a checkpoint holds: names that fit the layout, and which of several weight files are read."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.streams.publish_world import PublishWorld, make_weights, same_weights, step_weights
from support.streams.watched import once, put, sealed, shards, skipped, until, watching

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.safetensors import pack_safetensors, write_safetensors
from dcr_daemon.errors import Incompatible, InputIncomplete
from dcr_daemon.events import (
    Aborted,
    CheckpointSkipped,
    Degraded,
    Opened,
    Sealed,
    ShardTaken,
)

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
