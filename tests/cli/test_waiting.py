"""In front of a store that swallows everything, commands and daemons say so, and end when they are told to."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

COMMANDS = {
    "status": ["status"],
    "log": ["log"],
    "verify": ["verify"],
    "materialize": ["materialize", "--out", "out"],
}


@pytest.fixture
def hole() -> Iterator[str]:
    """An endpoint that takes connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def start(place: Path, *arguments: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    command = [sys.executable, "-m", "dcr_daemon", *arguments]
    return subprocess.Popen(command, cwd=place, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_line(process: subprocess.Popen[str], pattern: str) -> str:
    """The first line of stderr that matches; the test's own time-out bounds it."""
    assert process.stderr is not None
    for line in process.stderr:
        if re.search(pattern, line):
            return line
    raise AssertionError(f"it ended with {process.wait()} and never said {pattern!r}")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_it_waits_for_and_leaves_nothing_behind(name: str, hole: str, tmp_path: Path) -> None:
    head, *options = COMMANDS[name]
    process = start(tmp_path, head, "s3://bucket/run", *options, "--endpoint-url", hole, "--json")
    wait_line(process, r"waiting: s3://bucket/run has not answered")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert out == ""
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_subscriber_that_nobody_answers_ends_when_it_is_told_to(
    sent: signal.Signals, status: int, hole: str, tmp_path: Path
) -> None:
    engine = ["--engine", f"dir://{tmp_path}/served", "--state", str(tmp_path / "state"), "--replica", "r1"]
    store = ["--from", "s3://bucket/run", "--endpoint-url", hole, "--listen", "127.0.0.1:0"]
    process = start(tmp_path, "subscribe", *store, *engine)
    wait_line(process, "listening")
    process.send_signal(sent)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["subscribe", "publish"])
def test_a_daemon_that_is_stopped_while_it_imports_ends_in_order(name: str, tmp_path: Path) -> None:
    stream = {"subscribe": ["--from", "--engine"], "publish": ["--to", "--watch"]}[name]
    values = {"--engine": f"dir://{tmp_path}/served", "--watch": str(tmp_path)}
    options = [part for key in stream for part in (key, values.get(key, f"file://{tmp_path}/none"))]
    process = start(tmp_path, name, *options, "--state", str(tmp_path / "state"))
    bit = 1 << (signal.SIGTERM - 1)
    deadline = time.monotonic() + 60
    while not int(_caught(process.pid), 16) & bit:  # the interpreter itself is up
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Traceback" not in err


def _caught(pid: int) -> str:
    text = Path(f"/proc/{pid}/status").read_text()
    return next(line.split()[1] for line in text.splitlines() if line.startswith("SigCgt"))
