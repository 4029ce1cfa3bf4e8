"""What the commands say about a stream, and that it is true. The --json fields are a contract: only ever added to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dcr_daemon.cli.app import run

LOG_FIELDS = {"version", "step", "state", "seq", "attempt", "epoch", "changed", "bytes", "dense_bytes", "source"}
STATUS_FIELDS = {"stream", "head", "epoch", "floor", "anchors", "void", "replicas"}


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert run([*arguments, "--json"]) == code
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: t.contiguous().view(torch.int16).numpy().tobytes() for name, t in tensors.items()}


def loaded(directory: Path) -> dict[str, bytes]:
    found: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return bits(found)


def test_the_log_has_one_object_per_version(streamed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rows = said(capsys, "log", streamed.url)
    assert [(r["version"], r["step"], r["state"]) for r in rows] == [
        (0, None, "sealed"),
        (1, 1, "sealed"),
        (2, 2, "sealed"),
        (3, 5, "sealed"),
    ]
    for row in rows:
        assert set(row) >= LOG_FIELDS
    for row in rows[1:]:
        assert 0 < row["changed"] < row["elements"]
        assert 0 < row["bytes"] < row["dense_bytes"]
        assert row["source"]["path"] == f"step-{row['step']}"


def test_the_log_can_be_cut(streamed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert [r["version"] for r in said(capsys, "log", streamed.url, "-n", "2")] == [2, 3]
    assert [r["version"] for r in said(capsys, "log", streamed.url, "--all")] == [0, 1, 2, 3]


def test_the_log_counts_what_really_changed(streamed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for row in said(capsys, "log", streamed.url)[1:]:
        old, new = (streamed.weights[v] for v in (row["version"] - 1, row["version"]))
        changed = sum(int((old[n].view(torch.int16) != new[n].view(torch.int16)).sum()) for n in old)
        assert row["changed"] == changed


def test_the_tables_for_people_name_every_version(streamed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["log", streamed.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5  # a heading and one line each, however wide
    assert "step-5" in lines[-1]
    assert run(["status", streamed.url]) == 0
    assert "version 3" in capsys.readouterr().out


def test_status_tells_head_publisher_and_anchors(streamed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (status,) = said(capsys, "status", streamed.url)
    assert set(status) >= STATUS_FIELDS
    assert status["stream"]["url"] == streamed.url
    assert (status["head"]["version"], status["head"]["step"]) == (3, 5)
    assert status["epoch"]["name"]
    assert [a["version"] for a in status["anchors"]] == [0]
    assert all(set(replica) >= {"id", "version"} for replica in status["replicas"])


def test_a_long_cell_pads_no_other_line_of_a_table(own_stream: Any, capsys: pytest.CaptureFixture[str]) -> None:
    replicas = own_stream.home / "replicas"
    replicas.mkdir(exist_ok=True)
    (replicas / "r1.json").write_text(json.dumps({"id": "r1", "state": "failed", "detail": "why " * 30}))
    (replicas / "r2.json").write_text(json.dumps({"id": "r2", "at": "2026-01-31T23:59:59.123+00:00"}))
    capsys.readouterr()
    assert run(["status", own_stream.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    assert lines[-1].split()[:2] == ["r2", "STALE"]
    assert lines[-1].endswith(" d ago")


def test_status_shows_a_replica_and_ignores_an_unreadable_one(
    own_stream: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = f"dir://{tmp_path}/served"
    arguments = ["--from", own_stream.url, "--engine", engine, "--replica", "r1", "--state", str(tmp_path / "s")]
    assert run(["subscribe", *arguments, "--once"]) == 0
    (own_stream.home / "replicas" / "broken.json").write_bytes(b"{not json")
    (status,) = said(capsys, "status", own_stream.url)
    assert [(r["id"], r["version"]) for r in status["replicas"]] == [("r1", 3)]
    assert loaded(tmp_path / "served") == bits(own_stream.weights[3])


@pytest.mark.parametrize("version", [None, 0, 1, 3])
def test_materialize_builds_any_version_bit_for_bit(
    version: int | None, streamed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    chosen = [] if version is None else ["--version", str(version)]
    (result,) = said(capsys, "materialize", streamed.url, "--out", str(out), *chosen)
    expected = 3 if version is None else version
    assert (result["version"], result["out"]) == (expected, str(out))
    assert loaded(out) == bits(streamed.weights[expected])
    assert json.loads((out / "config.json").read_text()) == {"model_type": "toy"}


def test_materialize_leaves_an_occupied_directory_alone(
    streamed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("x")
    said(capsys, "materialize", streamed.url, "--out", str(tmp_path), code=2)
    assert (tmp_path / "mine").read_text() == "x"


def test_a_version_that_is_not_sealed_exits_11(
    streamed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "materialize", streamed.url, "--version", "9", "--out", str(tmp_path / "out"), code=11)
    assert not (tmp_path / "out").exists()


def test_a_sound_stream_verifies(streamed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (report,) = said(capsys, "verify", streamed.url)
    assert (report["versions"], report["anchors"], report["damages"]) == (3, 1, [])


def test_a_flipped_bit_is_found_named_and_exits_13(own_stream: Any, capsys: pytest.CaptureFixture[str]) -> None:
    chunk = min(own_stream.home.glob("data/2/*/*.dcr"))
    body = bytearray(chunk.read_bytes())
    body[len(body) // 2] ^= 1
    chunk.chmod(0o644)
    chunk.write_bytes(body)
    (report,) = said(capsys, "verify", own_stream.url, code=13)
    (damage,) = report["damages"]
    assert damage["key"] == chunk.relative_to(own_stream.home).as_posix()
    assert damage["version"] == 2
    assert damage["repair"]
    assert run(["verify", own_stream.url]) == 13
    assert damage["key"] in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["log"], ["log", "--json"], ["status"], ["verify"], ["--help"]])
def test_a_reader_that_stops_reading_changes_no_exit_code(arguments: list[str], streamed: Any) -> None:
    """`dcr log … | head` under pipefail."""
    command = [*arguments, *([] if arguments == ["--help"] else [streamed.url])]
    assert unread(command) == (0, b"")


def test_damage_is_told_by_the_exit_code_even_if_nobody_reads_the_report(own_stream: Any) -> None:
    for part in own_stream.home.glob("data/2/*/*.dcr"):
        part.unlink()
    assert unread(["verify", own_stream.url])[0] == 13


def unread(arguments: list[str]) -> tuple[int, bytes]:
    """Exit code and stderr of a command whose stdout has no reader."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as broken:
        command = [sys.executable, "-m", "dcr_daemon", *arguments]
        done = subprocess.run(command, stdout=broken, stderr=subprocess.PIPE, check=False)
    return done.returncode, done.stderr


