"""Both daemons as processes: probes, systemd, signals, and what they leave behind."""

from __future__ import annotations

import json
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcr_daemon.tracing.refits import find_refits
from dcr_daemon.tracing.timeline import read_traces
from dcr_demo.processes import Process, free_ports
from dcr_demo.record import EventTail
from dcr_demo.scene import dcr

Start = Callable[..., Process]


def get(port: int, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


@pytest.fixture
def started(tmp_path: Path) -> Any:
    """Starts daemons that end with the test."""
    running: list[Process] = []

    def start(*arguments: str, **env: str) -> Process:
        process = Process(arguments[0], dcr(*arguments), tmp_path / f"{arguments[0]}.log", env).start()
        running.append(process)
        return process

    yield start
    for process in running:
        process.stop()


def subscriber(streamed: Any, tmp_path: Path, *extra: str) -> list[str]:
    return [
        "subscribe", "--from", streamed.url, "--engine", f"dir://{tmp_path}/served", "--replica", "r1", "--poll", "0.1",
        "--state", str(tmp_path / "sub"), "--events", str(tmp_path / "events.jsonl"), *extra,
    ]  # fmt: skip


def publisher(streamed: Any, *extra: str) -> list[str]:
    return [
        "publish", "--to", streamed.url, "--create", "--base", str(streamed.base), "--watch", str(streamed.watched),
        "--state", str(streamed.state), *extra,
    ]  # fmt: skip


def test_a_subscriber_is_ready_when_it_serves_and_says_what(streamed: Any, tmp_path: Path, started: Start) -> None:
    (port,) = free_ports(1)
    process = started(*subscriber(streamed, tmp_path, "--listen", f"127.0.0.1:{port}"))
    process.wait_ready(lambda: get(port, "/readyz")[0] == 200, timeout=120)
    assert json.loads(get(port, "/readyz")[1]) == {"ready": True, "status": "serving version 3, lag 0"}
    assert get(port, "/livez")[0] == 200
    metrics = get(port, "/metrics")[1].decode()
    assert "dcr_served_version 3.0" in metrics
    assert "dcr_lag_versions 0.0" in metrics


def test_a_subscriber_without_a_stream_lives_and_is_not_ready(tmp_path: Path, started: Start) -> None:
    (port,) = free_ports(1)
    arguments = ["--from", f"file://{tmp_path}/none", "--engine", f"dir://{tmp_path}/served", "--state", str(tmp_path)]
    process = started("subscribe", *arguments, "--listen", f"127.0.0.1:{port}", "--poll", "0.1")
    process.wait_ready(lambda: b"waiting" in get(port, "/readyz")[1], timeout=120)
    assert get(port, "/readyz")[0] == 503
    assert get(port, "/livez")[0] == 200


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
@pytest.mark.parametrize("daemon", ["publish", "subscribe"])
def test_signals_end_a_daemon_cleanly(
    daemon: str, sent: signal.Signals, status: int, own_stream: Any, tmp_path: Path, started: Start
) -> None:
    (port,) = free_ports(1)
    listen = ("--listen", f"127.0.0.1:{port}")
    arguments = subscriber(own_stream, tmp_path, *listen) if daemon == "subscribe" else publisher(own_stream, *listen)
    process = started(*arguments)
    process.wait_ready(lambda: get(port, "/readyz")[0] == 200, timeout=120)
    process.kill(sent)
    assert process.wait(60) == status
    assert "Traceback" not in process.log.read_text()
    assert "sigterm" in process.tail().lower() or "sigint" in process.tail().lower()


@pytest.mark.parametrize("daemon", ["publish", "subscribe"])
def test_sighup_ends_no_daemon_and_opens_the_event_file_again(
    daemon: str, own_stream: Any, tmp_path: Path, started: Start
) -> None:
    (port,) = free_ports(1)
    path, listen = tmp_path / "events.jsonl", ("--listen", f"127.0.0.1:{port}")
    publishing = publisher(own_stream, "--events", str(path), *listen)
    process = started(*(subscriber(own_stream, tmp_path, *listen) if daemon == "subscribe" else publishing))
    process.wait_ready(lambda: get(port, "/readyz")[0] == 200, timeout=120)
    path.rename(tmp_path / "events.1")
    process.kill(signal.SIGHUP)
    process.wait_ready(path.exists, timeout=60)
    assert process.poll() is None
    assert get(port, "/readyz")[0] == 200


def test_systemd_hears_ready_status_and_watchdog(streamed: Any, tmp_path: Path, started: Start) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(path))
        supervisor.settimeout(120)
        started(*subscriber(streamed, tmp_path), NOTIFY_SOCKET=str(path), WATCHDOG_USEC="200000")
        heard: set[str] = set()
        wanted = {"READY=1", "WATCHDOG=1", "STATUS=serving version 3, lag 0"}
        while not wanted <= heard:
            heard |= set(supervisor.recv(4096).decode().splitlines())


def test_logs_are_json_lines_on_stderr(streamed: Any, tmp_path: Path, started: Start) -> None:
    process = started(*subscriber(streamed, tmp_path, "--once"))
    assert process.wait(120) == 0
    lines = [json.loads(line) for line in process.log.read_text().splitlines()]
    assert {"serving"} <= {line["event"] for line in lines}
    assert all(line["stream"] == streamed.url and line["replica"] == "r1" for line in lines)


def test_a_new_version_reaches_the_engine_and_the_event_file(own_stream: Any, tmp_path: Path, started: Start) -> None:
    import shutil

    events = EventTail(tmp_path / "events.jsonl")
    traces = [str(tmp_path / "publisher.json"), str(tmp_path / "subscriber.json")]
    watching = started(*publisher(own_stream, "--trace", traces[0]))
    following = started(*subscriber(own_stream, tmp_path, "--trace", traces[1]))
    following.wait_ready(events.has("Serving", version=3), timeout=120)
    shutil.copytree(
        own_stream.watched / "step-1", tmp_path / "step-9", copy_function=shutil.copy
    )  # the trainer went back to older weights
    (tmp_path / "step-9").rename(own_stream.watched / "step-9")
    following.wait_ready(events.has("Committed", version=4), timeout=120)
    committed = events.first("Committed", version=4)
    assert committed is not None
    assert committed["base"] == 3
    assert watching.poll() is None
    (refit,) = [refit for refit in find_refits(read_traces(map(Path, traces))) if refit.version == 4]
    assert refit.phases.keys() >= {"open", "construct", "upload", "seal", "download", "stage", "prepare", "apply"}
    assert refit.bytes
    assert refit.commits.keys() == {f"subscriber r1 on {socket.gethostname()}"}
