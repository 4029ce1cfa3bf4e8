"""Weights that were wrong although everything had said that they were right. Each test ends with every bit compared."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.streams.replica import Replica
from support.streams.trainer import Trainer, until
from support.streams.versions import Versions
from support.streams.writer import StreamWriter

from dcr_daemon.canonical.dtypes import bits_dtype
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.directory import Checkpoint, write_checkpoint
from dcr_daemon.checkpoint.safetensors import pack_safetensors
from dcr_daemon.codec.chunk import Codec
from dcr_daemon.errors import Corrupt, EngineRefused
from dcr_daemon.events import Aborted, Committed, Repaired, Retrying, Serving
from dcr_daemon.ledger.objects import ObjectPending
from dcr_daemon.ledger.records import Floor

BF16 = np.arange(1 << 16, dtype=np.uint16)
ZEROS, INFINITIES, NANS = (0x0000, 0x8000), (0x7F80, 0xFF80), (0x7FC0, 0xFFC0, 0x7F81, 0x7FFF)


class Patterns(Versions):
    """Every bit pattern of BF16 beside every kind of neighbour; `values[v]` is what version v holds."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        neighbours = self._neighbours()
        self.layout = Layout(
            [
                TensorSpec("patterns", "BF16", (len(neighbours), 1 << 16)),
                TensorSpec("router.bias", "F32", (1 << 16,)),
            ]
        )
        fp32 = np.random.default_rng(1).permutation(1 << 16).astype(np.uint32) << 16
        old = np.tile(BF16, (len(neighbours), 1))
        self.values = [{"patterns": old.reshape(-1), "router.bias": fp32}]
        # An fp32 value that moves by less than BF16 can tell is a change like any other.
        moved = fp32 ^ np.random.default_rng(2).integers(1, 1 << 15, fp32.size, dtype=np.uint32)
        self.put({"patterns": np.concatenate(neighbours), "router.bias": moved})
        self.put({"patterns": old[:, ::-1].reshape(-1).copy(), "router.bias": fp32})
        self.put(self.values[0])

    @staticmethod
    def _neighbours() -> list[np.ndarray]:
        flips = [BF16 ^ np.uint16(1 << bit) for bit in range(16)]
        steps = [BF16 + np.uint16(1), BF16 - np.uint16(1)]
        constants = [np.full_like(BF16, bits) for bits in (*ZEROS, *INFINITIES, *NANS)]
        rng = np.random.default_rng(0)
        pairs = [rng.permutation(BF16) for _ in range(6)]  # every pattern is left once and reached once in each
        return [*flips, *steps, *constants, *pairs]


@pytest.mark.parametrize("codec", list(Codec), ids=lambda codec: codec.name)
async def test_every_bit_pattern_goes_to_every_neighbour_from_trainer_to_replica(tmp_path: Path, codec: Codec) -> None:
    """+0 to -0 was no change, NaN was always one or was never written, and a detector by value missed what it could."""
    (tmp_path / "versions").mkdir()
    trainer = Trainer(tmp_path, Patterns(tmp_path / "versions"))
    replica = trainer.replica(at=0)
    for version in (1, 2, 3):
        await trainer.publish(version, codec=codec)
        await replica.once()
        assert trainer.versions.version_of(replica.directory) == version
    assert [event.version for event in replica.events.of(Serving)] == [1, 2, 3]


@pytest.mark.parametrize("tensors", [1, 7, 64, 200])
async def test_it_does_not_matter_how_a_version_is_cut(tmp_path: Path, tensors: int) -> None:
    """Output was garbled with small buckets and right with large ones."""
    layout = Layout([TensorSpec(f"layer.{n:03d}.weight", "BF16", (24, 16)) for n in range(200)])
    (tmp_path / "versions").mkdir()
    versions = Versions(tmp_path / "versions")
    versions.layout = layout
    rng = np.random.default_rng(0)
    versions.values = [{spec.name: rng.integers(0, 1 << 16, spec.elements, dtype=np.uint16) for spec in layout}]
    for _ in range(2):
        versions.step(0.5)
    trainer = Trainer(tmp_path, versions)
    await trainer.publish(1, 2, chunk_bytes=512 * tensors if tensors < 200 else 16 << 20)
    chunks = [key for key in trainer.bucket.objects if key.startswith("data/1/") and key.endswith(".dcr")]
    assert (len(chunks) > 100) == (tensors == 1)
    assert (len(chunks) == 1) == (tensors == 200)
    replica = trainer.replica(at=0)
    await replica.once()
    assert versions.version_of(replica.directory) == 2


def spoil(path: Path, tensor: str, bits: np.ndarray) -> None:
    """Put bits into a tensor's pages behind everybody's back: size and times stay, as a host crash leaves them."""
    with Checkpoint(path) as checkpoint:
        old = checkpoint.bits(tensor).tobytes()
        (file,) = [file.path for file in checkpoint.files if file.path.read_bytes().count(old) == 1]
    stat, body = file.stat(), file.read_bytes()
    file.write_bytes(body.replace(old, bits.tobytes()))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("anchored", [True, False])
