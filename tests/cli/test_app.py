"""Exit codes, errors and start-up of the command, whatever it is asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dcr_daemon.cli.app import app, run
from dcr_daemon.errors import ResourceExhausted, UpdateAborted, UsageError

COMMANDS = ("publish", "subscribe", "log", "status", "forget", "verify", "materialize", "trace", "demo")
HEAVY = ("torch", "numba", "vllm", "transformers", "boto3", "aioboto3", "botocore", "prometheus_client")


def outcome(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(capsys, command, "--help")
    assert code == 0
    assert "Usage: dcr " + command in out


def test_help_shows_all_that_its_docstring_says(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = outcome(capsys, "gc", "--help")
    assert "kept, kept_bytes, unknown [key], unexplained [key], items [{key, size" in " ".join(out.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_help_text(command: str) -> None:
    import typer.main

    group = typer.main.get_command(app)
    parameters = group.commands[command].params  # type: ignore[attr-defined]
    assert [p.name for p in parameters if not getattr(p, "help", None)] == []


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_nothing_heavy_is_imported_for_help(arguments: list[str]) -> None:
    probe = (
        "import sys; from dcr_daemon.cli.app import run; run(sys.argv[1:]); "
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe, *arguments], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


def test_reading_a_file_stream_loads_neither_torch_nor_the_aws_sdk(tmp_path: Path) -> None:
    probe = (
        "import sys; from dcr_daemon.cli.app import run; run(sys.argv[1:]); "
        "print([m for m in ('torch', 'vllm', 'botocore') if m in sys.modules], file=sys.stderr)"
    )
    arguments = ["log", f"file://{tmp_path}/none", "--json"]
    done = subprocess.run([sys.executable, "-c", probe, *arguments], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["log"], ["log", "--nonsense", "file:///x"], ["materialize", "file:///x"], ["demo", "--steps", "0"]],
)
def test_a_wrong_command_line_exits_2_and_points_to_help(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DCR_STREAM", raising=False)
    code, out, err = outcome(capsys, *arguments)
    assert (code, out) == (2, "")
    assert "--help" in err


def test_errors_are_one_json_object_on_stderr_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outcome(capsys, "log", "ftp://somewhere", "--json")
    assert (code, out) == (2, "")
    error = json.loads(err)["error"]
    assert error["kind"] == "Misuse"
    assert error["exit_code"] == 2
    assert "ftp://somewhere" in error["message"]
    assert error["hint"]


def test_a_usage_error_is_json_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DCR_STREAM", raising=False)
    code, _, err = outcome(capsys, "log", "--json")
    assert code == 2
    assert json.loads(err)["error"]["exit_code"] == 2


@pytest.mark.parametrize("command", ["log", "status", "verify"])
def test_no_stream_exits_11(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = outcome(capsys, command, f"file://{tmp_path}/none")
    assert code == 11
    assert str(tmp_path) in err


def test_publishing_to_no_stream_exits_11(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "watched").mkdir()
    code, _, _ = outcome(
        capsys, "publish", "--to", f"file://{tmp_path}/none", "--watch", str(tmp_path / "watched"),
        "--state", str(tmp_path / "state"), "--once",
    )  # fmt: skip
    assert code == 11


@pytest.mark.parametrize("url", ["vllm://host/x", "dir:relative", "http://x", "vllm:///"])
def test_a_wrong_engine_url_exits_2(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = outcome(
        capsys,
        "subscribe",
        "--from",
        f"file://{tmp_path}/s",
        "--engine",
        url,
        "--state",
        str(tmp_path / "st"),
        "--once",
    )
    assert code == 2
    assert url in err


def test_an_unknown_log_level_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = outcome(
        capsys, "publish", "--to", f"file://{tmp_path}/s", "--watch", str(tmp_path), "--log-level", "loud"
    )
    assert code == 2
    assert "loud" in err


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    import dcr_daemon

    assert outcome(capsys, "--version")[:2] == (0, f"dcr {dcr_daemon.__version__}\n")


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "dcr_daemon", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("dcr ")


@pytest.mark.parametrize("arguments", [[], ["--tiny", "--steps", "2"]])
def test_without_the_checkout_the_demo_says_where_it_is(arguments: list[str]) -> None:
    source = (
        "import sys; sys.modules['dcr_demo'] = None; from dcr_daemon.cli.app import run; sys.exit(run(sys.argv[1:]))"
    )
    process = subprocess.run([sys.executable, "-c", source, "demo", *arguments], capture_output=True, text=True)
    assert process.returncode == 2, process.stderr
    assert "`make demo` in a checkout" in process.stderr


def test_kinds_of_errors_keep_the_names_that_programs_read() -> None:
    """A class may be renamed; `kind` in the output of `--json` and on the engine's socket may not."""
    from dcr_daemon.ledger.objects import ObjectPending
    from dcr_daemon.publish.watch.pieces.reader import ContentMismatch

    errors = (UsageError, ResourceExhausted, UpdateAborted, ObjectPending, ContentMismatch)
    assert [error.kind for error in errors] == ["Misuse", "Exhausted", "Given", "NotYet", "NotAsPromised"]
