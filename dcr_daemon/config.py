"""The configuration file: reads TOML into default values of a command's options. `cli.app` calls it.

Precedence: flags, then environment (`DCR_…`), then this file, then built-in defaults. Keys are the long flags
without the dashes. Keys at the top apply to every command that has such an option; a table named after a command
applies to that command and takes precedence. An unknown key is an error, which names the nearest known one.

    endpoint-url = "https://s3.example.com"

    [publish]
    to = "s3://bucket/run-42"
    watch = "/checkpoints"
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dcr_daemon.errors import UsageError

Known = Mapping[str, Mapping[str, str]]  #: command -> key as written in the file -> the option's internal name


def read_config(path: Path, command: str, *, known: Known) -> dict[str, Any]:
    """The default values for `command` in the file `path`, by the options' internal names.

    Raises:
        UsageError: the file cannot be read, is not TOML, or holds an unknown key or table.
    """
    tables = _parse(path)
    everywhere = {key for options in known.values() for key in options}
    for key, value in tables.items():
        if isinstance(value, dict):
            _require(key, known, path, what="table", near=[*known, *everywhere])
            for inner in value:
                _require(inner, known[key], path, what=f"key in [{key}]", near=known[key])
        else:
            _require(key, everywhere, path, what="key", near=[*everywhere, *known])
    options = known[command]
    shared = {options[key]: value for key, value in tables.items() if key in options and not isinstance(value, dict)}
    own = {options[key]: value for key, value in tables.get(command, {}).items()}
    return shared | own


def _parse(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}", hint="check --config") from error
    except (ValueError, RecursionError) as error:  # not only TOMLDecodeError: an integer may have too many digits
        raise UsageError(f"{path} is not TOML: {error}") from error


def _require(key: str, known: Iterable[str], path: Path, *, what: str, near: Iterable[str]) -> None:
    if key in known:
        return
    close = difflib.get_close_matches(key, list(near), n=1, cutoff=0.5)
    names = f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(sorted(known))}"
    raise UsageError(f"{path}: unknown {what}: {key!r}", hint=names)
