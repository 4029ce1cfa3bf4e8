"""Listeners cannot hurt the core, and the event file is readable while it is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dcr_daemon import events as e
from dcr_daemon.errors import UsageError
from dcr_daemon.events import kind_of
from dcr_daemon.observe import Observer
from dcr_daemon.observe.fanout import EventFile


def test_a_listener_that_fails_is_dropped_and_the_others_go_on() -> None:
    calls: list[str] = []

    def broken(event: e.Event) -> None:
        calls.append("broken")
        raise OSError("no space left on device")

    emit = Observer([broken, lambda event: calls.append("well")])
    emit(e.Waiting(what="x"))
    emit(e.Waiting(what="x"))
    assert calls == ["broken", "well", "well"]


def test_the_event_file_holds_every_field_and_a_comparable_time(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "events.jsonl"
    file = EventFile(path)
    file(e.Opened(version=1, attempt=5, step=7))
    file(e.Sealed(version=1, attempt=5, step=7, seq=6, changed=1, elements=2, bytes=3, dense_bytes=4, seconds=0.5))
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first["type"] == "Opened"
    assert (first["version"], first["attempt"], first["step"]) == (1, 5, 7)
    assert second["monotonic"] >= first["monotonic"]
    file.close()


def test_a_second_process_appends(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for n in range(2):
        file = EventFile(path)
        file(e.OpenSeen(version=n, attempt=n))
        file.close()
    assert len(path.read_text().splitlines()) == 2


def test_an_event_file_that_cannot_be_is_said_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "events.jsonl"):
        with pytest.raises(UsageError, match="events"):
            EventFile(path)


def test_names_of_facts_are_readable() -> None:
    assert kind_of(e.ChunkPut) == "chunk_put"
    assert kind_of(e.Sealed) == "sealed"
