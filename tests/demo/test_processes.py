"""Processes that the demo starts end with it, whatever happens, and say why they ended."""

from __future__ import annotations

import signal
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from dcr_demo.processes import Process, ProcessDied, free_ports, seaweedfs
from dcr_demo.record import EventTail

PARENT = """
import subprocess, sys, time, pathlib
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""

STUBBORN = """
import signal, sys, time, pathlib
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
    except FileNotFoundError:
        return False


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def test_the_whole_group_ends_also_when_the_block_raises(tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    process = Process("parent", python(PARENT, str(pids)), tmp_path / "log", grace=5)

    def fail_midway() -> None:
        with process:
            process.wait_ready(lambda: pids.exists() and bool(pids.read_text()), timeout=60)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_midway()
    assert process.poll() is not None
    deadline = time.monotonic() + 30  # SIGKILL was sent; the kernel takes its moment
    while alive(int(pids.read_text())) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(int(pids.read_text()))


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    flag = tmp_path / "up"
    with Process("stubborn", python(STUBBORN, str(flag)), tmp_path / "log", grace=0.2) as process:
        process.wait_ready(flag.exists, timeout=60)
    assert process.poll() == -signal.SIGKILL


def test_an_early_end_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    with (
        pytest.raises(ProcessDied, match=r"status 3(.|\n)*no such thing"),
        Process("failing", python("import sys; print('no such thing'); sys.exit(3)"), tmp_path / "log") as process,
    ):
        process.wait_ready(lambda: False, timeout=60)


def test_waiting_has_a_deadline(tmp_path: Path) -> None:
    with (
        Process("slow", python("import time; time.sleep(600)"), tmp_path / "log") as process,
        pytest.raises(ProcessDied, match="not ready"),
    ):
        process.wait_ready(lambda: False, timeout=0.3)


def test_results_are_kept_apart_from_logs(tmp_path: Path) -> None:
    code = "import sys; print('result'); print('noise', file=sys.stderr)"
    with Process("p", python(code), tmp_path / "log", stdout=tmp_path / "out") as process:
        assert process.wait(60) == 0
    assert (tmp_path / "out").read_text() == "result\n"
    assert process.tail() == "noise"


def test_free_ports_differ_and_leave_room_for_their_twins() -> None:
    ports = free_ports(8)
    assert len(set(ports)) == 8
    assert all(p > 1024 and p + 10_000 < 65_536 for p in ports)


@pytest.mark.seaweed
def test_two_s3_servers_live_side_by_side_and_check_signatures(tmp_path: Path) -> None:
    with seaweedfs(tmp_path / "a") as one, seaweedfs(tmp_path / "b", bucket="other") as two:
        assert one.endpoint != two.endpoint
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{two.endpoint}/other/x", timeout=10)
        assert refused.value.code == 403
    assert one.process.poll() is not None
    assert two.process.poll() is not None


def test_a_line_still_being_written_waits(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = EventTail(path)
    assert tail.read() == []
    path.write_bytes(b'{"type":"Opened","version":1}\n{"type":"Sea')
    assert [e["type"] for e in tail.read()] == ["Opened"]
    with path.open("ab") as file:
        file.write(b'led","version":1}\n')
    assert tail.first("Sealed", version=1) is not None
    assert not tail.has("Sealed", version=2)()
    assert [e["type"] for e in tail.of("Opened", "Sealed")] == ["Opened", "Sealed"]
