"""Passes events to several listeners.

Emitting never raises: a listener that fails (a full disk under the event file) is removed, which is logged once, and
the others continue.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import msgspec

from dcr_daemon import runtime
from dcr_daemon.errors import UsageError
from dcr_daemon.events import Emit, Event
from dcr_daemon.observe import logs
from dcr_daemon.wording import json_line


class Observer:
    """Calls its listeners in order; may be called from any thread."""

    def __init__(self, listeners: Iterable[Emit]) -> None:
        self._listeners = list(listeners)

    def add(self, listener: Emit) -> None:
        """One more, which may itself emit through this observer."""
        self._listeners.append(listener)

    def __call__(self, event: Event) -> None:
        for listener in list(self._listeners):
            try:
                listener(event)
            except (OSError, ValueError) as error:
                with contextlib.suppress(ValueError):
                    self._listeners.remove(listener)
                logs.logger().warning("listener_dropped", listener=type(listener).__name__, reason=str(error))


class EventFile:
    """Appends every event as one JSON line: the event's fields, `type`, and when it was emitted. `reopen` follows a
    rotation of the file.

    `monotonic` is seconds on the machine's clock that never goes back: comparable between processes of one machine,
    and only there. `at` is wall time. Each line is one write, so several processes may share a file.

    Raises:
        UsageError: the file cannot be opened for writing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = self._open()

    def _open(self) -> IO[bytes]:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return self._path.open("ab", buffering=0)
        except OSError as error:
            raise UsageError(
                f"cannot write events to {self._path}: {error.strerror or error}", hint="check --events"
            ) from error

    def reopen(self) -> None:
        """Go on in the file that has the path now. Raises as at the start; then the old file is written on."""
        old, self._file = self._file, self._open()
        old.close()

    def __call__(self, event: Event) -> None:
        line = msgspec.to_builtins(event) | {"monotonic": runtime.monotonic(), "at": runtime.now().isoformat()}
        self._file.write(f"{json_line(line)}\n".encode())

    def close(self) -> None:
        self._file.close()
