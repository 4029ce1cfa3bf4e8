"""A trace is readable whatever happened to its writer, and has a bound."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dcr_daemon.errors import UsageError
from dcr_daemon.tracing.timeline import read_traces
from dcr_daemon.tracing.trace_file import TraceFile

PROCESS = {"name": "publisher", "role": "publisher", "stream": "file:///b"}


def row(version: int) -> dict[str, object]:
    args = {"version": version}
    return {"name": "upload", "cat": "dcr", "ph": "X", "tid": 0, "ts": version * 1_000_000, "dur": 5, "args": args}


def test_it_is_chromes_array_format(tmp_path: Path) -> None:
    """The format allows the closing bracket to be left out; with it, and without the last comma, it is JSON."""
    file = TraceFile(tmp_path / "deep" / "trace.json", PROCESS)
    file.write(row(1))
    head, event = json.loads((tmp_path / "deep" / "trace.json").read_text().rstrip(",\n") + "]")
    assert (head["ph"], head["args"]["name"]) == ("M", "publisher")
    assert (event["ph"], event["ts"], event["dur"], event["pid"]) == ("X", 1_000_000, 5, head["pid"])


def test_a_file_that_was_cut_off_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(path, PROCESS)
    for version in range(1, 4):
        file.write(row(version))
    whole = path.read_bytes()
    for size in range(whole.index(b"publisher") + 200, len(whole)):
        path.write_bytes(whole[:size])
        read = [one.version for one in read_traces([path])]
        assert read == list(range(1, len(read) + 1))
        assert len(read) >= whole[:size].count(b",\n") - 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"args": None}, {"args": [1]}, {"args": {"version": "1"}}, {"args": {"version": 1, "bytes": "many"}},
        {"pid": [1]}, {"ts": "now"}, {"ts": float("nan")}, {"ts": float("inf")}, {"ts": 10**400}, {"ts": 1e300},
        {"dur": -5}, {"dur": 1e300}, {"tid": "a"}, {"ph": None}, {"name": ["upload"]},
    ],
)  # fmt: skip
def test_a_line_that_is_none_of_ours_is_left_out(wrong: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(path, PROCESS)
    file.write(row(1))
    line = json.dumps(row(2) | {"pid": 1} | wrong).encode()
    path.write_bytes(path.read_bytes() + line + b",\n" + b"[" * 100_000 + b"\n")
    file.write(row(3))
    assert [one.version for one in read_traces([path])] == [1, 3]


def test_the_next_process_goes_on_behind_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    TraceFile(path, PROCESS).write(row(1))
    path.write_bytes(path.read_bytes() + b'{"name": "upl')
    TraceFile(path, PROCESS).write(row(2))
    assert [one.version for one in read_traces([path])] == [1, 2]
    json.loads(path.read_text().rstrip(",\n") + "]")


def test_a_trace_has_a_bound_and_keeps_the_newest(tmp_path: Path) -> None:
    path, limit = tmp_path / "trace.json", 4000
    file = TraceFile(path, PROCESS, limit=limit)
    for version in range(1, 200):
        file.write(row(version))
    files = [path, tmp_path / "trace.json.1"]
    assert sum(file.stat().st_size for file in files) <= limit + 400
    read = read_traces(files)
    assert [one.version for one in read] == list(range(read[0].version, 200))
    assert {one.process for one in read} == {"publisher"}


def test_processes_that_share_a_file_keep_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, files = tmp_path / "trace.json", dict[int, TraceFile]()
    for pid in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        files[pid] = TraceFile(path, PROCESS | {"name": f"r{pid}"}, limit=4000)
    for version in range(1, 200):
        for pid, file in files.items():
            monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
            file.write(row(version))
        assert {one.process for one in read_traces([path])} <= {"r1", "r2"}
    assert {one.process for one in read_traces([tmp_path / "trace.json.1"])} == {"r1", "r2"}


def test_a_trace_that_cannot_be_is_said_at_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="trace"):
        TraceFile(tmp_path, PROCESS)


@pytest.mark.parametrize("body", [b"{}", bytes(8) + b"{}" * 50_000, b"stream: s3://b/run\ncreate: true", b"[\n {}\n]"])
def test_a_file_that_is_no_trace_is_left_as_it_is(body: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(body)
    with pytest.raises(UsageError, match="not a trace"):
        TraceFile(path, PROCESS)
    assert path.read_bytes() == body
