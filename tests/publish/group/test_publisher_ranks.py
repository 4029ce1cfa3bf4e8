"""`Publisher` on several ranks, each on a thread of this process: maps of one's own, and what cannot be projected."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from support.streams.publish_world import PublishWorld, same_weights, step_weights

from dcr_daemon import DcrError, Publisher, Trainer
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.canonical.region import Region
from dcr_daemon.codec.chunk import Operation
from dcr_daemon.codec.decode import open_chunk
from dcr_daemon.errors import Incompatible, UpdateAborted, UsageError
from dcr_daemon.events import TensorFollowed
from dcr_daemon.ledger.audit.repairs import SPARE
from dcr_daemon.ledger.audit.verify import verify
from dcr_daemon.projection.region_map import Map, Shard
from dcr_daemon.projection.tracing import trace
from dcr_daemon.projection.values import Bits

WORLD = 3
ROWS = ("embed.weight", "layer.0.weight", "layer.1.weight")


def rows(layout: Any, rank: int, *, without: Sequence[str] = (), split: Sequence[str] = ROWS) -> Map:
    """Rows of the matrices, and every other tensor whole on one rank."""
    shards = []
    for tensor, spec in enumerate(layout):
        if spec.name in without or not spec.elements:
            continue
        if spec.name in split:
            count, width = spec.shape
            size = -(-count // WORLD)
            lo, hi = rank * size, min((rank + 1) * size, count)
            shape: tuple[int, ...] = (hi - lo, width)
            first = lo * width
        elif tensor % WORLD == rank:
            shape, first = spec.shape, 0
        else:
            continue
        elements = int(np.prod(shape))
        region = Region(spec.name, (elements,), 0, (1,), first, (1,))
        shards.append(Shard(spec.name, shape, spec.dtype, Bits(), (region,)))
    return Map(tuple(shards))


def local(tensors: dict[str, Any], made: Map) -> dict[str, Any]:
    """What a rank of `rows` holds."""
    held = {}
    for shard in made.shards:
        first = shard.regions[0].dst
        held[shard.parameter] = tensors[shard.parameter].reshape(-1)[first:][: shard.elements].reshape(shard.shape)
    return held


class Ranks:
    """`WORLD` publishers of one group; `all` runs something on each, on its own thread."""

    def __init__(self, world: PublishWorld, trainer: Callable[[int], Trainer], **more: Any) -> None:
        self.world, self.pool = world, ThreadPoolExecutor(WORLD)
        self.group = f"g{np.random.default_rng().integers(1 << 40)}"

        def make(rank: int) -> Publisher:
            return Publisher(
                world.url, base=world.base, create=True, name="trainer", state=world.state, upload_base=False,
                trainer=trainer(rank), rank=rank, world=WORLD, group=self.group, lag=1.0, patience=10.0,
                emit=world.events, **more,
            )  # fmt: skip

        self.publishers = list(self.pool.map(make, range(WORLD)))

    def all(self, work: Callable[[int, Publisher], Any]) -> list[Any]:
        def safe(rank: int) -> Any:
            try:
                return work(rank, self.publishers[rank])
            except DcrError as error:
                return error

        return list(self.pool.map(safe, range(WORLD)))

    def close(self) -> None:
        list(self.pool.map(Publisher.close, self.publishers))
        self.pool.shutdown()


def publish(weights: Callable[[int], Any], step: int) -> Callable[[int, Publisher], Any]:
    return lambda rank, publisher: publisher.publish(weights(rank), step=step).wait_sealed().version


def test_maps_of_ones_own_are_published_from_every_rank(world: PublishWorld) -> None:
    layout = world.layout
    ranks = Ranks(world, lambda rank: Trainer(mapped=rows(layout, rank)))
    chain = [world.weights]
    for step in range(1, 4):
        chain.append(step_weights(chain[-1], seed=step))
        tensors = world.tensors(chain[-1])
        assert ranks.all(publish(lambda rank, t=tensors: local(t, rows(layout, rank)), step)) == [step] * WORLD
    ranks.close()
    found = world.reader.versions()
    assert all(same_weights(found[n], one) for n, one in enumerate(chain))


def test_verify_reads_what_the_ranks_agreed_on_and_names_what_is_damaged(world: PublishWorld) -> None:
    """No record names declarations, verdicts and shares, and `dcr verify` read none of them."""
    layout = world.layout
    ranks = Ranks(world, lambda rank: Trainer(mapped=rows(layout, rank)), anchor_every=1)
    tensors = world.tensors(step_weights(world.weights, seed=1))
    assert ranks.all(publish(lambda rank: local(tensors, rows(layout, rank)), 1)) == [1] * WORLD
    ranks.close()
    bucket = world.root / "bucket"
    report = asyncio.run(verify(world.store()))
    assert (report.ok, report.anchors) == (True, 1)
    suffixes = (".1.declaration", ".2.declaration", ".verdict", ".share.json", ".sums")
    agreed = sorted(path for path in bucket.rglob("*") if path.name.endswith(suffixes))
    # Rank 0 keeps what it declares, and the sums of a version are beside the parts.
    assert len(agreed) == 2 * (WORLD - 1) + 2 + WORLD + 2 * WORLD
    everything = [p for p in bucket.rglob("*") if p.is_file() and p.relative_to(bucket).parts[0] in ("data", "anchors")]
    assert report.objects == len(everything) + 1, "and the layout"
    for path in agreed:
        whole, others = path.read_bytes(), [p.read_bytes() for p in agreed if p.suffixes == path.suffixes and p != path]
        if path.suffix == ".verdict":
            others = []  # both rounds have come to the same
        for spoiled in (b"", b"junk", whole[:-1], whole + b"\0", *others[:1]):
            path.write_bytes(spoiled)
            (damage,) = asyncio.run(verify(world.store())).damages
            assert damage.key == path.relative_to(bucket).as_posix()
            assert (damage.rebuildable, damage.repair) == (True, SPARE)
        path.write_bytes(whole)
    assert asyncio.run(verify(world.store())).ok


HEAD, EMBEDDING = "lm_head.weight", "embed.weight"


def tie(world: PublishWorld, *, equal: bool = True) -> PublishWorld:
    """The base stores an output head beside the embedding, and its config ties them."""
    spec = world.layout[world.layout.index(EMBEDDING)]
    world.layout = Layout([*world.layout, TensorSpec(HEAD, spec.dtype, spec.shape)])
    world.weights = {**world.weights, HEAD: world.weights[EMBEDDING] ^ (0 if equal else 1)}
    world.base = world.write(world.root / "tied", world.weights)
    (world.base / "config.json").write_text('{"tie_word_embeddings": true}')
    return world


@pytest.mark.parametrize("left_out", [HEAD, EMBEDDING])
def test_a_tied_tensor_that_no_rank_holds_follows_on_every_rank(world: PublishWorld, left_out: str) -> None:
    layout, held = tie(world).layout, {EMBEDDING, HEAD} - {left_out}
    made = [rows(layout, rank, without=[left_out], split=[*ROWS, *held]) for rank in range(WORLD)]
    ranks = Ranks(world, lambda rank: Trainer(mapped=made[rank]))
    chain = [world.weights]
    for step in range(1, 3):
        new = step_weights(chain[-1], seed=step)
        chain.append({**new, left_out: new[next(iter(held))]})
        tensors = world.tensors(chain[-1])
        assert ranks.all(publish(lambda rank, t=tensors: local(t, made[rank]), step)) == [step] * WORLD
    ranks.close()
    found = world.reader.versions()
    assert all(same_weights(found[n], one) for n, one in enumerate(chain))
    assert [(event.name, event.source) for event in world.events.of(TensorFollowed)] == [(left_out, *held)]


def test_a_head_that_differs_in_the_stream_does_not_follow_the_ranks_embedding(world: PublishWorld) -> None:
    layout = tie(world, equal=False).layout
    made = [rows(layout, rank, without=[HEAD]) for rank in range(WORLD)]
    ranks = Ranks(world, lambda rank: Trainer(mapped=made[rank]))
    tensors = world.tensors(world.weights)
    results = ranks.all(publish(lambda rank: local(tensors, made[rank]), 1))
    assert all(HEAD in str(one) and "differs from embed.weight" in str(one) for one in results)
    assert any(isinstance(one, Incompatible) and "tie_word_embeddings" in one.hint for one in results)
    ranks.close()
    assert len(world.reader.versions()) == 1


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_head_that_a_projected_model_does_not_export_follows(world: PublishWorld, equal: bool) -> None:
    """transformers leaves it out of what it saves."""
    tie(world, equal=equal)
    new = step_weights(world.weights, seed=1)
    tensors = {name: t for name, t in world.tensors(new).items() if name != HEAD}
    conversion = trace(lambda table: {name.removeprefix("model."): t for name, t in table.items()}, given := {
        f"model.{name}": tensor for name, tensor in tensors.items()
    })  # fmt: skip
    with Publisher(
        world.url, base=world.base, create=True, state=world.state, emit=world.events,
        trainer=Trainer(conversion=conversion),
    ) as publisher:  # fmt: skip
        if not equal:
            with pytest.raises(Incompatible, match=HEAD) as caught:
                publisher.publish(given, step=1)
            assert "tie_word_embeddings" in caught.value.hint
            return
        publisher.publish(given, step=1).wait_sealed()
    assert same_weights(world.reader.versions()[1], {**new, HEAD: new[EMBEDDING]})


def test_elements_that_no_rank_has_are_refused_by_name_on_every_rank(world: PublishWorld) -> None:
    layout = world.layout
    made = [rows(layout, rank, without=["norm.weight"] if rank != 9 else []) for rank in range(WORLD)]
    ranks = Ranks(world, lambda rank: Trainer(mapped=made[rank]))
    tensors = world.tensors(world.weights)
    results = ranks.all(publish(lambda rank: local(tensors, made[rank]), 1))
    assert isinstance(results[0], Incompatible)
    assert "norm.weight" in str(results[0])
    assert all(isinstance(one, UpdateAborted) and "norm.weight" in str(one) for one in results[1:])
    ranks.close()


def test_what_are_no_weights_is_refused_on_the_rank_that_gives_it(world: PublishWorld) -> None:
    layout = world.layout
    ranks = Ranks(world, lambda rank: Trainer(mapped=rows(layout, rank)))
    tensors = world.tensors(world.weights)
    odd = ["norm.weight"]
    results = ranks.all(publish(lambda rank: odd if rank == 1 else local(tensors, rows(layout, rank)), 1))
    assert isinstance(results[1], UsageError)
    assert all(isinstance(one, UpdateAborted) and "Misuse" in str(one) for one in (results[0], results[2]))
    pairs = ranks.all(publish(lambda rank: list(local(tensors, rows(layout, rank)).items()), 2))
    assert pairs == [1] * WORLD
    ranks.close()


def test_what_cannot_be_projected_is_exported_by_the_users_hook_and_travels_as_overwrites(
    world: PublishWorld, caplog: pytest.LogCaptureFixture
) -> None:
    layout, residual = world.layout, ("embed.weight", "norm.weight")
    now: dict[str, Any] = {}
    asked: list[tuple[str, ...]] = []

    def export(names: Sequence[str]) -> Any:
        asked.append(tuple(names))
        return ((name, now[name]) for name in names)

    made = [rows(layout, rank, without=residual) for rank in range(WORLD)]
    ranks = Ranks(world, lambda rank: Trainer(mapped=made[rank], export=export))
    chain = [world.weights]
    for step in range(1, 3):
        chain.append(step_weights(chain[-1], seed=step))
        now.update(world.tensors(chain[-1]))
        assert ranks.all(publish(lambda rank: local(now, made[rank]), step)) == [step] * WORLD
    ranks.close()
    found = world.reader.versions()
    assert all(same_weights(found[n], one) for n, one in enumerate(chain))
    assert set(asked[-1]) == set(residual)
    for path in world.root.rglob("*.dcr"):
        for segment in open_chunk(path.read_bytes(), layout).segments:
            if layout[segment.tensor].name in residual:
                assert segment.operation is Operation.OVERWRITE


def test_no_rank_begins_an_export_that_another_one_cannot_join(world: PublishWorld) -> None:
    """An export is a collective: whoever enters it waits for all, and a rank that has failed never comes."""
    layout, residual = world.layout, ("embed.weight", "norm.weight")
    now: dict[str, Any] = {}
    meeting = threading.Barrier(WORLD, timeout=60)

    def export(names: Sequence[str]) -> Any:
        meeting.wait()
        return ((name, now[name]) for name in names)

    made = [rows(layout, rank, without=residual) for rank in range(WORLD)]
    ranks = Ranks(world, lambda rank: Trainer(mapped=made[rank], export=export))

    def next_step(step: int, broken: int | None = None) -> list[Any]:
        now.update(world.tensors(step_weights(world.weights, seed=step)))
        return ranks.all(publish(lambda rank: {} if rank == broken else local(now, made[rank]), step))

    assert next_step(1) == [1] * WORLD
    for broken in range(WORLD):
        results = next_step(2, broken)
        assert isinstance(results.pop(broken), Incompatible)
        assert broken == 0 or all(isinstance(one, UpdateAborted) for one in results)
        assert all(isinstance(one, DcrError) for one in results)
    assert next_step(3) == [2] * WORLD
    ranks.close()
    assert not meeting.broken


def test_an_export_with_a_shared_scale_is_computed_whole_and_published(world: PublishWorld) -> None:
    """The export divides a tensor by its largest value: every element depends on all, so no rank can project it."""
    layout = world.layout

    def convert(table: dict[str, Any]) -> dict[str, Any]:
        out = dict(table)
        if "embed.weight" in out:
            out["embed.weight"] = out["embed.weight"] / out["embed.weight"].abs().max()
        return out

    tensors = {
        name: torch.nan_to_num(t) if t.is_floating_point() else t for name, t in world.tensors(world.weights).items()
    }
    conversion = trace(convert, tensors)
    assert set(conversion.opaque) == {"embed.weight"}
    steps = []
    with Publisher(
        world.url, base=world.base, create=True, state=world.state, emit=world.events,
        trainer=Trainer(conversion=conversion, export=lambda names: ((n, convert(tensors)[n]) for n in names)),
    ) as publisher:  # fmt: skip
        for step in range(1, 4):
            tensors["embed.weight"][step, step] = 2.0 * step
            steps.append({name: toolbox_bits(value) for name, value in convert(tensors).items()})
            publisher.publish(tensors, step=step).wait_sealed()
    found = world.reader.versions()
    for version, want in enumerate(steps, 1):
        for spec in layout:
            assert np.array_equal(found[version][spec.name], want[spec.name]), (version, spec.name)


def toolbox_bits(tensor: Any) -> Any:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().view(f"<u{tensor.element_size()}")


def test_a_listener_is_told_what_is_residual_and_why(world: PublishWorld, caplog: pytest.LogCaptureFixture) -> None:
    layout = world.layout
    tensors = world.tensors(world.weights)
    made = Map(
        tuple(
            Shard(s.name, s.shape, s.dtype, Bits(), (Region(s.name, (s.elements,), 0, (1,), 0, (1,)),))
            for s in layout
            if s.elements and s.name != "norm.weight"
        ),
        {"norm.weight": "nobody knows where it is"},
    )
    with (
        caplog.at_level(logging.WARNING, "dcr_daemon"),
        Publisher(
            world.url, base=world.base, create=True, state=world.state,
            trainer=Trainer(mapped=made, export=lambda names: ((n, tensors[n]) for n in names)),
        ) as publisher,
    ):  # fmt: skip
        publisher.publish({n: t for n, t in tensors.items() if n != "norm.weight"}, step=1).wait_sealed()
    assert "nobody knows where it is: norm.weight" in caplog.text
