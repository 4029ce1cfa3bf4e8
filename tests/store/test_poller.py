"""Waits by looking: pauses double, and start anew when something has arrived."""

from __future__ import annotations

import asyncio

import pytest

from dcr_daemon import runtime
from dcr_daemon.store.poller import REPORT_EVERY, Poller


def test_pauses_double_up_to_the_longest_and_start_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pauses = 0.0, list[float]()

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        pauses.append(seconds)

    monkeypatch.setattr(runtime, "sleep", sleep)
    monkeypatch.setattr(runtime, "monotonic", lambda: now)

    async def run() -> int:
        poller, reports = Poller(first=0.5, longest=2.0), 0
        for look in range(10):
            if look == 5:
                poller.reset()
            reports += poller.report_due()
            await poller.pause()
        assert poller.waited == now
        return reports

    reports = asyncio.run(run())
    assert pauses == [0.5, 1.0, 2.0, 2.0, 2.0, 0.5, 1.0, 2.0, 2.0, 2.0]
    assert reports == now // REPORT_EVERY - 1
