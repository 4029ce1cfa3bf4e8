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
from dcr_daemon.task_limiter import TaskLimiter

STOP_SECONDS = 5.0  #: a request that takes longer is continued by whoever stages the version

#: of the pause between two LISTs: of a long upload about a tenth is left to fetch after the seal, and no LIST of a
#: short one comes late. A LIST costs as much as a dozen GETs, so it is repeated less often than the GET of a record.
GROWTH = 0.2


class Prefetch:
    """Fetches one attempt in the background, from when it is made: LIST after LIST, and meanwhile what they name."""

    def __init__(self, store: Store, stage: Stage, *, opened: OpenRef, polling: Polling, emit: Emit) -> None:
        self.opened = opened
        self._store, self._stage, self._emit = store, stage, emit
        self._polling = replace(polling, first=polling.fast, growth=GROWTH)
        self._patience = polling.first  #: seconds after which a LIST that failed is repeated
        self._prefix = names.attempt(opened.version, opened.seq)
        self._place = stage.attempt_path(opened.version, opened.seq)
        self._begun: set[str] = set()  #: keys that are being fetched, or were, or are no chunks of this attempt
        self._full = False
        self._stopped = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def finish(self) -> None:
        """Begin nothing more; the requests under way have some seconds to come to their end."""
        self._stopped.set()

    async def stop(self) -> None:
        """`finish`, and wait for those requests. What has arrived is kept."""
        self.finish()
        await asyncio.gather(self._task, return_exceptions=True)

    async def cancel(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        # More would stand in line at `Stage.downloads`, before the chunks of a sealed version.
        fetches = TaskLimiter(CONCURRENCY)
        try:
            await runtime.run_until_first(self._look(fetches), self._stopped.wait())
            await self._stopped.wait()
            await runtime.run_until_first(fetches.settle(), runtime.sleep(STOP_SECONDS))
        finally:
            await fetches.cancel()

    async def _look(self, fetches: TaskLimiter) -> None:
        """LIST again and again, and start to fetch what is new, until there is no more room."""
        began = runtime.monotonic()
        while not self._full:
            pause = self._polling.pause(runtime.monotonic() - began)
            try:
                async for entry in self._store.list(self._prefix):
                    if self._wanted(entry):
                        self._begun.add(entry.key)
                        await fetches.start(partial(self._fetch, entry))
            except StoreUnavailable as error:
                self._retry(error)
                pause = max(pause, self._patience)
            await runtime.sleep(jittered(pause))

    def _retry(self, error: StoreUnavailable) -> None:
        self._emit(Retrying(what=f"prefetch of version {self.opened.version}: {error.message}"))

    def _wanted(self, entry: Entry) -> bool:
        name = PurePosixPath(entry.key).name
        return (
            entry.key == self._prefix + name
            and name.endswith(".dcr")
            and not name.startswith(".")
            and entry.size <= CHUNK_LIMIT
            and entry.key not in self._begun
            and not self._stage.has(self._place / name)
        )

    async def _fetch(self, entry: Entry) -> None:
        async with self._stage.downloads:
            if self._stopped.is_set() or self._full:
                return
            try:
                await self._keep(entry)
            except ResourceExhausted as error:
                self._full = True
                self._emit(Degraded(what=f"prefetch of version {self.opened.version} ends early: {error.message}"))
            except StoreUnavailable as error:
                self._retry(error)
                self._begun.discard(entry.key)
            except KeyNotFound:
                self._begun.discard(entry.key)
            except Corrupt:
                pass  # not a chunk of this attempt, or damaged: it stays as good as fetched

    async def _keep(self, entry: Entry) -> None:
        began, path = runtime.monotonic(), self._place / PurePosixPath(entry.key).name
        async with self._stage.fetching(path, entry.size) as keep:
            body = await self._store.get(entry.key, limit=entry.size, keep=keep)
            await self._check(body, keep)
            runtime.failpoint("subscribe.prefetch.fetched")
            await self._stage.write_prefetched(path, body, keep)
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