async def test_a_tensor_that_lost_its_last_pages_is_found_at_the_start(
    make_trainer: Callable[..., Trainer], anchored: bool
) -> None:
    """After a host crash a tensor was old whose checksum nobody took, because the next delta did not touch it."""
    trainer = make_trainer()
    versions = trainer.versions
    for version in (1, 2, 3):
        fresh = dict(versions.values[-1])
        touched = "embed.weight" if version == 1 else "layers.0.mlp"
        fresh[touched] = fresh[touched] ^ np.uint16(version)
        versions.put(fresh)
    await trainer.publish(1, 2, upload_base=False, anchor_every=2 if anchored else None, anchor_share=None)
    replica = trainer.replica(at=0)
    await replica.once()
    assert versions.version_of(replica.directory) == 2
    spoil(replica.directory, "embed.weight", versions.values[0]["embed.weight"])
    await trainer.publish(3, anchor_share=None)
    if anchored:
        await replica.once()
        assert [event.version for event in replica.events.of(Repaired)] == [2]
        assert versions.version_of(replica.directory) == 3
    else:
        served = len(replica.events.of(Serving))
        with pytest.raises(EngineRefused, match="of no version of this stream"):
            await replica.once()
        assert len(replica.events.of(Serving)) == served


async def test_an_anchor_that_holds_only_what_changed_is_no_anchor(make_stream: Any, make_replica: Any) -> None:
    """A periodic full copy held the changed parameters alone, and could repair no drift."""
    stream: StreamWriter = await make_stream(2)
    await stream.publish(1, 2)
    whole, name = stream.versions.layout, "layers.0.mlp"
    stream.versions.layout = Layout([spec for spec in whole if spec.name != name])
    await stream.anchor(2, limit=1 << 30)
    stream.versions.layout = whole
    replica: Replica = make_replica(stream)
    with pytest.raises((Corrupt, EngineRefused), match=name):
        await replica.once()
    assert not list(replica.directory.glob("*.safetensors"))
    assert not replica.events.of(Serving)


async def test_an_object_of_the_right_size_with_other_bytes_is_fetched_again(
    make_trainer: Callable[..., Trainer],
) -> None:
    """A file was taken for the one that was wanted because it was as long; and all versions were fetched for one."""
    trainer = make_trainer(6)
    await trainer.publish(*range(1, 5))
    replica = trainer.replica(at=0)
    await replica.once()
    await trainer.publish(5, 6)
    chunks = [key for key in trainer.bucket.objects if key.startswith("data/5/") and key.endswith(".dcr")]
    replica.store = line = trainer.line()
    lies = dict.fromkeys(chunks, 1)
    plain = trainer.bucket.get

    async def get(key: str, *, limit: int, keep: Any = None) -> bytes:
        body = await plain(key, limit=limit)
        if lies.pop(key, 0):
            return bytes(len(body))
        return body

    trainer.bucket.get = get
    await replica.once()
    assert trainer.versions.version_of(replica.directory) == 6
    read = {key.split("/")[1] for operation, key in line.asked if operation == "get" and key.startswith("data/")}
    assert read <= {"4", "5", "6"}, "of older versions at most the vector of the present one"
    assert not any(key.startswith("anchors/") for _, key in line.asked)


def shards(versions: Versions, version: int, out: Path, count: int) -> None:
    """A checkpoint in `count` files with an index, written over whatever lies there."""
    out.mkdir(exist_ok=True)
    names = [spec.name for spec in versions.layout]
    index = {}
    for n in range(count):
        items = [
            (spec, versions.values[version][spec.name]) for spec in versions.layout if spec.name in names[n::count]
        ]
        file = f"model-{n + 1:05d}-of-{count:05d}.safetensors"
        (out / file).write_bytes(pack_safetensors(items))
        index |= {spec.name: file for spec, _ in items}
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


async def test_shards_left_by_a_killed_run_are_not_mixed_with_those_of_the_next(
    make_trainer: Callable[..., Trainer],
) -> None:
    """A resumed run wrote into the directory of the run before; leftover shards were read as its own."""
    trainer = make_trainer(2)
    place = trainer.out / "checkpoint-1"
    shards(trainer.versions, 1, place, 4)
    for number in (2, 4):
        (place / f"model-{number:05d}-of-00004.safetensors").unlink()
    line = trainer.line()
    async with trainer.publishing(line) as task:
        await until(lambda: "Open" in trainer.kinds(), task)
        line.cut()  # killed in the middle of the version
    shards(trainer.versions, 2, place, 3)  # two files of four are still there
    assert len(list(place.glob("*.safetensors"))) == 5
    await trainer.once()
    assert trainer.sealed == [(1, 1)]
    dead = {record.seq for record in trainer.records() if type(record).__name__ == "Open"}
    (seal,) = [record for record in trainer.records() if type(record).__name__ == "Seal"]
    assert seal.attempt == max(dead)
    assert len(dead) == 2
    replica = trainer.replica(at=0)
    await replica.once()
    assert trainer.versions.version_of(replica.directory) == 2


