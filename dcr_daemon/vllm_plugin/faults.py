"""Failures that tests plant inside a worker. Inert unless `DCR_TEST_FAULTS=1` is in the worker's environment.

Names: `placement` (a wrong permutation, at attach), `apply` (a try writes half and raises), `flip` (a written value is
corrupted after an apply), `feed` (what the loader made does not arrive), `rollback` (a try raises before it writes),
`slow` (`seconds` of sleep after each slice of a job), `job` (a job raises).
"""

from __future__ import annotations

import os
import threading

ENABLED = os.environ.get("DCR_TEST_FAULTS") == "1"

NAMES = ("placement", "apply", "flip", "feed", "rollback", "slow", "job")
_left: dict[str, int] = {}
_seconds = 0.0
_nap = threading.Event()


def plant(name: str, *, times: int = 1, seconds: float = 0.05) -> None:
    """Let the next `times` passes of a point fail; 0 takes the fault away again."""
    global _seconds
    if name not in NAMES:
        raise ValueError(f"unknown fault {name}; there are {', '.join(NAMES)}")
    _left[name], _seconds = times, seconds


def take(name: str) -> bool:
    """Whether this pass fails."""
    if not ENABLED or _left.get(name, 0) <= 0:
        return False
    _left[name] -= 1
    return True


def slice_done() -> None:
    """After each slice of a job."""
    if ENABLED and take("slow"):
        _nap.wait(_seconds)


class Planted(RuntimeError):
    """A failure that a test asked for."""
