"""Anchors that a replica downloads: files side by side within bounds of number and bytes, each verified, none twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.stores.counted import CountedStore

from dcr_daemon import runtime
from dcr_daemon.errors import Corrupt
from dcr_daemon.ledger.objects import Objects
from dcr_daemon.subscribe.fetch import anchors
from dcr_daemon.subscribe.fetch.anchors import AnchorFiles
from dcr_daemon.subscribe.fetch.stage import CONCURRENCY


def is_file(key: str) -> bool:
    return key.startswith("anchors/") and not key.endswith("index.json")


@pytest.fixture
def fetcher(tmp_path: Path) -> Callable[[CountedStore], AnchorFiles]:
    workers = runtime.Workers(1)
    return lambda store: AnchorFiles(tmp_path / "replica", Objects(store, floor=lambda: 0), workers=workers)


async def test_the_files_of_an_anchor_are_fetched_side_by_side(make_stream, fetcher):
    stream = await make_stream(1)
    await stream.publish(1)
    anchor = await stream.anchor(1, limit=5_000)
    store = CountedStore(stream.store, is_file)
    files = await fetcher(store).fetch(anchor)
    assert len(files) > CONCURRENCY
    assert store.most == CONCURRENCY
    assert set(store.gets.values()) == {1}


async def test_large_files_wait_for_their_bytes_of_memory(make_stream, fetcher, monkeypatch):
    stream = await make_stream(1)
    await stream.publish(1)
    anchor = await stream.anchor(1, limit=5_000)
    store = CountedStore(stream.store, is_file)
    monkeypatch.setattr(anchors, "BUDGET_BYTES", 1)
    await fetcher(store).fetch(anchor)
    assert store.most == 1


async def test_what_was_fetched_before_a_failure_is_not_fetched_again(make_stream, fetcher):
    stream = await make_stream(1)
    await stream.publish(1)
    anchor = await stream.anchor(1, limit=5_000)
    store = CountedStore(stream.store, is_file)
    spoilt = max(stream.home.glob("anchors/1/*/model-*.safetensors"))
    body = spoilt.read_bytes()
    spoilt.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    with pytest.raises(Corrupt):
        await fetcher(store).fetch(anchor)
    there = {path.name for path in fetcher(store).path.rglob("model-*")}
    spoilt.write_bytes(body)
    store.gets.clear()
    await fetcher(store).fetch(anchor)
    assert len(there) > CONCURRENCY
    assert not there & {Path(key).name for key in store.gets}
