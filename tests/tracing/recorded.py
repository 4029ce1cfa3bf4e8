"""A refit as its events tell it, at times that the test chooses: two ranks' chunks, one replica."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from dcr_daemon import events as e
from dcr_daemon import runtime
from dcr_daemon.tracing.recorder import TraceRecorder

STREAM = "s3://bucket/run"
PHASES = {"rest": 0.01, "begin": 0.0, "apply": 0.05, "sums": 0.02, "commit": 0.01, "resume": 0.01}
PUBLISHED = [
    (0.05, e.Opened(version=2, attempt=7, step=9, seconds=0.05)),
    (0.35, e.ChunkPut(version=2, attempt=7, n=0, bytes=600, seconds=0.2)),
    (0.55, e.Diffed(version=2, attempt=7, changed=40, seconds=0.5)),
    (0.60, e.ChunkPut(version=2, attempt=7, n=1, bytes=400, seconds=0.3)),
    (0.70, e.Sealed(version=2, attempt=7, step=9, seq=8, changed=40, elements=4000, bytes=1000, dense_bytes=8000,
                    seconds=0.7)),
]  # fmt: skip
SUBSCRIBED = [
    (0.20, e.OpenSeen(version=2, attempt=7)),
    (0.50, e.ChunkFetched(version=2, attempt=7, key="k0", bytes=600, sealed=False, seconds=0.1)),
    (0.90, e.SealSeen(version=2, seq=8)),
    (1.10, e.ChunkFetched(version=2, attempt=7, key="k1", bytes=400, sealed=True, seconds=0.1)),
    (1.20, e.Staged(version=2, bytes=1000, chunks=2)),
    (1.40, e.Prepared(txn="t", base=1, version=2, changed=40, seconds=0.5, prepare_seconds=0.15)),
    (1.50, e.Committed(base=1, version=2, route="chain", pause_seconds=0.1, seconds=0.6, phases=PHASES)),
]


def record(path: Path, role: str, events: list[tuple[float, e.Event]], monkeypatch: pytest.MonkeyPatch) -> Path:
    recorder = TraceRecorder(path, role=role, name="r1", stream=STREAM)
    for at, event in events:
        monkeypatch.setattr(runtime, "now", lambda at=at: datetime.fromtimestamp(1_700_000_000 + at, UTC))
        recorder(event)
    return path
