"""What a replica asks of the store, counted in virtual time: a fleet pays for requests, and mostly it is idle."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.measure.replica_requests import HOUR, UPDATES, ReplicaBench, idle_hour, measure, updates

from dcr_daemon.subscribe.daemon import REPORT_PAUSE

REPLICAS = 10_000  #: of the table in docs/OPERATIONS.md


def documented(row: str) -> list[float]:
    """GET, LIST and PUT requests a second that docs/OPERATIONS.md names for a fleet."""
    text = (Path(__file__).parents[2] / "docs" / "OPERATIONS.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {row} |")]
    return [float(cell.replace(",", "")) for cell in line.split("|")[2:5]]


def test_an_idle_replica_asks_once_a_poll_and_polls_ever_less() -> None:
    async def idle(bench: ReplicaBench) -> list[Counter[str]]:
        return [await bench.idle(HOUR) for _ in range(3)]

    hours = measure(idle, poll=1.0, poll_max=30.0)
    polls, reports = HOUR / 30, HOUR / (30 * REPORT_PAUSE)
    assert hours[1] == hours[2], "the longest pause was reached within the first hour"
    assert hours[0].total() < 2 * hours[1].total()
    assert hours[1]["overwrite"] == reports
    assert hours[1]["list"] == 0
    assert hours[1]["get"] <= polls + reports


def test_the_longest_pause_is_the_operators() -> None:
    async def idle(bench: ReplicaBench) -> Counter[str]:
        await bench.idle(HOUR)
        return await bench.idle(HOUR)

    often, rarely = measure(idle, poll=1.0, poll_max=5.0), measure(idle, poll=1.0, poll_max=300.0)
    assert often.total() > 20 * rarely.total()


def test_an_open_version_of_a_publisher_that_died_costs_no_more_than_an_idle_stream() -> None:
    async def left_open(bench: ReplicaBench) -> list[Counter[str]]:
        await bench.stream.open(1)
        return [await bench.idle(HOUR) for _ in range(3)]

    hours = measure(left_open, poll=1.0, poll_max=30.0)
    assert hours[2]["list"] <= HOUR / 30
    assert hours[2]["get"] + hours[2]["overwrite"] < 150


def test_while_updates_come_the_next_record_is_asked_for_often() -> None:
    async def updates(bench: ReplicaBench) -> list[Counter[str]]:
        counted = []
        for version in range(1, 4):
            bench.stream.versions.step()
            counted.append(await bench.update(version, upload=60, rest=240))
        return counted

    for one in measure(updates, poll=1.0, poll_max=30.0):
        assert one["get"] > 100, "a pause is a small share of the time since the last record"
        assert one["list"] < 30
        assert one["overwrite"] < 10


@pytest.mark.parametrize(
    ("row", "every", "upload"),
    [("idle", None, 0), ("a version every 5 minutes, uploaded for 60 s", 300, 60)],
)
def test_a_fleet_asks_for_what_the_documentation_says(row: str, every: float | None, upload: float) -> None:
    counted = measure(updates(every, upload) if every else idle_hour, poll=1.0, poll_max=30.0)
    seconds = UPDATES * every if every else HOUR
    rates = [counted[kind] * REPLICAS / seconds for kind in ("get", "list", "overwrite")]
    assert rates == pytest.approx(documented(row), rel=0.02, abs=1)


def test_a_version_that_comes_in_time_is_seen_within_a_tenth_of_a_poll() -> None:
    """Open to open and open to seal are learned; both records are then found by a poll that follows at once."""

    async def lateness(bench: ReplicaBench) -> list[float]:
        return [await bench.lateness(version, upload=3.0, rest=57.0) for version in range(1, 9)]

    assert max(measure(lateness, poll=1.0, poll_max=30.0)[4:]) <= 0.15