@pytest.mark.parametrize("marks", ["lost", "kept"])
async def test_a_replica_restarted_from_the_base_model_does_not_apply_late_deltas_to_it(
    make_trainer: Callable[..., Trainer], marks: str
) -> None:
    """A restarted receiver rebuilt its copy from the base model, and patched step N onto it."""
    trainer = make_trainer(4)
    await trainer.publish(1, 2, 3, upload_base=False, anchor_share=None)
    replica = trainer.replica(at=0)
    await replica.once()
    assert trainer.versions.version_of(replica.directory) == 3
    kept = shutil.copytree(replica.directory / ".dcr", trainer.home / "kept")
    shutil.rmtree(replica.directory)
    trainer.versions.save(replica.directory, 0, shard_bytes=30_000)
    if marks == "kept":
        shutil.copytree(kept, replica.directory / ".dcr")
    await trainer.publish(4, anchor_share=None)
    await replica.once()
    assert trainer.versions.version_of(replica.directory) == 4
    assert [(event.base, event.version) for event in replica.events.of(Committed)] == [(0, 3), (0, 4)]


@pytest.mark.parametrize("floor", [True, False])
@pytest.mark.parametrize("anchored", [True, False])
async def test_early_deltas_that_were_pruned_are_never_skipped(
    make_stream: Any, make_replica: Any, anchored: bool, floor: bool
) -> None:
    """A pruner kept the newest deltas, and a cold reader replayed those it found onto version 0."""
    stream: StreamWriter = await make_stream(7, rate=0.001)
    await stream.publish(1, 2, 3, 4, 5)
    if anchored:
        await stream.anchor(5)
    await stream.publish(6, 7)
    if floor:
        await stream.ledger.append(lambda header: Floor(**header.fields, floor=5 if anchored else 0))
    for version in (1, 2, 3, 4):
        shutil.rmtree(stream.home / "data" / str(version))
    replica: Replica = make_replica(stream).at_base(stream)
    if anchored:
        await replica.once(patience=0.1)
        assert stream.versions.version_of(replica.directory) == 7
        assert replica.events.of(Committed)[0].route == "anchor"
        return
    with pytest.raises(ObjectPending, match="did not appear"):
        await replica.once(patience=0.1)
    async with replica.running(patience=0.1) as task:
        await until(lambda: sum("did not appear" in event.what for event in replica.events.of(Retrying)) > 1, task)
    assert stream.versions.version_of(replica.directory) == 0
    assert not replica.events.of(Committed)


async def test_a_checkpoint_that_loses_its_directory_while_it_is_read_leaves_no_trace(
    make_trainer: Callable[..., Trainer],
) -> None:
    """A trainer deleted an old checkpoint under a reader that was slow."""
    trainer = make_trainer(2)
    place = trainer.out / "checkpoint-1"
    shards(trainer.versions, 1, place, 3)
    last = place / "model-00003-of-00003.safetensors"
    last.unlink()
    async with trainer.publishing() as task:
        await until(lambda: "Open" in trainer.kinds(), task)
        shutil.rmtree(place)
        await until(lambda: trainer.events.of(Aborted), task)
        trainer.save(2)
        await until(lambda: trainer.sealed, task)
    replica = trainer.replica(at=0)
    await replica.once()
    assert trainer.versions.version_of(replica.directory) == 2


async def test_a_tied_head_that_is_stored_twice_is_one_tensor_and_raises_no_alarm(tmp_path: Path) -> None:
    """An update of the embeddings did not reach the tied head; and a head that was not sent was called missing."""
    layout = Layout([TensorSpec("embed.weight", "BF16", (33, 8)), TensorSpec("norm.weight", "F32", (8,))])
    (tmp_path / "versions").mkdir()
    versions = Versions(tmp_path / "versions")
    versions.layout = layout
    versions.values = [{s.name: np.arange(s.elements).astype(bits_dtype(s.width)) + (1 << 10) for s in layout}]
    versions.step(0.5)
    trainer = Trainer(tmp_path, versions)
    doubled = Layout([*layout, TensorSpec("lm_head.weight", "BF16", (33, 8))])
    values = versions.values[1] | {"lm_head.weight": versions.values[1]["embed.weight"]}
    hidden = tmp_path / "doubled"
    write_checkpoint(
        hidden, doubled, bits_of=values.__getitem__, side_files={"config.json": b'{"tie_word_embeddings": true}'}
    )
    await asyncio.to_thread(hidden.rename, trainer.out / "checkpoint-1")
    await trainer.once()
    assert trainer.sealed == [(1, 1)]
    replica = trainer.replica(at=0)
    await replica.once()
    assert versions.version_of(replica.directory) == 1
