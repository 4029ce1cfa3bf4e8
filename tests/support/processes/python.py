"""Run modules of `support` as programs of their own, against the package that the tests run against."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]


def module_command(module: str, *arguments: str) -> list[str]:
    """Command line of `python -m MODULE ARGUMENTS`. `-P` keeps the working directory off the import path."""
    return [sys.executable, "-P", "-m", module, *arguments]


def import_path() -> dict[str, str]:
    """Environment in which a child process finds the package `support`."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))}