def test_results_that_a_full_disk_does_not_take_are_an_error(streamed: Any) -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "dcr_daemon", "log", streamed.url, "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode
    assert b"No space left" in done.stderr
    assert b"Traceback" not in done.stderr


def test_publishing_again_adds_nothing(own_stream: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert own_stream.publish() == 0
    assert len(said(capsys, "log", own_stream.url)) == 4


def test_publishing_says_what_was_left_out_and_the_exit_code_too(
    own_stream: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    incomplete = own_stream.watched / "step-7/model.safetensors"
    incomplete.parent.mkdir()
    incomplete.write_bytes(b"half a fi")
    good = own_stream.watched / "step-6"
    shutil.copytree(own_stream.base, good, copy_function=shutil.copy)
    capsys.readouterr()
    assert own_stream.publish("--json") == 17
    written = json.loads(capsys.readouterr().out)
    assert written["published"] == [{"path": "step-6", "version": 4, "step": 6, "not_read": []}]
    assert [(one["path"], one["cause"]) for one in written["not_published"]] == [("step-7", "incomplete")]
    save_file({"other": torch.zeros(3)}, incomplete)
    assert own_stream.publish() == 10
    captured = capsys.readouterr()
    assert "misfit" in captured.out
    assert "step-7" in captured.out
    assert "added: other" in captured.err
    assert own_stream.publish("--select", "step-[0-6]") == 0
    assert own_stream.publish("--select", "a/b/c/d/e") == 2
    assert own_stream.publish("--step-pattern", "step-(") == 2


def test_another_publisher_is_refused_with_12_until_it_takes_over(
    own_stream: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the first one's end was: `--once` may have released its claim, a killed one has not."""
    (status,) = said(capsys, "status", own_stream.url)
    other = [
        "publish", "--to", own_stream.url, "--base", str(own_stream.base), "--watch", str(own_stream.watched), "--once",
        "--name", "other", "--state", str(tmp_path / "other"),
    ]  # fmt: skip
    assert run(other) == (0 if status["epoch"]["released"] else 12)
    assert run([*other, "--take-over"]) == 0
