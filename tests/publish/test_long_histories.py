"""A publisher starts as quickly after ten thousand versions as after ten (requests are counted, never seconds)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from support.stores.memory import MemoryStore
from support.streams.publish_world import PublishWorld
from support.streams.record_history import HistoryWriter

from dcr_daemon.canonical.fingerprint import fingerprint
from dcr_daemon.checkpoint.safetensors import pack_safetensors
from dcr_daemon.events import Alarm
from dcr_daemon.ledger.history import KEPT
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.publish.group.opening import open_leader
from dcr_daemon.publish.group.since_anchor import AnchorPolicy, SinceAnchor
from dcr_daemon.publish.options import PublishOptions
from dcr_daemon.publish.watch.published import FileTimes, read_published

HEAD = 10_000
CHAIN = 50  #: versions since the newest anchor
PROBE = 20  #: requests of the start-up probe, its clean-up among them,
PROBE_AGAIN = 5  #: and of that of a publisher that has used the store before
HOLES = 12  #: the look for records above the tail: ten GETs at growing distances, two LISTs (must L2)
SEARCH = 34  #: 2 · log2 of the records, and a few to be sure


@pytest.fixture
def long(world: PublishWorld) -> MemoryStore:
    """10,000 versions in which nothing changed, the last anchor a little way back; the floor is there."""
    store = MemoryStore()
    vector = fingerprint(world.layout, (world.weights[spec.name] for spec in world.layout))
    writer = HistoryWriter(store, world.layout, lambda version: vector)
    writer.claim()
    writer.versions(HEAD - CHAIN)
    body = bytes(pack_safetensors([(spec, world.weights[spec.name]) for spec in world.layout]))
    writer.bytes_of_anchor = len(body)
    writer.anchor(HEAD - CHAIN, [("model.safetensors", body)])
    writer.floor(HEAD - CHAIN)
    writer.versions(CHAIN)
    writer.release()
    for key in [key for key in store.objects if key.startswith("data/") and 0 < int(key.split("/")[1]) < HEAD - CHAIN]:
        del store.objects[key]
    return store


async def nothing() -> list[FileTimes]:
    return []


async def start(world: PublishWorld, store: MemoryStore, state: Path) -> int:
    """Requests from start to the first attempt's `open`, with all that a watching publisher asks for."""
    store.requests.clear()
    options = PublishOptions(state=state, name="trainer", workers=1)
    session = await open_leader(options, store, emit=world.events)
    cache = session.context.state.path / "published.json"
    await read_published(session.ledger, cache, watch=world.root / "watched", on_disk=nothing)
    await session.begin()
    asked = sum(store.requests.values())
    assert session.head == HEAD
    await session.abort_unless_sealed("test")
    await session.close()
    return asked


def test_starting_costs_the_same_however_long_the_history(
    world: PublishWorld, long: MemoryStore, tmp_path: Path
) -> None:
    async def run() -> tuple[int, int]:
        await start(world, long, tmp_path / "one")  # it has seen all sources once
        return await start(world, long, tmp_path / "one"), await cold(tmp_path / "two")

    async def cold(state: Path) -> int:
        """Without any state: by the anchor, and 50 versions with a seal, a vector and a part or none."""
        long.requests.clear()
        session = await open_leader(PublishOptions(state=state, name="trainer", workers=1), long, emit=world.events)
        asked = sum(long.requests.values())
        await session.close()
        return asked

    warm, from_nothing = asyncio.run(run())
    assert warm <= PROBE_AGAIN + HOLES + 13, "what the seals since the last anchor add up to is kept"
    assert from_nothing <= PROBE + HOLES + SEARCH + 3 * CHAIN
    assert not world.events.of(Alarm)


def since_anchor(ledger: Ledger, kept: Path, *, versions: int) -> SinceAnchor:
    """An anchor is due after `versions` of the versions that `HistoryWriter` writes, by their bytes."""
    return SinceAnchor(ledger, AnchorPolicy(None, versions * 100 - 1), dense_bytes=1, kept=kept)


async def test_whether_an_anchor_is_due_reads_each_seal_once(tmp_path: Path) -> None:
    """After more versions without an anchor than a history keeps in memory, and after a restart, too."""
    store = MemoryStore()
    writer = HistoryWriter(store)
    writer.claim()
    writer.versions(KEPT + 100)
    ledger = Ledger(store)
    await ledger.read()
    since = since_anchor(ledger, tmp_path / "chain.json", versions=KEPT + 103)
    assert not await since.due()
    store.requests.clear()
    assert not await since.due()
    assert not store.requests
    writer.versions(2)
    await ledger.read()
    store.requests.clear()
    restarted = since_anchor(ledger, tmp_path / "chain.json", versions=KEPT + 103)
    assert not await restarted.due()
    writer.versions(1)
    await ledger.read()
    store.requests.clear()
    assert await restarted.due(), "what was read before still weighs"
    assert not store.requests


@pytest.mark.parametrize(
    "damage",
    ["gone", "no JSON", "another stream", "a version that is not sealed", "older", "below its anchor", "negative"],
)
async def test_what_is_kept_of_the_chain_is_a_shortcut(tmp_path: Path, damage: str) -> None:
    writer = HistoryWriter(MemoryStore())
    writer.claim()
    writer.versions(20)
    writer.anchor(20)
    writer.versions(5)
    kept, ledger = tmp_path / "chain.json", Ledger(writer.store)
    await ledger.read()
    assert not await since_anchor(ledger, kept, versions=6).due()
    written = json.loads(kept.read_bytes())
    match damage:
        case "gone":
            kept.unlink()
        case "no JSON":
            kept.write_bytes(bytes(100))
        case "another stream":
            kept.write_text(json.dumps(written | {"stream": "other", "bytes": 1 << 40}))
        case "a version that is not sealed":
            kept.write_text(json.dumps(written | {"version": 26, "bytes": 1 << 40}))
        case "older":
            kept.write_text(json.dumps(written | {"anchor": 10, "version": 19, "bytes": 1 << 40}))
        case "below its anchor":
            kept.write_text(json.dumps(written | {"version": 19, "bytes": 0}))
        case "negative":
            kept.write_text(json.dumps(written | {"bytes": -(1 << 40)}))
    assert not await since_anchor(ledger, kept, versions=6).due()
    assert await since_anchor(ledger, kept, versions=5).due()
    assert json.loads(kept.read_bytes()) == written
