"""Tensors that an engine's loader computes with: their bytes are kept, handed over beside the hops, and built again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from dcr_daemon.checkpoint.safetensors import SafetensorsFile
from dcr_daemon.engine.directory.engine import DirectoryEngine
from dcr_daemon.engine.port import TensorClass, Verdict
from dcr_daemon.errors import EngineRefused, Incompatible
from dcr_daemon.events import Committed

COMPUTED = ("head.weight", "layers.0.norm", "layers.0.scale")


class ComputingEngine(DirectoryEngine):
    """A directory that plays a server whose loader computes with some tensors.

    `made` is what its loader was last given of them. It is told of no version otherwise, so that a file which does
    not come, or comes from another version, is seen.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.made: dict[str, np.ndarray] = {}
        self.fed: list[str] = []
        self.next = ""

    async def attach(self, facts):
        attached = await super().attach(facts)
        classes = [
            TensorClass.LOADER_COMPUTED if spec.name in COMPUTED else TensorClass.EXACT for spec in self._state.layout
        ]
        vector = np.frombuffer(attached.vector, dtype="<u8").copy()
        vector[[kind is TensorClass.LOADER_COMPUTED for kind in classes]] = 0
        return msgspec.structs.replace(attached, classes=classes, vector=vector.tobytes())

    async def prove(self, version, vector, label, loaded=""):
        await super().prove(version, vector, label)
        self.feed(loaded)

    async def prepare(self, txn):
        prepared = await super().prepare(txn)
        self.next = txn.hops[prepared.fits - 1].loaded
        return prepared

    async def swap(self, txn):
        ended = await super().swap(txn)
        if ended.verdict is Verdict.COMMITTED and self.next:
            self.feed(self.next)
        return ended

    async def load(self, version, files, vector, label):
        ended = await super().load(version, files, vector, label)
        for path in files:
            self.feed(path)
        return ended

    def feed(self, path: str) -> None:
        assert path, "an engine with such tensors is never proved without them"
        self.fed.append(Path(path).name)
        with SafetensorsFile(path) as file:
            self.made |= {spec.name: file.bits(spec.name).copy() for spec in file.specs if spec.name in COMPUTED}

    def holds(self, values) -> bool:
        return all(np.array_equal(self.made[name], values[name]) for name in COMPUTED)


def kept(replica) -> list[str]:
    return sorted(path.name for path in replica.home.glob("state/**/loaded-*"))


@pytest.fixture
def started(tmp_path, make_stream, make_replica):
    """A stream of `count` versions, a replica on its version 0, and the base."""

    async def start(count: int, *, publish: int = 0):
        stream = await make_stream(count)
        await stream.publish(*range(1, publish + 1))
        base = stream.versions.save(tmp_path / f"base-{id(stream)}", 0)
        current = stream.versions.save(tmp_path / f"current-{id(stream)}", 0)
        return stream, make_replica(stream, current), base

    return start


async def test_what_the_loader_was_given_last_is_the_newest_version(started):
    stream, replica, base = await started(4, publish=3)
    engine = ComputingEngine(replica.directory)
    await replica.run(engine, once=True, base=base)
    assert stream.versions.version_of(replica.directory) == 3
    assert engine.holds(stream.versions.values[3])
    assert engine.fed[0] == "loaded-0.safetensors"
    assert kept(replica) == ["loaded-3.safetensors"]
    await stream.publish(4)
    await replica.run(ComputingEngine(replica.directory), once=True)
    assert kept(replica) == ["loaded-4.safetensors"]


async def test_a_version_that_changes_none_of_them_feeds_nothing(started):
    stream, replica, base = await started(0)
    quiet = {**stream.versions.values[0], "embed.weight": stream.versions.values[0]["embed.weight"] ^ 1}
    stream.versions.put(quiet)
    await stream.publish(1)
    engine = ComputingEngine(replica.directory)
    await replica.run(engine, once=True, base=base)
    assert engine.fed == ["loaded-0.safetensors"]
    assert engine.holds(quiet)


