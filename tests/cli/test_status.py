"""`dcr status` of a large fleet: its reports are read side by side, and shown in the order of their ids."""

from __future__ import annotations

import json

import pytest
from support.stores.counted import CountedStore

from dcr_daemon.cli.log import read_rows
from dcr_daemon.cli.status import read_status
from dcr_daemon.errors import Corrupt
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.ledger import Ledger

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


async def test_void_records_are_shown(make_stream):
    stream = await make_stream(2)
    seq = stream.ledger.tip.seq + 1
    stale = records.Release(**{**stream.ledger._header().fields, "epoch": 999})
    await stream.store.create(names.record(seq), records.encode_record(stale))
    (void,) = (await read_status(stream.store))["void"]
    assert void["seq"] == seq
    assert "epoch 999 is stale" in void["why"]
    for limit in (1, None):
        rows = await read_rows(Ledger(stream.store), limit)
        assert [(row["seq"], row["state"]) for row in rows][-1] == (seq, "void")
        assert f"record {seq}: epoch 999 is stale" in rows[-1]["reason"]
        assert {frozenset(row) for row in rows} == {frozenset(rows[0])}, "every line has the same fields"


async def test_a_damaged_newest_record_is_shown(make_stream):
    stream = await make_stream(2)
    seq = stream.ledger.tip.seq + 1
    await stream.store.create(names.record(seq), b"junk")
    status = await read_status(stream.store)
    assert status["doubt"]["seq"] == seq
    assert "does not parse" in status["doubt"]["reason"]


async def test_a_hole_is_shown_wherever_it_is(make_stream):
    stream = await make_stream(3)
    for seq in range(stream.ledger.tip.seq):
        body = await stream.store.get(names.record(seq), limit=1 << 20)
        await stream.store.delete([names.record(seq)])
        for look in (read_status(stream.store), read_rows(Ledger(stream.store), 1)):
            with pytest.raises(Corrupt, match=f"record {seq} is missing"):
                await look
        await stream.store.create(names.record(seq), body)
    assert (await read_status(stream.store))["void"] == []
