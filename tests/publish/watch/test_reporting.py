"""Each thing is said once, and a daemon that lives long remembers no more than a directory holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.streams.publish_world import PublishWorld

from dcr_daemon.errors import Incompatible
from dcr_daemon.events import CheckpointSkipped, Degraded
from dcr_daemon.publish.watch.candidate import CheckpointCandidate
from dcr_daemon.publish.watch.ingest import CheckpointMisfit
from dcr_daemon.publish.watch.policy_paths import PolicyPaths
from dcr_daemon.publish.watch.reporting import REMEMBERED, WatchReporter
from dcr_daemon.publish.watch.selection import Candidates, Choice


@pytest.fixture
def reporter(world: PublishWorld) -> WatchReporter:
    return WatchReporter(world.root, PolicyPaths(), world.layout, emit=world.events)


def candidate(name: str) -> CheckpointCandidate:
    return CheckpointCandidate(Path(name), name)


def misfit(name: str) -> CheckpointMisfit:
    return CheckpointMisfit(Incompatible("it does not fit"), name, frozenset())


def test_what_is_gone_is_forgotten_and_what_is_there_is_not_said_again(
    world: PublishWorld, reporter: WatchReporter
) -> None:
    there = {name: candidate(name) for name in ("step_1", "ema/step_1")}
    choice = Choice([], [there["ema/step_1"]], [])

    def scan(found: Candidates) -> None:
        reporter.scanned(found, unread=())
        reporter.passed_by(choice)

    reporter.misfit(misfit("step_1"))
    for n in range(3 * REMEMBERED):
        scan(there)
        reporter.misfit(misfit(f"run-{n}-x{n}"))
    assert len(reporter._told) <= REMEMBERED + 4
    reporter.misfit(misfit("step_1"))
    scan(there)
    said = [event.path for event in world.events.of(CheckpointSkipped)]
    assert (said.count("step_1"), said.count("ema/step_1")) == (1, 1)


def test_what_is_as_old_as_unread_versions_is_named_once(world: PublishWorld, reporter: WatchReporter) -> None:
    for unread in ({"step_1"}, {"step_1"}, {"step_1", "step_0"}):
        reporter.scanned({}, unread=unread)
    first, second = (event.what for event in world.events.of(Degraded))
    assert "as old as versions of which the seals were not read: step_1;" in first
    assert "not read: step_0;" in second
    assert "touch" in second
