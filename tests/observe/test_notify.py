"""systemd hears from the daemon, and a daemon without systemd is not disturbed."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from dcr_daemon.observe.notify import notify, watchdog_interval


def test_lines_reach_the_notification_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(path))
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        assert notify("READY=1", "STATUS=serving version 3")
        assert listener.recv(1000) == b"READY=1\nSTATUS=serving version 3"


def test_an_abstract_socket_is_reached_too(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"dcr-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        assert notify("WATCHDOG=1")
        assert listener.recv(1000) == b"WATCHDOG=1"


def test_without_systemd_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify("READY=1")


def test_a_dead_supervisor_kills_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    assert not notify("READY=1")


@pytest.mark.parametrize(
    ("usec", "pid", "interval"),
    [("30000000", None, 15.0), ("", None, None), ("0", None, None), ("30000000", "1", None)],
)
def test_the_watchdog_is_fed_twice_per_interval(
    usec: str, pid: str | None, interval: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    monkeypatch.setenv("WATCHDOG_PID", pid or str(os.getpid()))
    assert watchdog_interval() == interval


def test_no_value_becomes_an_assignment_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        assert notify("STATUS=waiting for a\nMAINPID=1", "READY=1")
        assert supervisor.recv(1000) == b"STATUS=waiting for a\\nMAINPID=1\nREADY=1"
