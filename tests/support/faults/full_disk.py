"""A disk that takes nothing any more, at chosen doors, until it is relieved."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator

import pytest

from dcr_daemon import runtime
from dcr_daemon.runtime import SystemRuntime


class FullDisk(SystemRuntime):
    """The real runtime, whose `disk.<what>.<step>` doors can be shut. `passed` counts, by name, what went through."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._shut: dict[str, tuple[int, int]] = {}

    def shut(self, *names: str, after: int = 0, number: int = errno.ENOSPC) -> None:
        """From pass `after + 1` on, counted from now, these failpoints raise `OSError`."""
        for name in names:
            self._shut[name] = (self.passed[name] + after, number)

    def relieve(self) -> None:
        self._shut.clear()

    def failpoint(self, name: str) -> None:
        limit, number = self._shut.get(name, (0, 0))
        if number and self.passed[name] >= limit:
            self.refused[name] += 1
            raise OSError(number, os.strerror(number))
        self.passed[name] += 1


@pytest.fixture
def full_disk() -> Iterator[FullDisk]:
    """Installed for the test's own process."""
    before, disk = runtime._current, FullDisk()
    runtime.install(disk)
    yield disk
    runtime.install(before)
