"""Faults that tests inject into a worker. Without `DCR_TEST_FAULTS=1` in the worker's environment they do nothing.

Names: `placement` (a wrong permutation, at attach), `job` (a job fails), `slow` (`seconds` of sleep after each slice of
a job), `apply` (a try has written half), `flip` (a written value is corrupted after an apply), `feed` (the loader's
result is written wrongly), `rollback` (a try fails before it writes), `commit` (before a rank commits), `committed`
(after it has, and before anybody knows).

An injected fault fails (`fail`), ends its process by SIGKILL (`kill`), or never returns (`hang`). Before that it makes
the file `mark`, so that a test can wait for it.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

ENABLED = os.environ.get("DCR_TEST_FAULTS") == "1"

NAMES = ("placement", "job", "slow", "apply", "flip", "feed", "rollback", "commit", "committed")
ACTIONS = ("fail", "kill", "hang")


@dataclass
class Injection:
    """After `skip` passes of a point, the next `left` passes fail."""

    left: int
    skip: int
    seconds: float
    action: str
    mark: str


_injections: dict[str, Injection] = {}
_nap = threading.Event()


def inject(
    name: str, *, times: int = 1, skip: int = 0, seconds: float = 0.05, action: str = "fail", mark: str = ""
) -> None:
    """Let the next `times` passes of a point fail; 0 removes the fault."""
    if name not in NAMES or action not in ACTIONS:
        raise ValueError(f"unknown fault {name} ({action}); there are {', '.join(NAMES)} ({', '.join(ACTIONS)})")
    _injections[name] = Injection(times, skip, seconds, action, mark)


def should_fail(name: str) -> bool:
    """Whether this pass fails; the caller then calls `fail`, or fails in its own way."""
    injection = _injections.get(name) if ENABLED else None
    if injection is None or injection.left <= 0:
        return False
    if injection.skip > 0:
        injection.skip -= 1
        return False
    injection.left -= 1
    return True


def fail(name: str) -> None:
    """Fail as planned. Raises `InjectedFault` unless the process ends or hangs here."""
    injection = _injections[name]
    if injection.mark:
        Path(injection.mark).touch()
    if injection.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while injection.action != "fail":
        _nap.wait()
    raise InjectedFault(f"{name}: a failure planted by a test")


def point(name: str) -> None:
    """A point at which only an injected fault can happen."""
    if should_fail(name):
        fail(name)


def after_slice() -> None:
    """Called after each slice of a job; sleeps if the fault `slow` is injected."""
    if ENABLED and should_fail("slow"):
        _nap.wait(_injections["slow"].seconds)


class InjectedFault(RuntimeError):
    """A failure that a test asked for."""
