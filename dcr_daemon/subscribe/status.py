"""The status object of a replica: one small object that it overwrites; nothing depends on it for safety (must L7).

It is written at every change, and every `refresh` seconds while nothing changes; it says that itself, so that a reader
knows from when on it is stale. A store that does not take it is no reason to stop. An incarnation nonce and a counter
tell writers apart: if another incarnation's counter moves after this process's first write, two processes use the same
replica id.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeGuard

import msgspec

from dcr_daemon import runtime
from dcr_daemon.errors import Corrupt, DcrError, KeyNotFound
from dcr_daemon.events import Alarm, Degraded, Emit
from dcr_daemon.ledger import names
from dcr_daemon.store.port import Store
from dcr_daemon.task_limiter import run_limited
from dcr_daemon.untrusted import decode_json

FORMAT = 1
LIMIT = 64 << 10  #: bytes
_AT_ONCE = 32  #: status objects read at a time
#: seconds between two writes of an older version, whose status objects do not say it, with its default options
OLD_REFRESH = 300.0
LAST_WRITE = 5.0  #: seconds for which a replica that ends waits for its last write


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's status object. `state` is a word or two, `detail` a sentence, `head` the newest in the bucket.

    `scrub` says how the last scrub ended, and `scrubbed_at` when. `refresh`: the object is written again at the latest
    so many seconds after `at`, unless the replica has ended; 0 if that is not known.
    """

    format: int = FORMAT
    id: str
    stream: str
    incarnation: str
    counter: int
    at: str
    state: str
    version: int | None = None
    step: int | None = None
    head: int | None = None
    engine: str = ""
    serving: bool = False
    detail: str = ""
    scrub: str = ""
    scrubbed_at: str = ""
    refresh: float = 0.0


_reports = msgspec.json.Decoder(ReplicaStatus)


def decode_status(body: bytes) -> ReplicaStatus | None:
    """The content of a status object; None if it cannot be parsed, which counts as absent (must L7)."""
    try:
        return decode_json(_reports, body)
    except ValueError:
        return None


#: States in which a replica has ended: it does not report any more.
ENDED = ("stopped", "failed", "fenced")


def stale_after(refresh: float) -> float:
    """Seconds after which a status object that is written every `refresh` seconds (0: not known) is out of date."""
    return 1.5 * (refresh or OLD_REFRESH) + 15.0


class StatusWriter:
    """Writes the status object in the background; `set` is cheap and never waits.

    Args:
        refresh: seconds between two writes while nothing changes.
    """

    def __init__(self, store: Store, replica: str, *, stream: str, emit: Emit, refresh: float) -> None:
        self._store, self._emit, self._refresh = store, emit, refresh
        self._key = names.replica(replica)
        self._incarnation = runtime.nonce()
        self._report = ReplicaStatus(
            id=replica,
            stream=stream,
            incarnation=self._incarnation,
            counter=0,
            at="",
            state="starting",
            refresh=refresh,
        )
        self._changed = asyncio.Event()
        self._foreign: tuple[str, int] | None = None
        self._silenced = self._closing = False

    def set(self, **fields: Any) -> None:
        """Change fields of the status; it is written soon if that changes anything."""
        fresh = msgspec.structs.replace(self._report, **fields)
        if fresh != self._report:
            self._report = fresh
            self._changed.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write while the body runs. Its end does not cut a write off: an older one could then land after a newer."""
        writer = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self._closing = True
            self._changed.set()
            done, _ = await asyncio.wait([writer], timeout=LAST_WRITE)
            if not done:
                writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _run(self) -> None:
        while not self._closing or self._changed.is_set():
            self._changed.clear()
            await self._write()
            if not self._closing:
                await runtime.wait_event(self._changed, self._refresh)

    async def _write(self) -> None:
        self._report = msgspec.structs.replace(
            self._report, counter=self._report.counter + 1, at=runtime.now().isoformat(timespec="milliseconds")
        )
        try:
            await self._look()
            runtime.failpoint("subscribe.status.put")
            await self._store.overwrite(self._key, msgspec.json.encode(self._report))
            runtime.failpoint("subscribe.status.told")
        except DcrError as error:
            if not self._silenced:
                self._emit(Degraded(what=f"status object {self._key} cannot be written: {error.message}"))
            self._silenced = True
        else:
            self._silenced = False

    async def _look(self) -> None:
        """Raise an alarm if another incarnation writes under this id: its counter has moved since it was first seen."""
        try:
            found = decode_status(await self._store.get(self._key, limit=LIMIT))
        except (KeyNotFound, Corrupt):
            return
        if found is None or found.incarnation == self._incarnation:
            return
        seen, self._foreign = self._foreign, (found.incarnation, found.counter)
        if self._report.counter > 1 and (seen is None or seen != self._foreign):
            what = f"another process reports as replica {self._report.id}: give each replica its own --replica"
            self._emit(Alarm(must="L7", what=what))


async def read_replicas(store: Store, *, head: int) -> list[dict[str, Any]]:
    """Status objects by replica id, with `age` (seconds), `lag` and `stale`; an unreadable one counts as absent."""
    decoder = msgspec.json.Decoder(dict[str, Any])

    async def read(key: str) -> dict[str, Any] | None:
        try:
            report = decode_json(decoder, await store.get(key, limit=LIMIT))
        except (KeyNotFound, Corrupt, ValueError):
            return None
        return report | {"id": key.removeprefix(names.REPLICAS).removesuffix(".json")}

    keys = [entry.key async for entry in store.list(names.REPLICAS)]
    reports = await run_limited((partial(read, key) for key in keys), _AT_ONCE)
    now = runtime.now()
    return sorted((judge(r, head=head, now=now) for r in reports if r), key=lambda report: str(report["id"]))


def judge(report: dict[str, Any], *, head: int, now: datetime) -> dict[str, Any]:
    """The report with what follows from it. `age` and `lag` are None if the report does not say enough.

    The age is by the clocks of two machines, and never below 0.
    """
    version, refresh, age = report.get("version"), report.get("refresh"), _age(report.get("at"), now)
    limit = stale_after(refresh if _is_number(refresh) else 0.0)
    stale = report.get("state") not in ENDED and (age is None or age > limit)
    return report | {
        "age": age,
        "lag": max(head - version, 0) if isinstance(version, int) else None,
        "stale": stale,
    }


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and 0 <= value < 1e9


def _age(at: Any, now: datetime) -> float | None:
    try:
        written = datetime.fromisoformat(at)
    except (TypeError, ValueError):
        return None
    written = written if written.tzinfo else written.replace(tzinfo=UTC)
    return round(max((now - written).total_seconds(), 0.0), 1)
