"""Reads trace files of any number of processes into one timeline, and writes it as one trace again.

A file may be cut off, still be written, or be `FILE.1` of another: what is not a whole line of a trace is left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from dcr_daemon.errors import Incompatible, NotFound
from dcr_daemon.untrusted import decode_json
from dcr_daemon.wording import json_line

Microseconds = Annotated[float, msgspec.Meta(ge=0, le=1e17)]


@dataclass(frozen=True, slots=True)
class Slice:
    """One phase of one process, or an instant (`begin` equals `end`). Times are seconds since 1970."""

    process: str
    role: str
    stream: str
    name: str
    begin: float
    end: float
    lane: int = 0
    args: dict[str, Any] = field(default_factory=dict)
    instant: bool = False

    @property
    def version(self) -> int:
        return int(self.args["version"])


class _Event(msgspec.Struct, frozen=True):
    """A line of a trace, as Chrome's format has it: times in microseconds since 1970."""

    pid: int
    ph: str
    name: str = ""
    cat: str = ""
    ts: Microseconds = 0.0
    dur: Microseconds = 0.0
    tid: int = 0
    args: dict[str, Any] = {}


class _Args(msgspec.Struct, frozen=True):
    """What is read of a slice's args."""

    version: int
    bytes: int | None = None


_events = msgspec.json.Decoder(_Event)


def read_traces(paths: Iterable[Path]) -> list[Slice]:
    """All slices of these files by their beginning; what is in two of them counts once.

    Raises:
        NotFound: a file does not exist or cannot be read.
        Incompatible: a file is no trace of DCR.
    """
    found: dict[str, Slice] = {}
    for path in paths:
        before = len(found)
        events = list(_events_of(path))
        names = {event.pid: event.args for event in events if event.ph == "M"}
        for event in events:
            if event.cat == "dcr":
                one = _slice(event, names.get(event.pid) or {"name": f"{path.stem} {event.pid}"})
                found[repr(one)] = one
        if len(found) == before and not names:
            raise Incompatible(f"{path} is not a trace of dcr", hint="give files that --trace or DCR_TRACE named")
    return sorted(found.values(), key=lambda one: (one.begin, one.end))


def _events_of(path: Path) -> Iterator[_Event]:
    try:
        body = path.read_bytes()
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror or error}", hint="check the FILES") from error
    for line in body.splitlines():
        with contextlib.suppress(ValueError, msgspec.ValidationError):  # a bracket, or a line that was cut off
            event = decode_json(_events, line.strip().rstrip(b","))
            if event.cat == "dcr":
                msgspec.convert(event.args, _Args)
            yield event


def _slice(event: _Event, process: dict[str, Any]) -> Slice:
    begin = event.ts / 1e6
    return Slice(
        process=str(process.get("name")), role=str(process.get("role", "")), stream=str(process.get("stream", "")),
        name=event.name, begin=begin, end=begin + event.dur / 1e6, lane=event.tid, args=event.args,
        instant=event.ph == "i",
    )  # fmt: skip


def merged_trace(slices: Iterable[Slice]) -> str:
    """One trace of all: every process has a number of its own, whatever it had on its host."""
    rows, numbers = list[dict[str, Any]](), dict[str, int]()
    for one in slices:
        if one.process not in numbers:
            numbers[one.process] = len(numbers) + 1
            args = {"name": one.process, "role": one.role, "stream": one.stream}
            rows.append({"name": "process_name", "ph": "M", "pid": numbers[one.process], "args": args})
        row: dict[str, Any] = {"name": one.name, "cat": "dcr", "ts": round(one.begin * 1e6)}
        row |= {"ph": "i", "s": "p"} if one.instant else {"ph": "X", "dur": round((one.end - one.begin) * 1e6)}
        rows.append(row | {"pid": numbers[one.process], "tid": one.lane, "args": one.args})
    return "[\n" + ",\n".join(map(json_line, rows)) + "\n]\n"
