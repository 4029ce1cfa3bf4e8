"""`dcr demo` itself: stopped at any moment it takes every process with it; run to its end it proves what it shows."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from dcr_demo.processes import Process
from dcr_demo.scene import dcr

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture
def work() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dcr-") as name:  # short enough for unix sockets
        yield Path(name)


def demo(work: Path, tmp_path: Path) -> Process:
    argv = dcr("demo", "--tiny", "--steps", "2", "--json", "--work", str(work / "d"))
    return Process("demo", argv, tmp_path / "log", stdout=tmp_path / "out", grace=60)


def living_below(work: Path) -> list[str]:
    """Command lines of processes that still know this directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(work) in line:
                found.append(line)
    return found


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_process(sent: signal.Signals, work: Path, tmp_path: Path) -> None:
    with demo(work, tmp_path) as process:
        # Both were started and vLLM is loading: the moment with most to clean up.
        process.wait_ready(lambda: (work / "d" / "vllm.log").exists(), timeout=120)
        assert len(living_below(work)) > 1
        assert process.poll() is None
        process.signal_leader(sent)
        assert process.wait(120) == 130
        assert living_below(work) == []
    last = process.tail(1)
    assert json.loads(last)["error"]["exit_code"] == 130, process.tail()


def test_the_whole_demo_proves_what_it_shows(work: Path, tmp_path: Path) -> None:
    with demo(work, tmp_path) as process:
        assert process.wait(600) == 0, process.tail()
    result = json.loads((tmp_path / "out").read_text())
    assert result["holds"] is True
    assert [row["version"] for row in result["rows"]] == [1, 2]
    assert all(0 < row["payload"] < row["dense"] for row in result["rows"])
    assert (result["failed"], result["proof"]["differing"]) == (0, [])
    assert result["requests"] > 0
