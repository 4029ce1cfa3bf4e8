"""Reading back what the daemons wrote with --events: a tail over a file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

EventLine = dict[str, Any]


class EventTail:
    """Everything a daemon has emitted so far; `type` is the name of the event's class."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._partial = b""
        self.seen: list[EventLine] = []

    def read(self) -> list[EventLine]:
        """All events, the new ones included; a line still being written waits for the next call."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
            self._offset += len(data)
            *lines, self._partial = (self._partial + data).split(b"\n")
            self.seen += [json.loads(line) for line in lines if line]
        return self.seen

    def of(self, *kinds: str, **fields: Any) -> list[EventLine]:
        """Events of these kinds with these field values, oldest first."""
        return [e for e in self.read() if e["type"] in kinds and all(e.get(k) == v for k, v in fields.items())]

    def first(self, *kinds: str, **fields: Any) -> EventLine | None:
        found = self.of(*kinds, **fields)
        return found[0] if found else None

    def has(self, *kinds: str, **fields: Any) -> Callable[[], bool]:
        """A condition to wait for: the first such event is there."""
        return lambda: self.first(*kinds, **fields) is not None
