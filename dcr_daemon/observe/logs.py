"""Structured logs on stderr: one line per event, at the event's level.

JSON if stderr is not a terminal, aligned key=value lines if it is. `event` is the event's name and its fields are the
keys, so that a log search and a metric use the same words. Control characters in values are escaped; in JSON as JSON
escapes them, so that the value is exact. A line has at most `LINE_BYTES`: a value that is cut says how much is left
out. If a line cannot be written (the reader has died, the disk is full), it is lost and the process continues.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import MutableMapping
from typing import Any

import msgspec
import structlog

from dcr_daemon.events import Event, Level, RepetitionFilter, kind_of
from dcr_daemon.observe.streams import put
from dcr_daemon.wording import LINE_BYTES, cut, json_line

_MARGIN = 256  #: bytes of a line for what the renderer and a cut add


def configure(level: Level = "info", *, json: bool | None = None) -> None:
    """Set up structlog for this process. `json` None decides by whether stderr is a terminal."""
    plain = not sys.stderr.isatty() if json is None else json
    renderer: Any = (
        structlog.processors.JSONRenderer(serializer=_dumps)
        if plain
        else structlog.dev.ConsoleRenderer(pad_event_to=14, colors=not os.environ.get("NO_COLOR"))
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks if plain else structlog.dev.set_exc_info,
            _bounded,
            *([] if plain else [_escaped]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=_to_stderr,
        cache_logger_on_first_use=False,  # stderr may be replaced while the process runs
    )


class _Stderr:
    """The sink of structlog, which calls it by the name of a level."""

    def msg(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            put(sys.stderr, line + "\n")

    debug = info = warning = error = critical = exception = msg


def _to_stderr(*_: Any) -> _Stderr:
    return _Stderr()


def bind(**context: Any) -> None:
    """Put keys (stream, replica) on every later log line of this process; they replace earlier ones."""
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**context)


def logger() -> Any:
    return structlog.get_logger()


class LogEvents:
    """An `Emit` that logs each event under its own name and at its own level, and a repeated `Notice` once."""

    def __init__(self) -> None:
        self._log = structlog.get_logger()
        self._filter = RepetitionFilter()

    def __call__(self, event: Event) -> None:
        if self._filter.repeats(event):
            return
        fields = {k: v for k, v in msgspec.to_builtins(event).items() if k != "type" and v is not None}
        getattr(self._log, event.severity)(kind_of(type(event)), **_rounded(fields))


def _rounded(fields: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in fields.items()}


def _dumps(value: dict[str, Any], **_: Any) -> str:
    """The keys that a person looks for first come first."""
    first = {key: value.pop(key) for key in ("timestamp", "level", "event") if key in value}
    return json_line(first | value)


def _bounded(_log: Any, _method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A processor of structlog: the longest value is cut until the line is short enough."""
    while (excess := _size(fields) - (LINE_BYTES - _MARGIN)) > 0:
        size, longest = max((_size(value), key) for key, value in fields.items())
        if size <= _MARGIN:
            break  # many short ones
        value = fields[longest]
        text = value if isinstance(value, str) else json_line(value)
        keep = len(text) * max(0, size - excess - _MARGIN) // size
        fields[longest] = cut(text, keep)
    return fields


def _size(value: Any) -> int:
    """Bytes of a value in a line."""
    return len(json_line(value).encode())


class _Quoted:
    """A text as the renderer for terminals shows one with blanks; it shows others as they are."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return repr(self._text)


def _escaped(_log: Any, _method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A processor of structlog: control characters cannot reach a terminal."""
    for key, value in fields.items():
        if isinstance(value, str) and not value.isprintable():
            fields[key] = _Quoted(value)
    return fields
