"""A reader that cannot see the end of the ledger says so within a minute, once, and says when it can again."""

from __future__ import annotations

import dataclasses

import pytest

from dcr_daemon import events as e
from dcr_daemon import runtime
from dcr_daemon.observe.freshness import CHECK_EVERY, LIMIT, LedgerFreshness, limit_for
from dcr_daemon.observe.health import Role


@dataclasses.dataclass
class Clock:
    now: float = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(runtime, "monotonic", lambda: clock.now)
    return clock


def made(role: Role) -> tuple[LedgerFreshness, list[e.Event]]:
    told: list[e.Event] = []
    return LedgerFreshness(role, told.append), told


def test_a_subscriber_that_is_cut_off_says_so_once_within_a_minute(clock: Clock) -> None:
    freshness, told = made("subscriber")
    freshness(e.LedgerPolled(head=7))
    for _ in range(40):
        clock.now += CHECK_EVERY
        freshness.check()
    (unread,) = told
    assert isinstance(unread, e.LedgerUnread)
    assert unread.severity == "warning"
    assert unread.seconds <= 60
    assert unread.since is not None
    freshness(e.LedgerPolled(head=9))
    assert told[1:] == [e.LedgerRead(head=9)]


def test_a_subscriber_that_has_never_read_says_so_too(clock: Clock) -> None:
    freshness, told = made("subscriber")
    clock.now += LIMIT
    freshness.check()
    assert [event.since for event in told if isinstance(event, e.LedgerUnread)] == [None]


def test_whoever_reads_in_time_says_nothing(clock: Clock) -> None:
    freshness, told = made("subscriber")
    for n in range(10):
        clock.now += LIMIT - 1
        freshness.check()
        freshness(e.LedgerPolled(head=n))
    assert not told


def test_a_publisher_that_works_without_reading_is_not_cut_off_until_a_request_fails(clock: Clock) -> None:
    freshness, told = made("publisher")
    clock.now += 10 * LIMIT
    freshness(e.StoreRequest(operation="create", outcome="won", seconds=1.0))
    freshness.check()
    assert not told
    freshness(e.StoreRequest(operation="create", outcome="transient", seconds=1.0))
    freshness.check()
    assert [type(event) for event in told] == [e.LedgerUnread]


def test_the_limit_is_above_the_longest_pause_between_two_looks() -> None:
    assert limit_for(30.0) == LIMIT
    assert limit_for(60.0) > 60 * 1.25
