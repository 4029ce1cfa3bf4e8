"""`dcr status` of a large fleet: its reports are read side by side, and shown in the order of their ids."""

from __future__ import annotations

import json

from support.stores.counted import CountedStore

from dcr_daemon.cli.status import read_status

REPLICAS = 200


async def test_the_reports_of_a_fleet_are_read_side_by_side(make_stream):
    stream = await make_stream(1)
    for n in range(REPLICAS):
        await stream.store.overwrite(f"replicas/r{n:03}.json", json.dumps({"id": "another", "version": n}).encode())
    await stream.store.overwrite("replicas/r007.json", b"{not json")
    store = CountedStore(stream.store, lambda key: key.startswith("replicas/"))
    replicas = (await read_status(store))["replicas"]
    expected = [n for n in range(REPLICAS) if n != 7]
    assert [(r["id"], r["version"]) for r in replicas] == [(f"r{n:03}", n) for n in expected]
    assert store.count("replicas/") == REPLICAS, "each is read once"
    assert 8 <= store.most <= 64, "many at once, but not as many as there are replicas"
