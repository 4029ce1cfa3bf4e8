"""One changed byte in a record of the ledger: read once from a sound bucket, or stored until it is restored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.streams.publish_world import PublishWorld, step_weights
from support.streams.replica import Replica
from support.streams.writer import StreamWriter

from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.errors import Corrupt
from dcr_daemon.ledger.audit.verify import verify
from dcr_daemon.publish.group.opening import open_leader
from dcr_daemon.publish.inputs.sources import FileSource
from dcr_daemon.publish.options import PublishOptions
from dcr_daemon.store.file import FileStore
from dcr_daemon.subscribe.materialize import materialize

Make = Callable[..., Any]


def changed(body: bytes) -> bytes:
    """A record with another time, which parses."""
    at = body.index(b'"at":"') + len(b'"at":"')
    return body[:at] + b"X" + body[at + 1 :]


class Misreading(FileStore):
    """Its first read of the record `key` has one changed byte."""

    def __init__(self, root: Path, key: str) -> None:
        super().__init__(root)
        self.key, self.misread = key, 0

    async def get(self, key: str, *, limit: int, keep: Any = None) -> bytes:
        body = await super().get(key, limit=limit, keep=keep)
        if key != self.key or self.misread:
            return body
        self.misread += 1
        return changed(body)


def record(bucket: Path, kind: str = "", number: int = -1) -> Path:
    """The record with that number among those of one kind."""
    found = sorted((bucket / "ledger").iterdir())
    return [path for path in found if f'"kind":"{kind}'.encode() in path.read_bytes()][number]


@pytest.fixture
def world(tmp_path: Path) -> PublishWorld:
    return PublishWorld(tmp_path / "world")


async def publish(world: PublishWorld, store: FileStore, state: Path, count: int) -> None:
    options = PublishOptions(
        base=world.base, create=True, workers=1, name="trainer", keep_versions=1, anchor_every=1, state=state
    )
    session = await open_leader(options, store, emit=world.events)
    for n in range(count):
        attempt = await session.begin()
        out = world.write(world.root / f"checkpoint-{attempt.id}", step_weights(world.weights, seed=attempt.id + n))
        with Checkpoint(out) as checkpoint:
            await attempt.diff(
                [(session.layout.index(s.name), FileSource(f, s)) for f in checkpoint.files for s in f.specs]
            )
        await attempt.finish()
        await session.seal(attempt)
        await session.anchor_if_due()
    await session.close()


async def test_a_publisher_without_state_that_misread_the_newest_record_begins_no_second_history(
    world: PublishWorld, tmp_path: Path
) -> None:
    """It claimed after a record that nobody else found, sealed versions that sequential readers did not accept, and
    deleted what these needed."""
    await publish(world, world.store(), tmp_path / "first", 3)
    bucket = world.root / "bucket"
    store = Misreading(bucket, f"ledger/{record(bucket).name}")
    await publish(world, store, tmp_path / "lost", 2)
    assert store.misread == 1
    assert (await verify(world.store())).ok
    assert (await materialize(world.store(), out=tmp_path / "out")).version == 5


async def test_a_replica_that_misread_a_seal_once_is_not_left_behind(make_stream: Make, make_replica: Make) -> None:
    """It took every later record for void, and said that it serves the newest version, for ever."""
    stream: StreamWriter = await make_stream(5)
    replica: Replica = make_replica(stream).at_base(stream)
    bucket = Path(stream.url.removeprefix("file://"))
    await stream.publish(1)
    await replica.once()
    await stream.publish(2, 3)
    store = replica.store = Misreading(bucket, f"ledger/{record(bucket, 'seal', 1).name}")
    await replica.once()
    assert store.misread == 1
    assert stream.versions.version_of(replica.directory) == 3
    replica.store = None
    await stream.publish(4)
    await replica.once()
    assert stream.versions.version_of(replica.directory) == 4


async def test_a_replica_goes_on_when_a_damaged_record_is_restored(make_stream: Make, make_replica: Make) -> None:
    """It stayed at the version before, ready and with lag 0, until its state was deleted by hand."""
    stream: StreamWriter = await make_stream(5)
    replica: Replica = make_replica(stream).at_base(stream)
    await stream.publish(1, 2)
    await replica.once()
    await stream.publish(3, 4)
    damaged = record(Path(stream.url.removeprefix("file://")), "seal", 2)
    body = damaged.read_bytes()
    damaged.write_bytes(changed(body))
    with pytest.raises(Corrupt, match="does not parse"):
        await replica.once()
    damaged.write_bytes(body)
    await replica.once()
    assert stream.versions.version_of(replica.directory) == 4
