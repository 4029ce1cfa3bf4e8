"""What every fuzz target uses: its registration, a memory limit, a directory for files, an event loop."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from support.measure.memory_limit import memory_limit

from dcr_daemon.errors import Corrupt, Incompatible

T = TypeVar("T")
Target = Callable[[bytes], None]

SLACK = 8 << 20  #: bytes that any target may take, whatever its input
FACTOR = 96  #: bytes per byte of input: what the smallest JSON values cost as Python objects

TARGETS: dict[str, Target] = {}
REFUSED = (Corrupt, Incompatible)


def target(function: Target) -> Target:
    TARGETS[function.__name__] = function
    return function


def bounded(function: Target, data: bytes) -> None:
    """Run a target within its bound of memory."""
    with memory_limit(SLACK + FACTOR * len(data)):
        function(data)


@functools.cache
def scratch() -> Path:
    """A directory of this process for parsers that read files; in memory where that is possible."""
    shared = Path("/dev/shm")
    holder = tempfile.TemporaryDirectory(prefix="dcr-fuzz-", dir=shared if shared.is_dir() else None)
    _keep.append(holder)
    return Path(holder.name)


_keep: list[Any] = []


def as_file(name: str, data: bytes) -> Path:
    path = scratch() / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return path


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def run(work: Coroutine[Any, Any, T]) -> T:
    return loop().run_until_complete(work)


def expect(kind: type[Exception], function: Callable[..., object], *arguments: object) -> None:
    try:
        function(*arguments)
    except kind:
        return
    raise AssertionError(f"{arguments} were taken by {function}")
