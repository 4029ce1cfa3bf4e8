"""Which of many cases every run tries: drawn by the commit, so that each commit tries others and says which."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")


def _commit() -> str:
    """The commit that is tested; outside of a checkout always the same word."""
    here = Path(__file__).parent
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return found.stdout.strip()[:12] or "released"


COMMIT = _commit()


def drawn(
    cases: Sequence[T], count: int, *, name: Callable[[T], str] = str, group: Callable[[T], object] = lambda case: case
) -> list[T]:
    """`count` cases, no two of a group."""
    found: dict[object, T] = {}
    for case in sorted(cases, key=lambda case: hashlib.sha256(f"{COMMIT} {name(case)}".encode()).digest()):
        found.setdefault(group(case), case)
    return list(found.values())[:count]


def parameters(
    cases: Sequence[T], count: int, *, name: Callable[[T], str] = str, group: Callable[[T], object] = lambda case: case
) -> list[object]:
    """All cases as parameters of a test; those not drawn are for `make faults` only. An id names case and commit."""
    chosen = {name(case) for case in drawn(cases, count, name=name, group=group)}
    return [
        pytest.param(case, id=f"{name(case)}@{COMMIT}")
        if name(case) in chosen
        else pytest.param(case, id=name(case), marks=pytest.mark.faults)
        for case in cases
    ]
