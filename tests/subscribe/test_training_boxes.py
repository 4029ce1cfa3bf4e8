"""Streams of many ranks on their way down: anchors in pieces, chunks in boxes, both cut otherwise at each version."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.tensors.partitions import SPLITS, Cut, split

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.engine.port import TensorClass
from dcr_daemon.events import discard
from dcr_daemon.ledger.audit.verify import verify
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.objects import Objects
from dcr_daemon.runtime import Workers
from dcr_daemon.subscribe.fetch.loader_computed import LoaderComputed
from dcr_daemon.subscribe.materialize import materialize

KEPT = ("head.weight", "layers.0.norm", "layers.1.experts", "layers.0.scale")


def cut_by(how: str, seed: int) -> Cut:
    def cut(layout: Layout, tensor: int):
        rng = np.random.default_rng((seed, tensor))
        name = str(rng.choice(SPLITS)) if how == "mixed" else how
        return split(name, layout[tensor].shape, 1 + seed % 7, rng)

    return cut


async def published(make_stream, how: str):
    """Versions 1 to 4, an anchor of version 2; every one by other ranks."""
    stream = await make_stream(4)
    stream.versions.cuts |= {version: cut_by(how, version) for version in range(1, 5)}
    await stream.publish(1, 2)
    await stream.anchor_of_ranks(2, cut_by(how, 11))
    await stream.publish(3, 4)
    return stream


@pytest.mark.parametrize("how", [*SPLITS, "mixed"])
async def test_any_version_is_built_from_an_anchor_of_many_ranks(how: str, make_stream, tmp_path: Path) -> None:
    stream = await published(make_stream, how)
    for version in (2, 4):
        await materialize(stream.store, version=version, out=tmp_path / f"out-{version}")
        assert stream.versions.version_of(tmp_path / f"out-{version}") == version
    assert (await verify(stream.store)).damages == []


@pytest.mark.parametrize("how", ["columns", "transposed", "any"])
async def test_what_a_loader_computes_with_is_put_together_from_boxes(how: str, make_stream, tmp_path: Path) -> None:
    stream = await published(make_stream, how)
    versions, ledger, workers = stream.versions, Ledger(stream.store), Workers()
    await ledger.read()
    objects = Objects(stream.store, floor=lambda: 0, refresh=ledger.read, emit=discard, workers=workers)
    loaded = LoaderComputed(
        tmp_path, ledger=ledger, objects=objects, layout=versions.layout, base=None, workers=workers, emit=discard
    )
    wanted = [TensorClass.LOADER_COMPUTED if spec.name in KEPT else TensorClass.EXACT for spec in versions.layout]
    loaded.set_classes(wanted)
    for version in (2, 4):
        values = loaded._read(Path(await loaded.file_of(version)))
        assert values is not None
        for tensor, bits in values.items():
            assert np.array_equal(bits, versions.values[version][versions.layout[tensor].name])
    hops = await loaded.attach_files([versions.hop(3), versions.hop(4)], 2)
    assert [bool(hop.loaded) for hop in hops] == [True, True]
    workers.close()
