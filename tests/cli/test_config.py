"""The configuration file: strict, and weaker than environment and flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcr_daemon.cli.app import run
from dcr_daemon.config import read_config
from dcr_daemon.errors import UsageError

KNOWN = {
    "publish": {"to": "to", "watch": "watch", "region": "region", "take-over": "take_over"},
    "subscribe": {"from": "source", "region": "region"},
}


def written(path: Path, text: str) -> Path:
    file = path / "dcr.toml"
    file.write_text(text)
    return file


def test_a_commands_table_wins_over_the_top(tmp_path: Path) -> None:
    file = written(tmp_path, 'region = "a"\n[publish]\nregion = "b"\ntake-over = true\n')
    assert read_config(file, "publish", known=KNOWN) == {"region": "b", "take_over": True}
    assert read_config(file, "subscribe", known=KNOWN) == {"region": "a"}


def test_keys_are_the_flags_and_not_internal_names(tmp_path: Path) -> None:
    assert read_config(written(tmp_path, '[subscribe]\nfrom = "s"\n'), "subscribe", known=KNOWN) == {"source": "s"}
    with pytest.raises(UsageError, match="source"):
        read_config(written(tmp_path, '[subscribe]\nsource = "s"\n'), "subscribe", known=KNOWN)


@pytest.mark.parametrize(
    ("text", "named", "nearest"),
    [
        ('regoin = "a"\n', "regoin", "region"),
        ("[publish]\ntake-ovr = true\n", "take-ovr", "take-over"),
        ("[publsh]\n", "publsh", "publish"),
        ("[subscribe]\nwatch = 1\n", "watch", "known are"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest(text: str, named: str, nearest: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        read_config(written(tmp_path, text), "publish", known=KNOWN)
    assert nearest in caught.value.hint


def test_what_is_not_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"dcr\.toml is not TOML"):
        read_config(written(tmp_path, "to: s3"), "publish", known=KNOWN)
    with pytest.raises(UsageError, match="cannot read"):
        read_config(tmp_path / "absent", "publish", known=KNOWN)


def test_flags_beat_environment_beats_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(written(tmp_path, f'[log]\nstream = "file://{tmp_path}/from-file"\n'))
    monkeypatch.delenv("DCR_STREAM", raising=False)
    assert run(["--config", file, "log"]) == 11
    assert "from-file" in capsys.readouterr().err
    monkeypatch.setenv("DCR_STREAM", f"file://{tmp_path}/from-env")
    assert run(["--config", file, "log"]) == 11
    assert "from-env" in capsys.readouterr().err
    assert run(["--config", file, "log", f"file://{tmp_path}/from-flag"]) == 11
    assert "from-flag" in capsys.readouterr().err


def test_a_wrong_key_of_any_command_stops_every_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(written(tmp_path, "[subscribe]\nreplcia = 1\n"))
    assert run(["--config", file, "log", f"file://{tmp_path}/s"]) == 2
    assert "'replica'" in capsys.readouterr().err


def test_a_value_of_the_wrong_type_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(written(tmp_path, '[log]\nlimit = "many"\n'))
    assert run(["--config", file, "log", f"file://{tmp_path}/s"]) == 2
    assert "--limit" in capsys.readouterr().err
