"""`dcr gc` on a real S3 server, which is asked itself whether an anchor is whole, and deletes in batches."""

from __future__ import annotations

import asyncio
import json

import pytest
from support.stores.memory import MemoryStore
from support.streams.record_history import HistoryWriter

from dcr_daemon.cli.app import run
from dcr_daemon.ledger import names
from dcr_daemon.store import open_store, put_if_absent


@pytest.mark.seaweed
def test_what_is_collected_on_a_real_store(s3_stream: str, capsys: pytest.CaptureFixture[str]) -> None:
    memory = MemoryStore()
    writer = HistoryWriter(memory)
    writer.claim()
    for version in range(1, 9):
        writer.put(names.chunk(version, writer.open().seq, "g", 0, "a0", 0), b"chunk" * 1000)
        writer.seal()
        if version in (4, 7):
            writer.anchor(version, [("model.safetensors", b"weights" * 100_000), ("empty.txt", b"")])
    writer.release()

    async def keys(upload: dict[str, bytes]) -> set[str]:
        store = await open_store(s3_stream)
        for key, body in upload.items():
            await put_if_absent(store, key, body)
        found = {entry.key async for entry in store.list("")}
        await store.close()
        return found

    gone = [key for key in memory.objects if key.startswith("anchors/7/") and key.endswith(".safetensors")]
    before = asyncio.run(keys({key: body for key, body in memory.objects.items() if key not in gone}))
    capsys.readouterr()
    assert run(["gc", s3_stream, "--keep-versions", "1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["floor"] == 4, "the anchor of version 7 lacks a file"
    assert before - asyncio.run(keys({})) == {item["key"] for item in said["items"]}
    asyncio.run(keys({key: memory.objects[key] for key in gone}))
    assert run(["gc", s3_stream, "--keep-versions", "1"]) == 0
    left = asyncio.run(keys({}))
    assert {key.split("/")[1] for key in left if key.startswith(("data/", "anchors/"))} == {"0", "7", "8"}
