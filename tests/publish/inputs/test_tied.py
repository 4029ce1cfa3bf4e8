from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.streams.publish_world import PublishWorld, Weights, make_weights, same_weights, step_weights

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.directory import INDEX, Checkpoint
from dcr_daemon.errors import Corrupt, Incompatible
from dcr_daemon.events import TensorFollowed
from dcr_daemon.publish.publisher import Publisher
from dcr_daemon.publish.watch.watcher import WatchOptions, run_watch

EMBEDDING, HEAD = "embed.weight", "lm_head.weight"


@pytest.fixture
def tied_world(tmp_path: Path) -> PublishWorld:
    """Its base stores the head beside the embedding, and its config ties them."""
    world = PublishWorld(tmp_path / "w")
    spec = world.layout[world.layout.index(EMBEDDING)]
    world.layout = Layout([*world.layout, TensorSpec(HEAD, spec.dtype, spec.shape)])
    world.weights = {**make_weights(world.layout), **world.weights, HEAD: world.weights[EMBEDDING]}
    world.base = world.write(tmp_path / "tied", world.weights)
    tie(world.base, tied=True)
    return world


def tie(directory: Path, *, tied: bool) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "tiny", "tie_word_embeddings": tied}))


def trained(world: PublishWorld, seed: int = 1) -> Weights:
    new = step_weights(world.weights, seed=seed)
    return {**new, HEAD: new[EMBEDDING]}


def once(world: PublishWorld, *, base: Path | None = None) -> None:
    options = WatchOptions(
        state=world.state,
        base=base or world.base,
        create=True,
        workers=2,
        watch=world.root / "out",
        poll=0.05,
        once=True,
    )
    asyncio.run(run_watch(options, world.store(), emit=world.events)).check()


def without(layout: Layout, name: str) -> Layout:
    return Layout([spec for spec in layout if spec.name != name])


@pytest.mark.parametrize("name", [HEAD, EMBEDDING])
@pytest.mark.parametrize("listed", [False, True])
def test_a_tied_tensor_that_a_checkpoint_leaves_out_follows(tied_world: PublishWorld, name: str, listed: bool) -> None:
    """Qwen3-0.6B stores both, and what a trainer saves of it holds one; some indexes list what is not there."""
    new = trained(tied_world)
    out = tied_world.root / "out/step_1"
    tied_world.write(out, new, layout=without(tied_world.layout, name), shard_bytes=2000)
    if listed:
        index = json.loads((out / INDEX).read_bytes())
        index["weight_map"][name] = index["weight_map"]["norm.weight"]
        (out / INDEX).write_text(json.dumps(index))
    once(tied_world)
    assert same_weights(tied_world.reader.versions()[1], new)
    tied_world.write(tied_world.root / "out/step_2", trained(tied_world, 2), layout=tied_world.layout)
    once(tied_world)
    assert same_weights(tied_world.reader.versions()[2], trained(tied_world, 2))
    assert [(event.name, {event.source}) for event in tied_world.events.of(TensorFollowed)] == [
        (name, {HEAD, EMBEDDING} - {name})
    ]


def test_an_untied_head_does_not_follow(tied_world: PublishWorld) -> None:
    tie(tied_world.base, tied=False)
    tied_world.write(tied_world.root / "out/step_1", trained(tied_world), layout=without(tied_world.layout, HEAD))
    with pytest.raises(Incompatible, match=f"missing: {HEAD}"):
        once(tied_world)


def test_a_head_that_was_not_equal_does_not_follow(tied_world: PublishWorld) -> None:
    base = tied_world.write(tied_world.root / "other", {**tied_world.weights, HEAD: tied_world.weights[EMBEDDING] ^ 1})
    tie(base, tied=True)
    tied_world.write(tied_world.root / "out/step_1", trained(tied_world), layout=without(tied_world.layout, HEAD))
    with pytest.raises(Incompatible, match=f"missing: {HEAD}") as caught:
        once(tied_world, base=base)
    assert "tie_word_embeddings" in caught.value.hint


def test_tied_tensors_that_differ_are_refused_by_name(tied_world: PublishWorld) -> None:
    new = trained(tied_world)
    tied_world.write(tied_world.root / "out/step_1", {**new, HEAD: new[HEAD] ^ 1}, layout=tied_world.layout)
    with pytest.raises(Incompatible, match=rf"tied by config\.json and different: {HEAD}") as caught:
        once(tied_world)
    assert "train them tied" in caught.value.hint
    assert len(tied_world.reader.versions()) == 1


def test_a_head_of_its_own_beside_a_base_without_one_is_no_name_to_ignore(tied_world: PublishWorld) -> None:
    """To ignore it would serve a model with another head than the trained one."""
    base = tied_world.write(tied_world.root / "b", tied_world.weights, layout=without(tied_world.layout, HEAD))
    tie(base, tied=True)
    new = trained(tied_world)
    tied_world.write(tied_world.root / "out/step_1", {**new, HEAD: new[HEAD] ^ 1}, layout=tied_world.layout)
    with pytest.raises(Incompatible, match=f"added: {HEAD}") as caught:
        once(tied_world, base=base)
    assert "--ignore" not in caught.value.hint
    assert "ties it to the embedding" in caught.value.hint


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", [HEAD, EMBEDDING])
def test_a_publisher_that_is_given_one_of_two_tied_tensors(tied_world: PublishWorld, stream: bool, name: str) -> None:
    new = trained(tied_world)
    tensors = tied_world.tensors(new)
    different = {**tensors, HEAD: tensors[HEAD].clone()}
    different[HEAD][0, 0] = 0.5 if float(tensors[HEAD][0, 0]) != 0.5 else 0.25

    def given(table: dict[str, Any]) -> Any:
        def one_by_one() -> Iterator[tuple[str, Any]]:
            yield from table.items()

        return one_by_one() if stream else table

    with Publisher(
        tied_world.url, base=tied_world.base, create=True, state=tied_world.state, emit=tied_world.events
    ) as publisher:
        publisher.publish(given({n: t for n, t in tensors.items() if n != name}), step=1).wait_sealed()
        with pytest.raises(Incompatible, match="tied by config"):
            publisher.publish(given(different), step=2)
        publisher.publish(given(tensors), step=3).wait_sealed()
    versions = tied_world.reader.versions()
    assert same_weights(versions[1], new)
    assert same_weights(versions[2], new)
    assert [{event.name, event.source} for event in tied_world.events.of(TensorFollowed)] == [{HEAD, EMBEDDING}]


@pytest.mark.parametrize("tied", [True, False])
def test_a_base_whose_index_lists_a_tied_head(tied_world: PublishWorld, tied: bool) -> None:
    layout = without(tied_world.layout, HEAD)
    base = tied_world.write(tied_world.root / "listed", tied_world.weights, layout=layout, shard_bytes=2000)
    index = json.loads((base / INDEX).read_bytes())
    index["weight_map"][HEAD] = index["weight_map"]["norm.weight"]
    (base / INDEX).write_text(json.dumps(index))
    tie(base, tied=tied)
    if tied:
        with Checkpoint(base) as checkpoint:
            assert checkpoint.layout == layout
    else:
        with pytest.raises(Corrupt, match=HEAD):
            Checkpoint(base)


def test_the_weights_of_these_tests_are_no_constants(tied_world: PublishWorld) -> None:
    assert len(np.unique(tied_world.weights[EMBEDDING])) > 2
