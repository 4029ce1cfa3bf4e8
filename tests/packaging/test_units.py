"""The systemd units parse, are hardened, and carry the exit codes that must not be restarted."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from dcr_daemon import errors

UNITS = Path(__file__).parents[2] / "systemd"
NAMES = ("dcr-publisher.service", "dcr-subscriber@.service")
FINAL = (errors.UsageError, errors.Incompatible, errors.Fenced, errors.Corrupt)


def unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    parser.read_string((UNITS / name).read_text())
    return parser


@pytest.mark.parametrize("name", NAMES)
def test_a_fenced_daemon_is_not_restarted(name: str) -> None:
    """Must P6: and neither is one whose configuration, store or input an operator has to mend."""
    service = unit(name)["Service"]
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"].split() == [str(kind.exit_code) for kind in FINAL]


@pytest.mark.parametrize("name", NAMES)
def test_units_notify_and_feed_a_watchdog(name: str) -> None:
    service = unit(name)["Service"]
    assert service["Type"] == "notify"
    assert int(service["WatchdogSec"]) > 0


@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_is_one_that_the_cli_takes(name: str) -> None:
    """With the options that the environment file gives."""
    import typer.main

    from dcr_daemon.cli.app import app

    _, command, *flags = unit(name)["Service"]["ExecStart"].split()
    parameters = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    known = {o for p in parameters for o in p.opts}
    assert set(flags) <= known
    documented = (UNITS / name).read_text().split("[Unit]")[0]
    needed = [p.envvar for p in parameters if p.required]
    assert needed
    assert [v for v in needed if f"{v}=" not in documented] == []


@pytest.fixture
def runnable(tmp_path: Path) -> Path:
    """The units with a program that exists here, so that only the units themselves are judged."""
    for name in NAMES:
        text = (UNITS / name).read_text().replace("ExecStart=/usr/bin/dcr", "ExecStart=/bin/true")
        (tmp_path / name.replace("@.", "@a.")).write_text(text)
    return tmp_path


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze on this machine")
@pytest.mark.parametrize("name", NAMES)
def test_systemd_finds_nothing_to_complain_about(name: str, runnable: Path) -> None:
    command = ["systemd-analyze", "verify", str(runnable / name.replace("@.", "@a."))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"})
    about = [line for line in done.stderr.splitlines() if str(runnable) in line or name.partition(".")[0] in line]
    assert (done.returncode, about) == (0, []), done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze on this machine")
@pytest.mark.parametrize("name", NAMES)
def test_units_stay_hardened(name: str, runnable: Path) -> None:
    path = str(runnable / name.replace("@.", "@a."))
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=25", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze cannot judge offline")
    assert done.returncode == 0, done.stdout[-500:]
