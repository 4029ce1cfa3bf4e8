"""A file of trace events in Chrome's JSON array format, which Perfetto and chrome://tracing open.

One event per line, and the closing bracket is left out, as the format allows: a file that is still written, or whose
writer was killed, is read up to its last whole line. The file is bounded: when it has half of `limit` it is renamed to
`FILE.1`, in place of the one before, and a new one begins.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from dcr_daemon.errors import UsageError
from dcr_daemon.wording import json_line

_HEAD = b'[\n{"name":"process_name"'
LIMIT = 64 << 20  #: bytes of a trace, `FILE` and `FILE.1` together


class TraceFile:
    """Appends trace events to `path` for one process, named `process` in the timeline. Several may share a file.

    The file is opened for each line, so there is nothing to close, and a file that was moved away is begun anew.

    Raises:
        UsageError: the file cannot be opened for writing, or is something else than a trace.
    """

    def __init__(self, path: Path, process: dict[str, Any], *, limit: int = LIMIT) -> None:
        self._path, self._limit = path, limit
        self._end = 0  #: where the file ended when this process last wrote
        self._process = {"name": "process_name", "ph": "M", "pid": os.getpid(), "args": process}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._cut_to_whole_lines()
            self._append(self._process)
        except OSError as error:
            raise UsageError(
                f"cannot write a trace to {path}: {error.strerror or error}", hint="check --trace"
            ) from error

    def write(self, event: dict[str, Any]) -> None:
        """Append one event; `pid` is added.

        Raises:
            OSError: it cannot be written.
        """
        if self._append(event | {"pid": os.getpid()}) > self._limit // 2:
            with contextlib.suppress(FileNotFoundError):  # another process that writes to it was faster
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            self._end = 0
            self._append(self._process)

    def _append(self, event: dict[str, Any]) -> int:
        """Bytes that the file has then."""
        line = json_line(event).encode() + b",\n"
        with self._path.open("ab", buffering=0) as file:
            if file.tell() < self._end:  # begun anew, by whoever moved it away
                line = json_line(self._process).encode() + b",\n" + line
            if not file.tell():
                line = b"[\n" + line
            file.write(line)
            self._end = file.tell()
            return self._end

    def _cut_to_whole_lines(self) -> None:
        """What a killed process left of a line would join the next one."""
        if not self._path.exists():
            return
        with self._path.open("r+b") as file:
            if not _HEAD.startswith(file.read(len(_HEAD))):
                raise UsageError(f"{self._path} is not a trace, and is left as it is", hint="name a new file")
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - (1 << 16)))
            tail = file.read()
            file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)
