"""The machine that a figure was measured on, its load, and the memory of its processes."""

from __future__ import annotations

import contextlib
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Processor, cores, memory, kernel, interpreter, load of the last minute and of the last fifteen, and when."""
    facts = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in facts.splitlines() if line.startswith("model name")]
    one, _, fifteen = os.getloadavg()
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": [round(one, 1), round(fifteen, 1)],
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def describe(found: dict[str, Any]) -> str:
    """One line for people."""
    loads = " and ".join(f"{load:g}" for load in found["load"])
    return (
        f"{found['cores']} cores of {found['processor']}, {found['memory_gb']:g} GB, Python {found['python']}; "
        f"load {loads} (1 and 15 minutes), {found['at']}"
    )


def forget_peak(pid: int) -> None:
    """From now on `peak_mb` counts anew."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_mb(pid: int) -> float:
    """The most memory that the process has had at once, shared pages included, in 10**6 bytes."""
    return memory_mb(pid, "VmHWM")


def memory_mb(pid: int, field: str = "VmRSS") -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0
