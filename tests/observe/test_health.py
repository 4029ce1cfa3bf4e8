"""Ready means: a publisher holds the claim, a subscriber's engine serves an allowed version; nothing else."""

from __future__ import annotations

from dcr_daemon import events as e
from dcr_daemon.observe.health import Health


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


def test_a_subscriber_that_was_fenced_is_not_ready() -> None:
    health = Health("subscriber")
    health(e.Serving(version=5))
    health(e.FencedOut(what="engine", by="other"))
    assert not health.ready


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
