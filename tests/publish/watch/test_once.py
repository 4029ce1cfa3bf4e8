"""What `dcr publish --once` prints is bounded, whatever lies below the watched directory."""

from __future__ import annotations

import json

import pytest

from dcr_daemon.errors import Incompatible
from dcr_daemon.publish.watch.once import LISTED, REASON_LENGTH, NotPublished, OnceReport, Published


def test_long_reasons_and_lists_are_cut_and_counted() -> None:
    count = 3 * LISTED
    report = OnceReport(
        [Published(f"step_{n}", n + 1, n, tuple(f"{'x' * 200}-{i}" for i in range(1000))) for n in range(count)],
        [NotPublished(f"bad_{n}", "misfit", "a name that is long, " * 10_000) for n in range(count + 1)],
    )
    shown = report.as_json()
    assert len(json.dumps(shown)) < 1_000_000
    assert (shown["published_total"], shown["not_published_total"]) == (count, count + 1)
    assert [one["path"] for one in shown["published"]] == [f"step_{n}" for n in range(LISTED)]
    assert all(len(one["reason"]) < REASON_LENGTH + 50 for one in shown["not_published"])
    with pytest.raises(Incompatible, match="601 checkpoints are not published") as caught:
        report.check()
    assert len(caught.value.message) < 16 << 10
