"""A program as several processes, one per rank."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from support.processes.python import import_path, module_command


def run_ranks(program: str, world: int, out: Path, *, timeout: float = 300) -> None:
    """Run the module `program` with the arguments `rank out` for every rank, and wait for all.

    Raises:
        AssertionError: one of them failed; the message ends with what it said.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **import_path()}
    started = [
        subprocess.Popen(
            module_command(program, str(rank), str(out)),
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
