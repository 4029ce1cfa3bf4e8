"""The objects of fixed input with fixed nonces are, byte for byte, those of the recording."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "recorded_stream.py"


@pytest.mark.parametrize("case", ["mapping", "stream", "module", "xor", "overwrite", "masters", "watched", "ranks"])
def test_a_stream_is_written_as_it_was_recorded(case: str) -> None:
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--only", case], capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
