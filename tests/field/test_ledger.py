"""Ledgers that lost records, and two processes that create one at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
from support.events import RecordedEvents
from support.streams.publish_world import PublishWorld, step_weights

from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.cli.log import read_rows
from dcr_daemon.cli.status import read_status
from dcr_daemon.errors import Corrupt, Fenced
from dcr_daemon.events import Alarm
from dcr_daemon.ledger import names
from dcr_daemon.ledger.audit.verify import verify
from dcr_daemon.ledger.holes import REACH
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.retention.collector import collect
from dcr_daemon.ledger.retention.plan import RetentionPolicy
from dcr_daemon.publish.group.leader import Leader
from dcr_daemon.publish.group.opening import open_leader
from dcr_daemon.publish.inputs.sources import FileSource
from dcr_daemon.publish.options import PublishOptions
from dcr_daemon.store.file import FileStore
from dcr_daemon.store.port import Entry, Outcome
from dcr_daemon.subscribe.materialize import materialize


@pytest.fixture
def world(tmp_path: Path) -> PublishWorld:
    return PublishWorld(tmp_path)


async def opened(world: PublishWorld, store: Any = None, **more: Any) -> Leader:
    options: dict[str, Any] = {"base": world.base, "create": True, "workers": 1, "name": "trainer", "keep_versions": 1}
    return await open_leader(PublishOptions(**options | more), store or world.store(), emit=world.events)


async def publish(session: Leader, world: PublishWorld, count: int) -> None:
    weights = world.weights
    for n in range(count):
        weights = step_weights(weights, seed=n)
        attempt = await session.begin()
        with Checkpoint(world.write(world.root / f"checkpoint-{attempt.id}", weights)) as checkpoint:
            inputs = [(session.layout.index(s.name), FileSource(f, s)) for f in checkpoint.files for s in f.specs]
            await attempt.diff(inputs)
        await attempt.finish()
        await session.seal(attempt)


@pytest.mark.parametrize("lost", [0, 1, 3, 7, 8])
async def test_a_publisher_without_its_state_begins_no_second_history_over_a_hole(
    world: PublishWorld, lost: int
) -> None:
    """It claimed in the hole, sealed over sealed versions, and deleted their data as never sealed."""
    session = await opened(world, state=world.root / "first", anchor_every=None, anchor_share=None, keep_versions=None)
    await publish(session, world, 5)
    await session.close()
    bucket = world.root / "bucket"
    record = bucket / names.record(lost)
    body = record.read_bytes()
    record.unlink()
    present = {path: path.read_bytes() for path in bucket.rglob("*") if path.is_file()}
    with pytest.raises(Corrupt, match=f"damaged: record {lost} is missing although later ones exist"):
        await opened(world, state=world.root / "lost")
    probes = {path for path in bucket.rglob("*") if "probe" in path.parts}
    assert {path: path.read_bytes() for path in bucket.rglob("*") if path.is_file() and path not in probes} == present
    record.write_bytes(body)
    session = await opened(world, state=world.root / "restored")
    assert session.head == 5
    await session.close()
    assert (await verify(world.store())).ok
    assert (await materialize(world.store(), out=world.root / "out", base=world.base)).version == 5


class CountedRecords(FileStore):
    """Counts GETs of records, and what is written or deleted."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gets = self.changes = 0

    async def get(self, key: str, **more: Any) -> bytes:
        self.gets += key.startswith(names.LEDGER)
        return await super().get(key, **more)

    async def create(self, key: str, body: bytes | memoryview) -> Outcome:
        self.changes += 1
        return await super().create(key, body)

    async def delete(self, keys: Iterable[str]) -> None:
        self.changes += 1
        await super().delete(keys)


async def claim(store: FileStore, out: Path) -> None:
    await Ledger(store).claim("test", take_over=True)


async def gc(store: FileStore, out: Path) -> None:
    await collect(Ledger(store), RetentionPolicy.of(1, None), take_over=True)


async def log(store: FileStore, out: Path) -> None:
    await read_rows(Ledger(store), 1)


async def status(store: FileStore, out: Path) -> None:
    await read_status(store)


@pytest.mark.parametrize("command", [claim, gc, log, status])
async def test_every_command_finds_a_hole_before_it_does_anything(make_stream: Any, command: Any) -> None:
    """Wherever it is, with about ten GETs more than without it."""
    async for seq, store in each_hole(await published(make_stream)):
        with pytest.raises(Corrupt, match=f"record {seq} is missing although later ones exist"):
            await command(store, store.root)
        assert store.changes == 0
        assert store.gets <= SEARCH + REACH + 6  # what is absent is looked for twice


async def test_a_cold_reader_believes_no_edge_of_a_hole(make_stream: Any, tmp_path: Path) -> None:
    """A replica without its state, and `dcr materialize`: both refuse, or have the true head; the latter then says what
    is missing all the same."""
    stream = await published(make_stream)
    tip, refused = stream.ledger.tip, 0
    async for seq, store in each_hole(stream):
        ledger, events = Ledger(store, mark=tmp_path / f"mark-{seq}"), RecordedEvents()
        building = materialize(store, out=tmp_path / f"out-{seq}", emit=events)
        try:
            await ledger.read()
        except Corrupt:
            refused += 1
            assert store.gets <= SEARCH + REACH + 6  # what is absent is looked for twice
            with pytest.raises(Corrupt, match=f"record {seq} is missing"):
                await building
        else:
            assert ledger.tip == tip
            with contextlib.suppress(Corrupt):  # the record of what it is to be built from
                assert (await building).version == 4
            assert any(f"record {seq} is missing" in event.what for event in events.of(Alarm))
    assert 0 < refused < tip.seq


SEARCH = 8  #: GETs that find the tail of so short a ledger


async def published(make_stream: Any) -> Any:
    stream = await make_stream(4)
    await stream.publish(1, 2)
    await stream.anchor(2)
    await stream.publish(3, 4)
    await stream.anchor(4)
    return stream


async def each_hole(stream: Any) -> AsyncIterator[tuple[int, CountedRecords]]:
    """The stream without one of its records: each of them but the newest, in turn."""
    for seq in range(stream.ledger.tip.seq):
        record = stream.home / names.record(seq)
        body = record.read_bytes()
        record.unlink()
        yield seq, CountedRecords(stream.home)
        record.write_bytes(body)


class Paused(FileStore):
    """Waits before it lists everything."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()

    async def list(self, prefix: str) -> AsyncIterator[Entry]:
        if not prefix:
            self.reached.set()
            await self.go_on.wait()
        async for entry in super().list(prefix):
            yield entry


@pytest.mark.parametrize("name", ["trainer", "other"])
async def test_of_two_creators_the_later_joins_or_is_fenced(world: PublishWorld, name: str) -> None:
    """It had read slot 0 as free, and said that the prefix holds objects and no ledger."""
    store = Paused(world.root / "bucket")
    second = asyncio.create_task(opened(world, store, state=world.root / "second", name=name))
    await store.reached.wait()
    first = await opened(world, state=world.root / "first")
    store.go_on.set()
    if name == "other":
        with pytest.raises(Fenced) as caught:
            await second
        assert caught.value.exit_code == 12
        await first.close()
        return
    joined = await second
    assert joined.ledger.stream == first.ledger.stream
    with pytest.raises(Fenced):
        await publish(first, world, 1)
    await publish(joined, world, 1)
    await joined.close()
