"""One line per change of state; chunks only at debug; JSON where nobody watches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from dcr_daemon import events as e
from dcr_daemon.observe import logs


@pytest.fixture(autouse=True)
def _fresh_structlog() -> Iterator[None]:
    yield
    structlog.contextvars.clear_contextvars()
    structlog.reset_defaults()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_fact_is_one_json_line_with_its_own_field_names(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(json=True)
    logs.bind(stream="file:///s")
    logs.LogEvents()(e.RolledBack(txn="t", version=3, reason="sums differ"))
    (line,) = lines(capsys)
    assert line["event"] == "rolled_back"
    assert line["level"] == "error"
    assert (line["txn"], line["version"], line["reason"], line["stream"]) == ("t", 3, "sums differ", "file:///s")


def test_chunks_are_not_logged_at_info(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", json=True)
    emit = logs.LogEvents()
    emit(e.ChunkPut(version=1, attempt=1, n=0, bytes=1, seconds=0.1))
    emit(e.StoreRequest(operation="get", outcome="ok", seconds=0.1))
    assert lines(capsys) == []


def test_waiting_for_one_thing_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(json=True)
    emit = logs.LogEvents()
    for _ in range(5):
        emit(e.Waiting(what="the stream"))
    emit(e.Waiting(what="the engine"))
    emit(e.Serving(version=1))
    emit(e.Waiting(what="the engine"))
    assert [(x["event"], x.get("what")) for x in lines(capsys)] == [
        ("waiting", "the stream"),
        ("waiting", "the engine"),
        ("serving", None),
        ("waiting", "the engine"),
    ]


def test_a_daemon_outlives_the_reader_of_its_log_and_the_disk_under_it(tmp_path: Path) -> None:
    """A log shipper that dies must not take the publisher along; neither must a full log volume."""
    source = (
        "import pathlib, sys; from dcr_daemon.observe import logs; logs.configure()\n"
        "for line in sys.stdin: logs.logger().info('fact')\n"
        "pathlib.Path(sys.argv[1]).touch(); sys.exit(7)"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as broken, Path("/dev/full").open("wb") as full:
        for number, stderr in enumerate((broken, full)):
            mark = tmp_path / str(number)
            command = [sys.executable, "-c", source, str(mark)]
            code = subprocess.run(command, input=b"1\n2\n3\n", stderr=stderr, check=False).returncode
            assert mark.exists()
            assert code == 7 or stderr is full  # the interpreter's own flush fails there at exit


@pytest.mark.parametrize("no_color", ["", "1"])
def test_no_color_means_none(
    no_color: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    logs.configure(json=False)
    logs.logger().warning("fact", number=1)
    assert ("\x1b[3" in capsys.readouterr().err) == (not no_color)


NAME = "\x1b[31mred\x1b]0;title\x07\n{}"


def test_a_name_from_outside_is_exact_in_json_and_escaped_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(json=True)
    logs.LogEvents()(e.Degraded(what=NAME))
    text = capsys.readouterr().err
    assert text.rstrip("\n").isprintable()
    assert json.loads(text)["what"] == NAME
    logs.configure(json=False)
    logs.bind(stream=NAME)
    logs.LogEvents()(e.Degraded(what=f"not published: {NAME}"))
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert text.count(r"\x1b[31mred\x1b]0;title\x07\n{}'") == 2
    logs.LogEvents()(e.Opened(version=1, attempt=2, step=3))
    logs.logger().info("names", names=[NAME], table={NAME: NAME})
    assert NAME not in capsys.readouterr().err


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("what", ["x" * 1_000_000, "\x1b" * 1_000_000, "\udcff" * 20_000, "模" * 20_000])
def test_no_line_is_longer_than_16_kib(capsys: pytest.CaptureFixture[str], plain: bool, what: str) -> None:
    logs.configure(json=plain)
    logs.bind(stream="file:///" + "s" * 9_000)
    logs.LogEvents()(e.Aborted(version=1, attempt=2, reason=what))
    text = capsys.readouterr().err
    assert 2_000 < len(text.encode()) <= 16 << 10
    assert "more characters" in text
    if plain:
        line = json.loads(text)
        reason, _, rest = line["reason"].partition("… and ")
        assert len(reason) + int(rest.split()[0]) == len(what)
        assert line["stream"].endswith("s" * 9_000), "only the longest value is cut"


def test_a_line_of_many_short_values_ends(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(json=True)
    logs.logger().info("many", **{f"field{n}": "x" * 20 for n in range(2_000)})
    assert json.loads(capsys.readouterr().err)["event"] == "many"
