"""What commands print of names from outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dcr_daemon.cli.app import run
from dcr_daemon.cli.output import print_fields, print_json, print_table, report_error

NAME = "\x1b[31mred\x1b]0;title\x07[/bold] :smile: [red]x"
SHOWN = r"\x1b[31mred\x1b]0;title\x07[/bold] :smile: [red]x"


def test_names_are_shown_escaped_and_never_taken_for_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("id", "state"), [(NAME, "x")])
    print_fields({"source": NAME})
    report_error(NAME, f"remove {NAME}\n", "Corrupt", 13, json=False)
    out, err = capsys.readouterr()
    assert out.splitlines()[1].startswith(SHOWN)
    assert out.splitlines()[2] == f"source  {SHOWN}"
    assert err == f"dcr: {SHOWN}\n     → remove {SHOWN}\\n\n"


def test_json_has_the_exact_names(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"source": NAME + "\x9b\u202e"})
    report_error(NAME, "", "Corrupt", 13, json=True)
    out, err = capsys.readouterr()
    assert out.rstrip("\n").isprintable()
    assert json.loads(out) == {"source": NAME + "\x9b\u202e"}
    assert json.loads(err)["error"]["message"] == NAME


def test_an_error_is_at_most_a_line_of_16_kib(capsys: pytest.CaptureFixture[str]) -> None:
    report_error("x" * 1_000_000, "", "Corrupt", 13, json=False)
    assert len(capsys.readouterr().err) < (16 << 10) + 100


def test_a_checkpoint_with_a_hostile_name_and_a_replica_that_reports_one(
    own_stream: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """Anybody who writes checkpoints, or reports as a replica, wrote to the terminal of whoever looked."""
    home = Path(own_stream.watched)  # type: ignore[attr-defined]
    next(home.iterdir()).rename(home / f"{NAME.replace('/', '')}-6")
    assert own_stream.publish() == 0  # type: ignore[attr-defined]
    replica = Path(own_stream.url.removeprefix("file://")) / "replicas" / "r1.json"  # type: ignore[attr-defined]
    replica.parent.mkdir(exist_ok=True)
    replica.write_text(json.dumps({"id": "r1", "state": NAME, "detail": NAME, "engine": [NAME]}))
    capsys.readouterr()
    for command in ("log", "status", "verify"):
        run([command, own_stream.url])  # type: ignore[attr-defined]
        out, err = capsys.readouterr()
        assert all(line.isprintable() for line in (out + err).splitlines()), command
