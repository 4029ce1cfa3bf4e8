"""Reads trace files of any number of processes into one timeline, and writes it as one trace again.

A file may be cut off, still be written, or be `FILE.1` of another: what is not a whole line is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcr_daemon.errors import Incompatible, NotFound
from dcr_daemon.wording import json_line


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


def read_traces(paths: Iterable[Path]) -> list[Slice]:
    """All slices of these files by their beginning; what is in two of them counts once.

    Raises:
        NotFound: a file does not exist or cannot be read.
        Incompatible: a file is no trace of DCR.
    """
    found: dict[str, Slice] = {}
    for path in paths:
        before = len(found)
        lines = list(_lines(path))
        names = {line["pid"]: line.get("args", {}) for line in lines if line.get("ph") == "M"}
        for line in lines:
            if line.get("cat") == "dcr" and isinstance(line.get("args", {}).get("version"), int):
                one = _slice(line, names.get(line["pid"]) or {"name": f"{path.stem} {line['pid']}"})
                found[repr(one)] = one
        if len(found) == before and not names:
            raise Incompatible(f"{path} is not a trace of dcr", hint="give files that --trace or DCR_TRACE named")
    return sorted(found.values(), key=lambda one: (one.begin, one.end))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror or error}", hint="check the FILES") from error
    for line in text.splitlines():
        try:
            value = json.loads(line.strip().rstrip(","))
        except ValueError:  # a bracket, or a line that was cut off
            continue
        if isinstance(value, dict) and "pid" in value:
            yield value


def _slice(line: dict[str, Any], process: dict[str, Any]) -> Slice:
    begin = line["ts"] / 1e6
    return Slice(
        process=str(process.get("name")), role=str(process.get("role", "")), stream=str(process.get("stream", "")),
        name=str(line["name"]), begin=begin, end=begin + line.get("dur", 0) / 1e6, lane=int(line.get("tid", 0)),
        args=line["args"], instant=line.get("ph") == "i",
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
