"""A program as several processes, one per rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_ranks(program: str, world: int, out: Path, *, timeout: float = 300) -> None:
    """Run `program rank out` for every rank, and wait for all.

    Raises:
        AssertionError: one of them failed; the message ends with what it said.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, program, str(rank), str(out)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        told = [process.communicate(timeout=timeout)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    failed = [text for process, text in zip(started, told, strict=True) if process.returncode]
    assert not failed, failed[0][-4000:]
