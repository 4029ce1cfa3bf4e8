"""A disk that takes nothing any more until it is relieved: at chosen doors, or a real file system."""

from __future__ import annotations

import errno
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

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


class CannotMount(Exception):
    """This user may not mount a file system."""


class Tmpfs:
    """A real file system of `size` bytes, with nearly all of it taken by `ballast`."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.ballast = path, path / "ballast"
        path.mkdir()
        options = ["-t", "tmpfs", "-o", f"size={size}", "none", str(path)]
        made = subprocess.run(["mount", *options], check=False, capture_output=True)
        if made.returncode:
            raise CannotMount(made.stderr.decode().strip())

    def fill(self, leave: int) -> None:
        """Take what is free, but for `leave` bytes."""
        free = os.statvfs(self.path)
        size = free.f_bavail * free.f_frsize - leave
        if size > 0:
            with self.ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)

    def relieve(self) -> None:
        self.ballast.unlink(missing_ok=True)

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.path)], check=True)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Tmpfs]:
    try:
        mounted = Tmpfs(tmp_path / "tmpfs", 4 << 20)
    except CannotMount as error:
        pytest.skip(f"this user may not mount a tmpfs: {error}")
    yield mounted
    mounted.close()
