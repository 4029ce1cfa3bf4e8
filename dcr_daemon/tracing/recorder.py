"""Turns events into the phases of updates and refits, each a slice of wall-clock time in a trace file.

Publisher: `open` (the record of the attempt), `construct` (compare and encode), `upload` (one slice per chunk), `seal`
(from the last chunk, or the end of `construct`, to the seal). Replica: `download` (one per chunk), `stage` (from the
look that found the seal until everything is verified), `prepare`, and the parts of the pause: `rest`, `begin`, `apply`,
`sums`, `commit`, `resume`. An engine that does not divide its pause has all of it in `apply`. Wall time lets the files
of several hosts be merged, as exactly as their clocks agree.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dcr_daemon import events as e
from dcr_daemon import runtime
from dcr_daemon.errors import UsageError
from dcr_daemon.tracing.trace_file import LIMIT, TraceFile

PAUSE = ("rest", "begin", "apply", "sums", "commit", "resume")  #: in the order in which they run
VARIABLE = "DCR_TRACE"
_MAX_SEEN = 1000  #: versions whose beginning is remembered


class TraceRecorder:
    """An `Emit` that writes phases to a trace file.

    Args:
        role: `publisher` or `subscriber`.
        name: which one: a rank, a replica.
        stream: the stream's URL.

    Raises:
        UsageError: the file cannot be opened for writing.
    """

    def __init__(self, path: Path, *, role: str, name: str, stream: str, limit: int = LIMIT) -> None:
        process = {"name": f"{role} {name} on {socket.gethostname()}", "role": role, "stream": stream}
        self._file = TraceFile(path, process, limit=limit)
        self._lanes: list[float] = []  #: for slices that overlap: when each lane is free
        self._began: dict[tuple[str, int], float] = {}  #: (phase, version) → since when
        self._handlers: dict[type[e.Event], Callable[[Any, float], None]] = {
            e.Opened: self._opened,
            e.Diffed: self._diffed,
            e.ChunkPut: self._chunk_put,
            e.Sealed: self._sealed,
            e.Aborted: lambda event, now: self._instant("aborted", now, event, reason=event.reason),
            e.AnchorPut: lambda event, now: self._slice("anchor", now - event.seconds, now, event, bytes=event.bytes),
            e.OpenSeen: lambda event, now: self._instant("open seen", now, event),
            e.SealSeen: self._seal_seen,
            e.ChunkFetched: self._chunk_fetched,
            e.Staged: self._staged,
            e.Prepared: self._prepared,
            e.Committed: self._committed,
        }

    def __call__(self, event: e.Event) -> None:
        handler = self._handlers.get(type(event))
        if handler:
            handler(event, runtime.now().timestamp())

    def _opened(self, event: e.Opened, now: float) -> None:
        if event.seconds:
            self._slice("open", now - event.seconds, now, event)
        self._instant("opened", now, event)
        self._mark("construct", event.version, now)

    def _diffed(self, event: e.Diffed, now: float) -> None:
        self._slice("construct", self._since("construct", event.version, now - event.seconds), now, event)
        self._mark("seal", event.version, now)

    def _chunk_put(self, event: e.ChunkPut, now: float) -> None:
        self._slice("upload", now - event.seconds, now, event, bytes=event.bytes, lane=True)
        self._mark("chunk", event.version, now)

    def _sealed(self, event: e.Sealed, now: float) -> None:
        last = self._since("chunk", event.version, 0.0)
        self._slice("seal", max(last, self._since("seal", event.version, now)), now, event)
        facts = {"bytes": event.bytes, "changed": event.changed, "elements": event.elements}
        self._instant("sealed", now, event, **facts)

    def _seal_seen(self, event: e.SealSeen, now: float) -> None:
        self._instant("seal seen", now, event)
        self._mark("stage", event.version, now)

    def _chunk_fetched(self, event: e.ChunkFetched, now: float) -> None:
        self._slice("download", now - event.seconds, now, event, bytes=event.bytes, sealed=event.sealed, lane=True)

    def _staged(self, event: e.Staged, now: float) -> None:
        self._slice("stage", self._since("stage", event.version, now), now, event, bytes=event.bytes)

    def _prepared(self, event: e.Prepared, now: float) -> None:
        self._slice("prepare", now - event.prepare_seconds, now, event, base=event.base, spent=event.spent or None)

    def _committed(self, event: e.Committed, now: float) -> None:
        """The pause ended about now; its parts lie one behind the other before that."""
        parts = {name: event.phases[name] for name in PAUSE if name in event.phases}
        at = now - (sum(parts.values()) if parts else event.pause_seconds)
        for name, seconds in (parts or {"apply": event.pause_seconds}).items():
            self._slice(name, at, at + seconds, event)
            at += seconds
        self._instant("committed", now, event, base=event.base, pause=event.pause_seconds)

    def _mark(self, what: str, version: int, at: float) -> None:
        self._began[what, version] = at
        if len(self._began) > _MAX_SEEN:
            del self._began[next(iter(self._began))]

    def _since(self, what: str, version: int, default: float) -> float:
        return self._began.pop((what, version), default)

    def _slice(self, name: str, begin: float, end: float, event: Any, *, lane: bool = False, **facts: Any) -> None:
        row = {"ts": round(begin * 1e6), "dur": max(0, round((end - begin) * 1e6))}
        self._write(name, "X", row, event, facts, lane=1 + self._lane(begin, end) if lane else 0)

    def _instant(self, name: str, at: float, event: Any, **facts: Any) -> None:
        self._write(name, "i", {"ts": round(at * 1e6), "s": "p"}, event, facts, lane=0)

    def _write(
        self, name: str, kind: str, row: dict[str, Any], event: Any, facts: dict[str, Any], *, lane: int
    ) -> None:
        known = {"version": event.version, "attempt": getattr(event, "attempt", None)}
        args = {key: value for key, value in (known | facts).items() if value is not None}
        self._file.write({"name": name, "cat": "dcr", "ph": kind, "tid": lane, **row, "args": args})

    def _lane(self, begin: float, end: float) -> int:
        """The first lane that is free from `begin` on: slices of one lane may not overlap."""
        for number, free in enumerate(self._lanes):
            if free <= begin:
                self._lanes[number] = end
                return number
        self._lanes.append(end)
        return len(self._lanes) - 1


def traced(emit: e.Emit, *, rank: int, world: int, stream: str) -> e.Emit:
    """`emit`, and with `DCR_TRACE=FILE` in the environment a recorder beside it.

    Rank 3 of many writes `trace.rank3.json` where the variable says `trace.json`.

    A trace that cannot be written any more ends, with an event, and hurts nobody.

    Raises:
        UsageError: the file cannot be opened for writing.
    """
    given = os.environ.get(VARIABLE)
    if not given:
        return emit
    path = Path(given)
    if world > 1:
        path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
    try:
        recorder: e.Emit | None = TraceRecorder(path, role="publisher", name=f"rank {rank}", stream=stream)
    except UsageError as error:
        raise UsageError(error.message, hint=f"check {VARIABLE}") from error

    def both(event: e.Event) -> None:
        nonlocal recorder
        emit(event)
        if recorder:
            try:
                recorder(event)
            except (OSError, ValueError) as error:
                recorder = None
                emit(e.Degraded(what=f"the trace {path} ends here: {error}"))

    return both
