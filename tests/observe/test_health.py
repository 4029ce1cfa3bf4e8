"""Ready means: a publisher holds the claim, a subscriber's engine serves an allowed version; nothing else."""

from __future__ import annotations

import pytest

from dcr_daemon import events as e
from dcr_daemon.observe.health import Health, Policy, Role


def test_a_publisher_is_ready_from_its_claim_until_it_is_fenced() -> None:
    health = Health("publisher")
    assert not health.ready
    health(e.Claimed(epoch=4, name="a"))
    assert health.ready
    health(e.FencedOut(what="stream", by="b"))
    assert not health.ready
    assert "fenced by b" in health.status


def test_waiting_for_the_store_does_not_end_readiness() -> None:
    health = Health("subscriber")
    health(e.Serving(version=5))
    health(e.Waiting(what="the bucket"))
    assert health.ready


def test_a_lost_engine_ends_readiness_until_it_serves_again() -> None:
    health = Health("subscriber")
    health(e.Serving(version=5))
    health(e.EngineLost(reason="it died"))
    assert not health.ready
    health(e.Serving(version=5))
    assert health.ready


def test_an_engine_that_can_never_be_served_is_the_reason_until_it_serves() -> None:
    health = Health("subscriber")
    health(e.Unsupported(reason="sleep mode"))
    health(e.Retrying(what="something else"))
    assert (health.ready, health.status) == (False, "unsupported engine: sleep mode")
    health(e.Serving(version=5))
    assert health.ready


def test_a_subscriber_that_was_fenced_is_not_ready() -> None:
    health = Health("subscriber")
    health(e.Serving(version=5))
    health(e.FencedOut(what="engine", by="other"))
    assert not health.ready


@pytest.mark.parametrize("role", ["publisher", "subscriber"])
def test_nobody_is_ready_in_doubt_about_the_ledger(role: Role) -> None:
    health = Health(role)
    health(e.Claimed(epoch=4, name="a"))
    health(e.Serving(version=5))
    assert health.ready
    health(e.LedgerDoubted(seq=9, head=7, reason="it does not parse"))
    assert not health.ready
    assert "in doubt about record 9: it does not parse" in health.status
    health(e.LedgerRead(head=7))
    assert health.ready
    assert role == "publisher" or health.status == "serving version 5, lag 2"


def test_the_status_line_tells_version_and_lag() -> None:
    health = Health("subscriber")
    health(e.SealSeen(version=9, seq=30))
    health(e.Serving(version=7))
    assert health.status == "serving version 7, lag 2"


def test_changes_are_told_once() -> None:
    health, told = Health("subscriber"), []
    health.on_change(lambda: told.append(health.status))
    health(e.Serving(version=1))
    health(e.Serving(version=1))
    assert told == ["serving version 1, lag 0"]


def seal(version: int) -> e.SealSeen:
    return e.SealSeen(version=version, seq=version)


def test_a_replica_that_falls_behind_is_not_ready_until_it_is_back_within_the_limit() -> None:
    health = Health("subscriber", Policy(within=2))
    health(e.LedgerRead(head=7))
    health(e.Serving(version=7))
    health(seal(9))
    assert health.ready
    health(seal(10))
    assert not health.ready
    assert health.status == "serving version 7, lag 3 (ready within 2)"
    health(e.Serving(version=8))
    assert health.ready
    assert health.status == "serving version 8, lag 2"


def test_a_seal_that_nobody_has_fetched_yet_does_not_empty_a_fleet() -> None:
    health = Health("subscriber")
    health(e.Serving(version=7))
    health(seal(8))
    assert health.ready


def test_a_restarted_replica_is_measured_against_the_ledger_not_against_itself() -> None:
    health = Health("subscriber", Policy(within=1))
    health(e.LedgerRead(head=9))
    health(e.Serving(version=5))  # an engine that went on serving without its subscriber
    assert not health.ready


def test_a_pinned_replica_is_measured_against_its_pin() -> None:
    health = Health("subscriber", Policy(within=0, pin=5))
    health(e.LedgerRead(head=90))
    health(e.Serving(version=5))
    assert health.ready
    assert health.status == "serving version 5, lag 0"


NOT_READY = [
    (e.EngineLost(reason="it died"), "engine lost: it died"),
    (e.Loading(version=9), "loading all of version 9"),
    (e.Paused(version=7), "paused by another client at version 7"),
    (e.Damaged(version=7, tensors=["w"], what="w (rank 1)"), "damaged: w (rank 1)"),
]


@pytest.mark.parametrize(("event", "why"), NOT_READY, ids=lambda x: type(x).__name__)
def test_an_engine_that_does_not_generate_is_not_ready_and_says_why(event: e.Event, why: str) -> None:
    health = Health("subscriber")
    health(e.Serving(version=7))
    health(event)
    health(e.Waiting(what="the bucket"))
    assert (health.ready, health.status) == (False, why)
    health(e.Serving(version=7))
    assert health.ready


@pytest.mark.parametrize("poisoned", [False, True])
def test_what_stands_in_the_way_is_visible_and_no_reason_to_stop_serving(poisoned: bool) -> None:
    health = Health("subscriber")
    health(e.Serving(version=7))
    health(e.Blocked(version=8, reason="chunk x is damaged", poisoned=poisoned))
    kind = "poisoned" if poisoned else "blocked"
    assert health.ready
    assert health.status == f"serving version 7, lag 0; {kind} at version 8: chunk x is damaged"
    health(e.Serving(version=7))
    assert kind in health.status
    health(e.Serving(version=9))
    assert health.status == "serving version 9, lag 0"


def test_an_engine_that_cannot_be_proved_says_what_it_lacks() -> None:
    health = Health("subscriber")
    health(e.Blocked(version=None, reason="its weights are of no version"))
    assert (health.ready, health.status) == (False, "starting; blocked: its weights are of no version")


def test_a_replica_that_cannot_read_the_ledger_stays_ready_and_says_that_its_lag_is_unknown() -> None:
    health = Health("subscriber")
    health(e.LedgerPolled(head=7))
    health(e.Serving(version=7))
    health(e.LedgerUnread(seconds=50, since="2026-01-31T23:59:59+00:00"))
    assert health.ready
    assert health.status == ("serving version 7, lag unknown; the ledger was not read since 2026-01-31T23:59:59+00:00")
    assert (health.report()["lag"], health.report()["ledger_unread"]) == (None, True)
    health(e.LedgerRead(head=9))
    assert health.status == "serving version 7, lag 2"
    assert health.report()["lag"] == 2


def test_a_publisher_that_cannot_read_the_ledger_says_so() -> None:
    health = Health("publisher")
    health(e.Claimed(epoch=4, name="a"))
    health(e.LedgerUnread(seconds=50, since=None))
    assert (health.ready, health.status) == (True, "the ledger was not read")
