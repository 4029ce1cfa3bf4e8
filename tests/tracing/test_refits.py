"""The phases of a refit, from recorded events: when each ran, what hides behind what, and the lower bound."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from dcr_daemon import events as e
from dcr_daemon.cli.app import run
from dcr_daemon.tracing import recorder as recorders
from dcr_daemon.tracing.recorder import TraceRecorder, traced
from dcr_daemon.tracing.refits import Refit, find_refits
from dcr_daemon.tracing.timeline import merged_trace, read_traces

from .recorded import PUBLISHED, STREAM, SUBSCRIBED, record


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    return [
        record(tmp_path / "p.json", "publisher", PUBLISHED, monkeypatch),
        record(tmp_path / "s.json", "subscriber", SUBSCRIBED, monkeypatch),
    ]


def only(files: list[Path]) -> Refit:
    (refit,) = find_refits(read_traces(files))
    return refit


def test_every_phase_has_its_time(files: list[Path]) -> None:
    refit = only(files)
    found = {name: round(phase.seconds, 3) for name, phase in refit.phases.items()}
    assert found == {
        "open": 0.05, "construct": 0.5, "upload": 0.45, "seal": 0.1, "see": 0.2, "download": 0.2, "stage": 0.3,
        "prepare": 0.15, "rest": 0.01, "begin": 0.0, "apply": 0.05, "sums": 0.02, "commit": 0.01, "resume": 0.01,
    }  # fmt: skip
    assert (refit.version, round(refit.seconds, 3), refit.bytes) == (2, 1.5, 1000)


def test_what_runs_alone_and_what_waits(files: list[Path]) -> None:
    """Uploads hide behind the comparison but for their last 50 ms; nothing runs between staging and `prepare`."""
    refit = only(files)
    alone = {name: round(phase.alone, 3) for name, phase in refit.phases.items()}
    assert (alone["upload"], alone["download"], alone["see"], alone["prepare"]) == (0.05, 0.1, 0.2, 0.15)
    assert alone["construct"] == 0.1  # before the first chunk
    assert round(refit.waiting, 3) == 0.05
    assert sum(alone.values()) <= refit.seconds


def test_the_lower_bound_is_the_bytes_and_two_round_trips(files: list[Path]) -> None:
    assert only(files).lower_bound(10_000, 0.05) == pytest.approx(0.2)


def test_chunks_that_overlap_lie_in_lanes_of_their_own(files: list[Path]) -> None:
    lanes = [one.lane for one in read_traces(files[:1]) if one.name == "upload"]
    assert lanes == [1, 2]


def test_an_attempt_that_was_aborted_is_no_part_of_the_refit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [
        (-9.0, e.Opened(version=2, attempt=5)),
        (-8.0, e.ChunkPut(version=2, attempt=5, n=0, bytes=5, seconds=0.5)),
        (-7.0, e.Aborted(version=2, attempt=5, reason="x")),
    ]
    refit = only([record(tmp_path / "p.json", "publisher", before + PUBLISHED, monkeypatch)])
    assert round(refit.seconds, 3) == 0.7


def test_an_engine_that_does_not_divide_its_pause_applies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = (1.0, e.Committed(base=1, version=2, route="chain", pause_seconds=0.4, seconds=0.6))
    refit = only([record(tmp_path / "s.json", "subscriber", [done], monkeypatch)])
    assert {name: round(phase.seconds, 3) for name, phase in refit.phases.items()} == {"apply": 0.4}
    assert refit.bytes is None


def test_a_merged_trace_reads_as_its_files(files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "all.json").write_text(merged_trace(read_traces(files)))
    assert {row["pid"] for row in json.loads((tmp_path / "all.json").read_text())} == {1, 2}
    assert only([tmp_path / "all.json"]).phases == only(files).phases
    assert only([tmp_path / "all.json", *files]).phases == only(files).phases


def test_the_command_prints_shares_and_writes_the_timeline(
    files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names, out = [str(path) for path in files], tmp_path / "t.svg"
    assert run(["trace", *names, "--link", "80kbps", "--rtt", "50ms", "--out", str(out), "--json"]) == 0
    (refit,) = json.loads(capsys.readouterr().out)["refits"]
    assert set(refit) == {"version", "seconds", "bytes", "lower_bound", "ratio", "replicas", "waiting", "phases"}
    assert refit["ratio"] == pytest.approx(7.5)
    assert refit["phases"]["construct"]["share"] == pytest.approx(1 / 3)
    assert list(refit["replicas"].values()) == [1.5]
    assert run(["trace", *names]) == 0
    assert "33.333%" in capsys.readouterr().out


def test_the_drawing_is_well_formed_and_labelled(files: list[Path], tmp_path: Path) -> None:
    names = [str(path) for path in files]
    assert run(["trace", *names, "--link", "80kbps", "--out", str(tmp_path / "t.svg")]) == 0
    tree = ET.parse(tmp_path / "t.svg")
    space = "{http://www.w3.org/2000/svg}"
    texts = ["".join(text.itertext()) for text in tree.iter(f"{space}text")]
    assert texts[-1] != ""
    for name in ("construct", "upload", "seal", "see", "download", "stage", "prepare", "apply", "resume"):
        assert name in texts
    assert any(text.startswith("version 2: 1.500 s, 1,000 bytes, lower bound") for text in texts)
    width = float(tree.getroot().attrib["width"])
    bars = [bar for bar in tree.iter(f"{space}rect") if "x" in bar.attrib]
    assert len(bars) == 16
    assert all(
        float(bar.attrib["x"]) >= 0 and float(bar.attrib["x"]) + float(bar.attrib["width"]) <= width for bar in bars
    )
    assert run(["trace", *names, "--out", str(tmp_path / "t.html")]) == 0
    assert "<svg" in (tmp_path / "t.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "code"), [(["none.json"], 11), (["other.json"], 10), (["p.json", "--out", "x.gif"], 2),
                            (["p.json", "--link", "fast"], 2), (["p.json", "--version", "9"], 11)]
)  # fmt: skip
def test_errors(files: list[Path], tmp_path: Path, arguments: list[str], code: int) -> None:
    (tmp_path / "other.json").write_text('{"a": 1}\n')
    name, *more = arguments
    assert run(["trace", str(tmp_path / name), *more]) == code


def test_clocks_that_do_not_agree_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late = [(at - 5, event) for at, event in SUBSCRIBED]
    names = [
        str(record(tmp_path / "p.json", "publisher", PUBLISHED, monkeypatch)),
        str(record(tmp_path / "r.json", "subscriber", late, monkeypatch)),
    ]
    assert run(["trace", *names, "--json"]) == 0
    assert "committed 4.200 s before its seal" in capsys.readouterr().err


def test_a_library_publisher_writes_the_file_of_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[e.Event] = []
    assert traced(heard.append, rank=0, world=1, stream=STREAM) == heard.append
    monkeypatch.setenv("DCR_TRACE", str(tmp_path / "t.json"))
    emit = traced(heard.append, rank=3, world=4, stream=STREAM)
    emit(PUBLISHED[1][1])
    assert [one.process.partition(" on ")[0] for one in read_traces([tmp_path / "t.rank3.json"])] == [
        "publisher rank 3"
    ]

    def full(self: TraceRecorder, event: e.Event) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorders.TraceRecorder, "__call__", full)
    emit(PUBLISHED[1][1])
    emit(PUBLISHED[2][1])
    assert [type(event).__name__ for event in heard] == ["ChunkPut", "ChunkPut", "Degraded", "Diffed"]
