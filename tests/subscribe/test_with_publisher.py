"""The real publisher on one side, a served directory on the other, nothing but a stream between them."""

from __future__ import annotations

import asyncio

import pytest
import torch

from dcr_daemon import Publisher
from dcr_daemon.events import Committed
from dcr_daemon.store import open_store
from dcr_daemon.subscribe.materialize import materialize

TYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
}


class Address:
    """As much of a stream as a replica needs."""

    def __init__(self, url: str) -> None:
        self.url = url


def as_tensor(bits, spec):
    if not spec.elements:
        return torch.empty(spec.shape, dtype=TYPES[spec.dtype])
    return torch.from_numpy(bits.view("u1").copy()).view(TYPES[spec.dtype]).reshape(spec.shape)


def weights(versions, version):
    """A version as a trainer would hold it, bit for bit."""
    return {spec.name: as_tensor(versions.values[version][spec.name], spec) for spec in versions.layout}


@pytest.fixture
def published(make_versions, tmp_path):
    """A publisher on a stream of its own, with version 0 uploaded."""
    versions = make_versions(4)
    base = versions.save(tmp_path / "base")
    url = f"file://{tmp_path}/bucket"
    with Publisher(url, base=base, create=True, state=tmp_path / "publisher", name="p", anchor_every=3) as publisher:
        yield versions, url, publisher


async def test_every_version_of_a_publisher_arrives_bit_for_bit(published, make_replica):
    versions, url, publisher = published
    replica = make_replica(Address(url))
    async with replica.serving() as task:
        for version in (1, 2, 3, 4):
            update = await asyncio.to_thread(publisher.publish, weights(versions, version), step=version * 10)
            await asyncio.to_thread(update.wait_sealed, 60)
            await replica.until_serving(version, task)
            assert versions.version_of(replica.directory) == version
    assert [event.step for event in replica.events.of(Committed)] == [None, 10, 20, 30, 40]


async def test_a_newcomer_starts_from_an_anchor_and_a_copy_is_built(published, make_replica, tmp_path):
    versions, url, publisher = published
    for version in (1, 2, 3, 4):
        update = await asyncio.to_thread(publisher.publish, weights(versions, version))
        await asyncio.to_thread(update.wait_sealed, 60)
    await asyncio.to_thread(publisher.close)
    replica = make_replica(Address(url))
    await replica.once()
    assert versions.version_of(replica.directory) == 4
    assert replica.events.of(Committed)[0].route == "anchor"
    store = await open_store(url)
    for version in (0, 2, 4):
        built = await materialize(store, version=version, out=tmp_path / f"v{version}")
        assert versions.version_of(built.out) == version
