"""Metrics are made from events alone, and what they are called is documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dcr_daemon
from dcr_daemon import events as e
from dcr_daemon.observe.health import Health
from dcr_daemon.observe.metrics import MUSTS, Metrics

PACKAGE = Path(dcr_daemon.__file__).parent
OPERATIONS = Path(__file__).parents[2] / "docs" / "OPERATIONS.md"
COMMITTED = e.Committed(base=1, version=2, route="chain", pause_seconds=0.004, seconds=0.5)
SEALED = e.Sealed(
    version=7, attempt=9, step=1, seq=11, changed=5, elements=500, bytes=10, dense_bytes=1000, seconds=2.0
)


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_lag_is_head_minus_served() -> None:
    metrics = Metrics()
    metrics(e.Attached(version=1, tensors=3, seconds=0.1))
    metrics(e.SealSeen(version=4, seq=12))
    assert sample(metrics, "dcr_lag_versions") == 3
    metrics(COMMITTED)
    assert sample(metrics, "dcr_lag_versions") == 2
    assert sample(metrics, "dcr_served_version") == 2
    assert sample(metrics, "dcr_head_version") == 4


def test_the_parts_of_prepare_and_of_the_pause_are_histograms() -> None:
    metrics = Metrics()
    metrics(e.Prepared(txn="t", base=1, version=2, changed=5, seconds=3.0, spent={"gather": 2.0}))
    metrics(e.Committed(base=1, version=2, route="chain", pause_seconds=1.0, seconds=4.0, phases={"apply": 0.5}))
    assert sample(metrics, "dcr_prepare_phase_seconds_sum", phase="gather") == 2.0
    assert sample(metrics, "dcr_pause_phase_seconds_sum", phase="apply") == 0.5


def test_a_publisher_reports_no_lag_and_no_served_version() -> None:
    metrics = Metrics()
    metrics(SEALED)
    assert sample(metrics, "dcr_head_version") == 7
    assert sample(metrics, "dcr_lag_versions") is None
    assert sample(metrics, "dcr_served_version") is None
    assert sample(metrics, "dcr_delta_density_ratio") == pytest.approx(0.01)


def test_a_version_is_absent_until_it_is_known() -> None:
    """After a restart the head is not 0, and `min(dcr_served_version)` over a fleet counts only who serves."""
    metrics = Metrics()
    assert b"_version " not in metrics.exposition()
    assert b"dcr_lag_versions" not in metrics.exposition()
    metrics(e.SealSeen(version=4, seq=12))
    assert sample(metrics, "dcr_head_version") == 4
    assert sample(metrics, "dcr_lag_versions") is None
    metrics(e.Attached(version=0, tensors=3, seconds=0.1))
    assert sample(metrics, "dcr_lag_versions") == 4


def test_bytes_are_counted_by_direction() -> None:
    metrics = Metrics()
    metrics(e.ChunkPut(version=1, attempt=2, n=0, bytes=100, seconds=0.1))
    metrics(e.ChunkFetched(version=1, attempt=2, key="k", bytes=40, sealed=False, seconds=0.1))
    metrics(e.ChunkFetched(version=1, attempt=2, key="l", bytes=2, sealed=True, seconds=0.1))
    assert sample(metrics, "dcr_chunk_bytes_total", direction="put") == 100
    assert sample(metrics, "dcr_chunk_bytes_total", direction="fetched") == 42


def test_store_requests_are_counted_by_operation_and_outcome() -> None:
    metrics = Metrics()
    metrics(e.StoreRequest(operation="create", outcome="lost", seconds=0.2, bytes=3))
    assert sample(metrics, "dcr_store_requests_total", operation="create", outcome="lost") == 1
    assert sample(metrics, "dcr_store_request_seconds_sum", operation="create") == pytest.approx(0.2)


def test_every_kind_of_event_is_accepted_even_where_nothing_counts_it() -> None:
    metrics = Metrics()
    for event in (e.Waiting(what="x"), e.Serving(version=1), e.EngineLost(reason="r"), e.Opened(version=1, attempt=1)):
        metrics(event)


def test_no_label_can_grow_with_versions_or_keys() -> None:
    metrics = Metrics()
    for n in range(50):
        metrics(e.ChunkPut(version=n, attempt=n, n=n, bytes=1, seconds=0.1))
        metrics(e.SealSeen(version=n, seq=n))
    lines = [line for line in metrics.exposition().decode().splitlines() if line.startswith("dcr_")]
    assert len(lines) < 300


def test_the_operations_guide_lists_every_metric() -> None:
    text = OPERATIONS.read_text()
    metrics = Metrics(Health("subscriber"))
    for event in (SEALED, COMMITTED, e.LedgerPolled(head=1)):
        metrics(event)
    names = {family.name for family in metrics.registry.collect() if family.name.startswith("dcr_")}
    assert names
    assert not {name for name in names if f"`{name}" not in text}


def test_what_blocks_a_replica_is_a_gauge_until_it_is_past() -> None:
    metrics = Metrics()
    metrics(e.Blocked(version=8, reason="r", poisoned=True))
    assert sample(metrics, "dcr_blocked", kind="poisoned") == 1
    assert sample(metrics, "dcr_blocked", kind="blocked") == 0
    metrics(e.Serving(version=7))
    assert sample(metrics, "dcr_blocked", kind="poisoned") == 1
    metrics(e.Serving(version=8))
    assert sample(metrics, "dcr_blocked", kind="poisoned") == 0


def test_an_engine_that_can_never_be_served_is_a_gauge_until_another_one_is_attached() -> None:
    metrics = Metrics()
    metrics(e.Unsupported(reason="sleep mode"))
    assert sample(metrics, "dcr_blocked", kind="unsupported") == 1
    metrics(e.EngineLost(reason="it was restarted"))
    assert sample(metrics, "dcr_blocked", kind="unsupported") == 1
    metrics(e.Attached(version=None, tensors=3, seconds=0.1))
    assert sample(metrics, "dcr_blocked", kind="unsupported") == 0


def test_scrubs_are_counted_and_dated() -> None:
    metrics = Metrics()
    assert sample(metrics, "dcr_scrub_last_timestamp_seconds") is None
    metrics(e.ScrubEnded(version=1, tensors=3, bytes=40, seconds=1.0))
    metrics(e.Damaged(version=1, tensors=["w"], what="w"))
    assert sample(metrics, "dcr_scrubs_total", outcome="clean") == 1
    assert sample(metrics, "dcr_scrubs_total", outcome="damaged") == 1
    assert sample(metrics, "dcr_scrub_bytes_total") == 40
    assert sample(metrics, "dcr_scrub_last_timestamp_seconds") > 0


def test_the_lag_is_absent_while_the_ledger_cannot_be_read() -> None:
    metrics = Metrics()
    metrics(e.Serving(version=3))
    metrics(e.LedgerPolled(head=5))
    assert sample(metrics, "dcr_lag_versions") == 2
    assert (sample(metrics, "dcr_ledger_read_timestamp_seconds") or 0) > 0
    metrics(e.LedgerUnread(seconds=50, since=None))
    metrics(e.Serving(version=4))  # what it had staged is still applied
    assert sample(metrics, "dcr_lag_versions") is None
    assert sample(metrics, "dcr_served_version") == 4
    metrics(e.LedgerPolled(head=9))
    assert sample(metrics, "dcr_lag_versions") == 5


def test_readiness_and_identity_are_metrics(tmp_path: Path) -> None:
    health = Health("subscriber")
    metrics = Metrics(health, info={"stream": "s3://b/run", "replica": "r1"}, disks={"state": tmp_path / "not" / "yet"})
    assert sample(metrics, "dcr_info", stream="s3://b/run", replica="r1", role="subscriber") == 1
    assert sample(metrics, "dcr_ready") == 0
    health(e.Serving(version=5))
    assert sample(metrics, "dcr_ready") == 1
    assert (sample(metrics, "dcr_disk_free_bytes", directory="state") or 0) > 0


def test_counters_that_alerts_need_are_there_before_the_first_event() -> None:
    metrics = Metrics(Health("subscriber"))
    emitted = {
        must for path in PACKAGE.rglob("*.py") for must in re.findall(r'Alarm\(\s*must="(\w+)"', path.read_text())
    }
    assert emitted == set(MUSTS)
    assert all(sample(metrics, "dcr_alarms_total", must=must) == 0 for must in emitted)
    assert sample(metrics, "dcr_scrubs_total", outcome="damaged") == 0
    assert sample(metrics, "dcr_versions_total", outcome="rolled_back") == 0
    assert sample(metrics, "dcr_refusals_total", what="version") == 0
    assert sample(metrics, "dcr_versions_total", outcome="sealed") is None, "a subscriber seals nothing"
    assert sample(Metrics(Health("publisher")), "dcr_versions_total", outcome="sealed") == 0


def test_refusals_are_counted() -> None:
    metrics = Metrics()
    metrics(e.Refused(subject="version", version=4, reason="r"))
    metrics(e.Unsupported(reason="sleep mode"))
    assert sample(metrics, "dcr_refusals_total", what="version") == 1
    assert sample(metrics, "dcr_refusals_total", what="stream") == 1


def test_there_is_no_series_for_when_a_counter_was_made() -> None:
    assert b"_created" not in Metrics().exposition()