async def test_lost_bytes_are_built_again_from_the_base_and_the_chain(started):
    stream, replica, base = await started(3, publish=3)
    await replica.run(ComputingEngine(replica.directory), once=True, base=base)
    for path in replica.home.glob("state/**/loaded-*"):
        path.unlink()
    engine = ComputingEngine(replica.directory)
    await replica.run(engine, once=True, base=base)
    assert (engine.fed, engine.holds(stream.versions.values[3])) == (["loaded-3.safetensors"], True)


@pytest.mark.parametrize("spoil", ["damaged", "of another version"])
async def test_bytes_that_are_not_the_versions_are_built_again(started, spoil):
    stream, replica, base = await started(3, publish=3)
    await replica.run(ComputingEngine(replica.directory), once=True, base=base)
    (path,) = replica.home.glob("state/**/loaded-3*")
    if spoil == "damaged":
        path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    else:
        values = stream.versions.values[2]
        with SafetensorsFile(path, writable=True) as file:
            for name in COMPUTED:
                file.write_elements(name, np.arange(values[name].size), values=values[name])
    engine = ComputingEngine(replica.directory)
    await replica.run(engine, once=True, base=base)
    assert engine.holds(stream.versions.values[3])


@pytest.mark.parametrize("limit", [30_000, 3_000], ids=["whole tensors", "tensors in pieces"])
async def test_lost_bytes_are_built_again_from_an_anchor_and_the_chain(started, limit):
    stream, replica, base = await started(4, publish=4)
    await replica.run(ComputingEngine(replica.directory), once=True, base=base)
    for path in replica.home.glob("state/**/loaded-*"):
        path.unlink()
    await stream.anchor(3, limit=limit)
    engine = ComputingEngine(replica.directory)
    await replica.run(engine, once=True)
    assert (engine.fed, engine.holds(stream.versions.values[4])) == (["loaded-4.safetensors"], True)


async def test_lost_bytes_are_rebuilt_on_another_route_if_the_cheapest_is_damaged(started):
    stream, replica, base = await started(4, publish=2)
    await replica.run(ComputingEngine(replica.directory), once=True, base=base)
    await stream.anchor(0)
    await stream.publish(3, 4)
    await stream.anchor(4)
    await replica.run(ComputingEngine(replica.directory), once=True)
    for path in (*replica.home.glob("state/**/loaded-*"), *stream.home.glob("anchors/4/**/*.safetensors")):
        path.write_bytes(b"spoilt")
    engine = ComputingEngine(replica.directory)
    await replica.run(engine, once=True)
    assert (engine.fed, engine.holds(stream.versions.values[4])) == (["loaded-4.safetensors"], True)


async def test_without_a_way_to_their_bytes_the_engine_is_refused_by_name(started):
    _, replica, _ = await started(2, publish=2)
    with pytest.raises(EngineRefused, match=r"head\.weight") as refused:
        await replica.run(ComputingEngine(replica.directory), once=True)
    assert "--base" in refused.value.hint


async def test_without_the_base_a_newer_anchor_brings_the_engine_to_a_known_state(started):
    stream, replica, base = await started(3)
    await replica.run(ComputingEngine(replica.directory), once=True, base=base)
    for path in replica.home.glob("state/**/loaded-*"):
        path.unlink()
    await stream.publish(1, 2, 3)
    await stream.anchor(2)
    engine = ComputingEngine(replica.directory)
    await replica.run(engine, once=True)
    assert stream.versions.version_of(replica.directory) == 3
    assert engine.holds(stream.versions.values[3])
    assert [one.route for one in replica.events.of(Committed)] == ["anchor", "chain"]
    assert kept(replica) == ["loaded-3.safetensors"]


async def test_a_base_of_another_version_is_refused(started, tmp_path):
    stream, replica, _ = await started(2, publish=2)
    with pytest.raises(Incompatible, match="not version 0"):
        await replica.run(
            ComputingEngine(replica.directory), once=True, base=stream.versions.save(tmp_path / "later", 1)
        )


async def test_many_versions_are_split_before_their_files_grow_too_large(started, monkeypatch):
    monkeypatch.setattr("dcr_daemon.subscribe.fetch.loader_computed.FILES_LIMIT", 20_000)
    stream, replica, base = await started(5, publish=5)
    engine = ComputingEngine(replica.directory)
    await replica.run(engine, once=True, base=base)
    assert [one.version for one in replica.events.of(Committed)] == [3, 5]
    assert engine.holds(stream.versions.values[5])
