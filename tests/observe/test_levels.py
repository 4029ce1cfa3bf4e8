"""Every event has a level, and what is refused, given up, skipped or repeated is a warning.

The tables name every class of events and every place that emits a text for people. A new class or place is added here,
with the level that an operator needs: a filter on warnings shows all that goes wrong, and nothing else.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dcr_daemon
from dcr_daemon import events as e
from dcr_daemon.observe import logs

PACKAGE = Path(dcr_daemon.__file__).parent
LEVELS = {
    "debug": ["ChunkFetched", "ChunkPut", "Diffed", "LedgerPolled", "ShardTaken", "StoreRequest"],
    "info": [
        "AnchorPut",
        "Attached",
        "Claimed",
        "Collected",
        "Committed",
        "LedgerRead",
        "Loading",
        "Mapped",
        "OpenSeen",
        "Opened",
        "Prepared",
        "Rebuilding",
        "Repaired",
        "Rounded",
        "ScrubEnded",
        "SealSeen",
        "Sealed",
        "Serving",
        "Staged",
        "TensorFollowed",
        "Waiting",
    ],
    "warning": [
        "Aborted",
        "Blocked",
        "CheckpointSkipped",
        "Degraded",
        "EngineLost",
        "LedgerUnread",
        "Paused",
        "Refused",
        "Retrying",
        "Unsupported",
    ],
    "error": ["Alarm", "Damaged", "FencedOut", "LedgerDoubted", "RolledBack"],
}
#: Module: the notices that it constructs, in the order of the source.
PLACES = {
    "dcr_daemon.engine.directory.shards": "Waiting",
    "dcr_daemon.ledger.follow": "Retrying",
    "dcr_daemon.ledger.objects": "Waiting",
    "dcr_daemon.ledger.slot": "Retrying",
    "dcr_daemon.publish.baseline.rebuild": "Degraded Degraded Degraded",
    "dcr_daemon.publish.baseline.restore": "Waiting Retrying",
    "dcr_daemon.publish.group.collect": "Waiting Retrying",
    "dcr_daemon.publish.group.leader": "Retrying",
    "dcr_daemon.publish.group.member": "Retrying Waiting",
    "dcr_daemon.publish.group.opening": "Waiting Degraded",
    "dcr_daemon.publish.group.peers": "Degraded",
    "dcr_daemon.publish.group.retention": "Degraded Retrying Degraded Degraded",
    "dcr_daemon.publish.publisher": "Retrying Degraded Retrying Waiting",
    "dcr_daemon.publish.timeouts": "Waiting",
    "dcr_daemon.publish.version.uploads": "Waiting",
    "dcr_daemon.publish.watch.reporting": "Degraded Degraded Degraded Waiting Waiting Degraded Waiting",
    "dcr_daemon.publish.watch.watcher": "Degraded Retrying Degraded Degraded",
    "dcr_daemon.store.retry": "Retrying",
    "dcr_daemon.subscribe.daemon": "Waiting Retrying",
    "dcr_daemon.subscribe.driver": "Retrying Retrying Degraded Retrying",
    "dcr_daemon.subscribe.follower": "Retrying",
    "dcr_daemon.subscribe.fetch.loader_computed": "Waiting",
    "dcr_daemon.subscribe.locate": "Waiting",
    "dcr_daemon.subscribe.materialize": "Retrying Retrying Retrying",
    "dcr_daemon.subscribe.fetch.prefetch": "Retrying Degraded",
    "dcr_daemon.subscribe.status": "Degraded",
    "dcr_daemon.tracing.recorder": "Degraded",
}


def classes(base: type[e.Event] = e.Event) -> Iterator[type[e.Event]]:
    for kind in base.__subclasses__():
        yield kind
        yield from classes(kind)


NAMES = {kind.__name__: kind for kind in classes()}
NOTICES = {kind.__name__ for kind in classes(e.Notice)}


def emitters() -> dict[str, list[str]]:
    """For each module the names of the events that it constructs, in the order of the source."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text(), str(path))) if isinstance(node, ast.Call)]
        calls.sort(key=lambda call: (call.lineno, call.col_offset))
        names = [call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "") for call in calls]
        found[".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)] = [n for n in names if n in NAMES]
    return found


def test_every_class_states_its_level_and_has_the_one_that_is_written_here() -> None:
    emitted = {name: kind for name, kind in NAMES.items() if kind is not e.Notice}
    assert all("level" in vars(kind) for kind in emitted.values())
    assert {name: kind.level for name, kind in emitted.items()} == {
        n: lv for lv, names in LEVELS.items() for n in names
    }


def test_every_class_is_emitted_somewhere_and_the_base_of_notices_nowhere() -> None:
    constructed = {name for found in emitters().values() for name in found}
    assert constructed == NAMES.keys() - {"Notice"}


def test_every_place_that_emits_a_notice_has_the_level_that_is_written_here() -> None:
    found = {module: " ".join(n for n in names if n in NOTICES) for module, names in emitters().items()}
    assert {module: notices for module, notices in found.items() if notices} == PLACES


def test_a_report_of_tensors_that_ranks_must_send_to_others_is_a_warning() -> None:
    def mapped(residual: int) -> e.Mapped:
        return e.Mapped(ranks=2, direct_bytes=1, residual_bytes=residual, regions=1, report="", seconds=0.1)

    assert [mapped(n).severity for n in (0, 1)] == ["info", "warning"]


@pytest.mark.parametrize("kind", [e.Retrying, e.Degraded])
def test_a_filter_on_warnings_shows_it_once(kind: type[e.Notice], capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("warning", json=True)
    emit = logs.LogEvents()
    for _ in range(3):
        emit(kind(what="the bucket"))
        emit(e.StoreRequest(operation="get", outcome="ok", seconds=0.1))
    emit(e.Waiting(what="the bucket"))
    assert [line.count("the bucket") for line in capsys.readouterr().err.splitlines()] == [1]
