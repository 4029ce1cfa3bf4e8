"""`dcr status` of a large fleet: its reports are read side by side, and shown in the order of their ids."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.stores.counted import CountedStore

from dcr_daemon import runtime
from dcr_daemon.cli.app import run
from dcr_daemon.cli.log import read_rows
from dcr_daemon.cli.status import _describe, count_fleet, read_status
from dcr_daemon.errors import Corrupt
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.subscribe.status import judge, stale_after

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


NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


def report(seconds: float, **fields):
    return {
        "id": "r",
        "at": (NOW - timedelta(seconds=seconds)).isoformat(),
        "state": "serving",
        "refresh": 120.0,
    } | fields


@pytest.mark.parametrize(
    ("told", "stale"),
    [
        (report(120), False),
        (report(stale_after(120.0) + 1), True),
        (report(stale_after(120.0) + 1, state="stopped"), False),
        (report(300, refresh=0.0), False),  # an older version's, which writes every 5 minutes
        (report(500, refresh="soon"), True),
        (report(0, at="yesterday"), True),
        (report(0, at=None, state=["x"]), True),
        (report(-1000), False),  # its clock is ahead
    ],
)
def test_a_replica_that_has_missed_its_next_report_is_stale(told, stale):
    assert judge(told, head=9, now=NOW)["stale"] is stale


def test_age_and_lag_are_told_and_unknown_where_they_are_not_known():
    found = judge(report(47, version=7), head=9, now=NOW)
    assert (found["age"], found["lag"]) == (47.0, 2)
    found = judge(report(0, at="?", version="x"), head=9, now=NOW)
    assert (found["age"], found["lag"]) == (None, None)


def test_a_fleet_is_summed_up_in_one_line():
    fleet = [
        report(5, version=9, serving=True),
        report(5, version=8, serving=True),
        report(5, state="loading", version=8),
        report(9999, version=9, serving=True),
        report(9999, version=9, state="stopped"),
    ]
    counted = count_fleet([judge(told, head=9, now=NOW) for told in fleet])
    assert counted == {"replicas": 5, "serving": 2, "current": 1, "stale": 1, "ended": 1}
    assert _describe(counted) == "5 replicas: 2 serving (1 at the newest version), 1 STALE, 1 ended, 1 not serving"


def test_status_shows_a_dead_replica_and_forget_removes_it(own_stream, capsys):
    bucket = Path(own_stream.url.removeprefix("file://"))
    (bucket / "replicas").mkdir(exist_ok=True)
    dead, alive = bucket / "replicas" / "dead-0.json", bucket / "replicas" / "alive-0.json"
    dead.write_text(json.dumps({"at": "2026-01-01T00:00:00+00:00", "version": 1, "state": "serving", "refresh": 120}))
    alive.write_text(json.dumps({"at": runtime.now().isoformat(), "version": 3, "state": "serving", "serving": True}))
    assert run(["status", own_stream.url]) == 0
    shown = capsys.readouterr().out
    assert "2 replicas: 1 serving (1 at the newest version), 1 STALE" in shown
    assert "STALE (serving)" in shown
    assert run(["forget", own_stream.url, "alive-0"]) == 2, "it lives"
    assert run(["forget", own_stream.url, "nobody"]) == 11
    assert run(["forget", own_stream.url, "dead-0"]) == 0
    assert (dead.exists(), alive.exists()) == (False, True)
    assert run(["forget", own_stream.url, "alive-0", "--force", "--json"]) == 0
    assert not alive.exists()


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
