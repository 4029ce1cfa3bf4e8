"""A training script that listens to nothing still hears what it has to know."""

from __future__ import annotations

import logging

import pytest

from dcr_daemon.events import Alarm, ChunkPut, Degraded, Mapped, Retrying, Waiting
from dcr_daemon.publish.event_log import EventLog


@pytest.mark.parametrize(("residual", "level"), [(0, logging.INFO), (10, logging.WARNING)])
def test_residual_tensors_are_a_warning(caplog: pytest.LogCaptureFixture, residual: int, level: int) -> None:
    with caplog.at_level(logging.DEBUG, "dcr_daemon"):
        EventLog()(
            Mapped(ranks=4, direct_bytes=90, residual_bytes=residual, regions=3, report="direct 90%", seconds=1.0)
        )
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (level, "what 4 ranks publish:\ndirect 90%")


def test_alarms_are_errors_and_progress_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "dcr_daemon"):
        emit = EventLog()
        emit(Alarm(must="P4", what="the baseline is damaged"))
        emit(ChunkPut(version=1, attempt=2, n=0, bytes=5, seconds=0.1))
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.DEBUG]


def test_a_repeated_notice_is_logged_once_and_what_is_refused_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dcr_daemon"):
        emit = EventLog()
        for kind in (Waiting, Retrying, Degraded):
            for _ in range(3):
                emit(kind(what="the bucket"))
                emit(ChunkPut(version=1, attempt=2, n=0, bytes=5, seconds=0.1))
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.INFO, "waiting: the bucket"),
        (logging.WARNING, "retrying: the bucket"),
        (logging.WARNING, "degraded: the bucket"),
    ]


def test_names_are_escaped_and_a_message_has_at_most_16_kib(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dcr_daemon"):
        emit = EventLog()
        emit(Degraded(what="\x1b[31mred\n"))
        emit(Alarm(must="P4", what="x" * 1_000_000))
    named, long = (record.getMessage() for record in caplog.records)
    assert named == r"degraded: \x1b[31mred\n"
    assert len(long) < (16 << 10) + 100
