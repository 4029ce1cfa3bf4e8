"""The systemd units parse, are hardened, and carry the exit codes that must not be restarted."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dcr_daemon import errors

UNITS = Path(__file__).parents[2] / "systemd"
NAMES = ("dcr-publisher.service", "dcr-subscriber@.service")
SERVERS = ("vllm@.service",)
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
    assert service["Restart"] == "always", "systemd takes an end by SIGHUP for a clean one"
    assert service["RestartPreventExitStatus"].split() == [str(kind.exit_code) for kind in FINAL]


def test_a_unit_makes_no_stream() -> None:
    """A misspelled prefix would be a new stream, to which the trainer publishes and nobody subscribes."""
    assert "--create" not in unit("dcr-publisher.service")["Service"]["ExecStart"]


def test_the_publisher_is_the_trainers_user() -> None:
    """safetensors writes files with mode 0600, whatever the umask is."""
    service = unit("dcr-publisher.service")["Service"]
    assert "DynamicUser" not in service
    assert service["User"] == service["Group"] == "trainer"


def test_server_and_subscriber_of_one_name_work_together() -> None:
    server, subscriber = unit("vllm@.service"), unit("dcr-subscriber@.service")
    for key in ("User", "Group", "RuntimeDirectory", "RuntimeDirectoryMode", "RuntimeDirectoryPreserve"):
        assert server["Service"][key] == subscriber["Service"][key]
    sample = env("subscriber-NAME.env")
    assert f"DCR_SOCKET={sample['DCR_ENGINE'].removeprefix('vllm://')}".replace("NAME", "%i") in str(
        server["Service"]["Environment"]
    )
    assert "PrivateTmp" not in server["Service"]
    assert "dcr-subscriber@%i.service" in server["Unit"]["Wants"]
    assert server["Service"]["Restart"] == "always", "vLLM exits with 0 when its engine dies"
    users = (UNITS / "dcr.sysusers.conf").read_text()
    assert f"u {server['Service']['User']} " in users


def env(name: str) -> dict[str, str]:
    lines = (UNITS / "env" / name).read_text().splitlines()
    return dict(line.partition("=")[::2] for line in lines if line and line[0] != "#")


@pytest.mark.parametrize(("name", "command"), [("publisher.env", "publish"), ("subscriber-NAME.env", "subscribe")])
def test_samples_set_every_variable_that_is_needed_and_none_that_does_not_exist(name: str, command: str) -> None:
    import typer.main

    from dcr_daemon.cli.app import app

    parameters = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    known, needed = {p.envvar for p in parameters}, {p.envvar for p in parameters if p.required}
    text = (UNITS / "env" / name).read_text()
    given = {name for name in re.findall(r"^#?(\w+)=", text, re.MULTILINE) if name.startswith("DCR_")}
    assert needed <= set(env(name))
    assert given <= known


@pytest.mark.parametrize("name", NAMES)
def test_a_reload_is_sighup(name: str) -> None:
    assert unit(name)["Service"]["ExecReload"] == "/bin/kill -HUP $MAINPID"


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
    for name in (*NAMES, *SERVERS):
        text = re.sub(r"ExecStart=/usr/bin/(dcr|vllm)", "ExecStart=/bin/true", (UNITS / name).read_text())
        (tmp_path / name.replace("@.", "@a.")).write_text(text)
    return tmp_path


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze on this machine")
@pytest.mark.parametrize("name", [*NAMES, *SERVERS])
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
