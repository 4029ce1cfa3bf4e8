"""Starts the processes of a group, and their ends: what torchrun does, without the seconds that it takes to start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.processes.parent_death import parent_death_signal
from support.processes.python import import_path, module_command


def quiet() -> dict[str, str]:
    """What a rank needs to find its program, and to keep to itself on a small machine."""
    return {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", **import_path()}


def environment(rank: int, world: int) -> dict[str, str]:
    """The same, and what a launcher tells a rank."""
    place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    return {**quiet(), **{name: str(n) for name, n in place.items()}}


def torchrun(world: int, module: str, *arguments: str) -> list[str]:
    """Command line of the real launcher, on this machine, at a port of its own."""
    launcher = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    return [*launcher, "-m", module, *arguments]


class Group:
    """`world` ranks of `python -m MODULE ARGUMENTS`, each with a log of its own."""

    def __init__(self, module: str, arguments: Sequence[str], world: int, logs: Path) -> None:
        self.logs = [logs / f"rank-{rank}.log" for rank in range(world)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            with log.open("ab") as told:
                self.processes.append(
                    subprocess.Popen(
                        module_command(module, *arguments),
                        env={**os.environ, **environment(rank, world)},
                        stdin=subprocess.DEVNULL,
                        stdout=told,
                        stderr=told,
                        preexec_fn=parent_death_signal(),
                    )
                )

    def wait(self, seconds: float) -> bool:
        """Until all have ended well; ends the others as soon as one has not. Tells whether all did."""
        try:
            left = list(self.processes)
            while left and not any(process.returncode for process in self.processes):
                for process in list(left):
                    try:
                        process.wait(0.05)
                    except subprocess.TimeoutExpired:
                        seconds -= 0.05
                    else:
                        left.remove(process)
                if seconds < 0:
                    break
            return not left
        finally:
            for process in self.processes:
                process.kill()
                process.wait()

    def said(self, size: int = 3000) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-size:]}" for log in self.logs)
