"""Fetches the chunks of an open version while it is still being built.

LIST of the attempt's prefix is only a hint (must L6), and so is all that it leads to: a chunk is kept if its header
says that it belongs to the attempt, and verified again by the seal's parts. A full staging directory, a store that does
not answer or a foreign object only end or delay the prefetch, never the replica.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath

from dcr_daemon import runtime
from dcr_daemon.codec.chunk import CHUNK_LIMIT
from dcr_daemon.codec.decode import read_id
from dcr_daemon.errors import Corrupt, KeyNotFound, ResourceExhausted, StoreUnavailable
from dcr_daemon.events import ChunkFetched, Degraded, Emit, Retrying
from dcr_daemon.ledger import names
from dcr_daemon.ledger.follow import Polling, jittered
from dcr_daemon.ledger.records import OpenRef
from dcr_daemon.store.partial import PartialFile
from dcr_daemon.store.port import Entry, Store
from dcr_daemon.subscribe.fetch.stage import CONCURRENCY, Stage
from dcr_daemon.task_limiter import run_limited

STOP_SECONDS = 5.0  #: a request that takes longer is continued by whoever stages the version

#: of the pause between two LISTs, so that about a tenth of an upload is left to fetch after the seal. A LIST costs as
#: much as a dozen GETs: it is repeated less often than the GET of the next record.
GROWTH = 0.1


class Prefetch:
    """Fetches one attempt in the background, from when it is made."""

    def __init__(self, store: Store, stage: Stage, *, opened: OpenRef, polling: Polling, emit: Emit) -> None:
        self.opened = opened
        self._store, self._stage, self._emit = store, stage, emit
        self._polling = replace(polling, growth=GROWTH)
        self._prefix = names.attempt(opened.version, opened.seq)
        self._place = stage.attempt_path(opened.version, opened.seq)
        self._refused: set[str] = set()
        self._stopped = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End it; the requests under way have some seconds to come to their end. What has arrived is kept."""
        self._stopped.set()
        await runtime.run_until_first(asyncio.wait([self._task]), runtime.sleep(STOP_SECONDS))
        await self.cancel()

    async def cancel(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        began = runtime.monotonic()
        while not self._stopped.is_set():
            try:
                await self._look()
            except ResourceExhausted as error:
                self._emit(Degraded(what=f"prefetch of version {self.opened.version} ends early: {error.message}"))
                return
            except StoreUnavailable as error:
                self._emit(Retrying(what=f"prefetch of version {self.opened.version}: {error.message}"))
            pause = self._polling.pause(runtime.monotonic() - began)
            await runtime.wait_event(self._stopped, jittered(pause))

    async def _look(self) -> None:
        """Fetch the chunks that LIST names and that are not staged yet."""
        fresh = [entry async for entry in self._store.list(self._prefix) if self._wanted(entry)]
        works = (partial(self._fetch, entry) for entry in fresh if not self._stopped.is_set())
        await run_limited(works, CONCURRENCY, settles=True)

    def _wanted(self, entry: Entry) -> bool:
        name = PurePosixPath(entry.key).name
        return (
            entry.key == self._prefix + name
            and name.endswith(".dcr")
            and not name.startswith(".")
            and entry.size <= CHUNK_LIMIT
            and entry.key not in self._refused
            and not self._stage.has(self._place / name)
        )

    async def _fetch(self, entry: Entry) -> None:
        began, path = runtime.monotonic(), self._place / PurePosixPath(entry.key).name
        try:
            async with self._stage.fetching(path, entry.size) as keep:
                body = await self._store.get(entry.key, limit=entry.size, keep=keep)
                await self._check(body, keep)
                runtime.failpoint("subscribe.prefetch.fetched")
                await self._stage.write_chunk(path, body, keep)
        except KeyNotFound:
            return
        except Corrupt:
            self._refused.add(entry.key)
            return
        runtime.failpoint("subscribe.prefetch.kept")
        self._emit(
            ChunkFetched(
                version=self.opened.version,
                attempt=self.opened.seq,
                key=entry.key,
                bytes=len(body),
                sealed=False,
                seconds=runtime.monotonic() - began,
            )
        )

    async def _check(self, body: bytes, keep: PartialFile) -> None:
        """Raise `Corrupt` for a chunk that does not say that it is of this attempt."""
        try:
            found = read_id(body)
            opened = self.opened
            of = (self._stage.stream.stream, opened.seq, opened.base, opened.version, opened.group)
            if (found.stream, found.attempt, found.base, found.version, found.group) != of:
                raise Corrupt(f"a chunk of {found} is not of the attempt {opened.seq}")
        except Corrupt:
            await keep.clear()
            raise
