"""Objects that a rebuild has fetched, whole or in part, on disk until it is proved.

A publisher that is restarted in the middle of a rebuild over a slow link does not fetch them again. Only what arrives
slowly is written here (`s3.download.KEEP_SECONDS`): over a fast link a second fetch costs less than a second copy of
the model on this disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from dcr_daemon.ledger.records import ChunkRef, ObjectRef
from dcr_daemon.runtime import Workers
from dcr_daemon.store.partial import PartialFile

RESERVE_BYTES = 1 << 30  #: of the disk that are left to others


class FetchedObjects:
    """The objects below `path`, each under its digest. Nothing is verified here: `Objects` does that at each read."""

    def __init__(self, path: Path, *, workers: Workers) -> None:
        self._path, self._workers = path, workers
        self._coming: dict[PartialFile, int] = {}  #: sizes of the objects that are being fetched, and have room

    async def read(self, ref: ObjectRef | ChunkRef, fetch: Callable[[PartialFile], Awaitable[bytes]]) -> bytes:
        """What `fetch` returns. What it has kept of the object stays until `forget`.

        Whether the disk has room for all of it is decided here, before the first byte comes: what was begun is kept to
        its end, and of what has no room only the bytes that an earlier process kept are used.
        """
        keep = PartialFile(self._path / ref.sha256, workers=self._workers)
        free = await self._workers.run(self._free)
        coming = sum(size - one.kept for one, size in self._coming.items())
        if free - coming - ref.size > RESERVE_BYTES:
            self._coming[keep] = ref.size
        else:
            keep.grows = False
        try:
            body = await fetch(keep)
            if 0 < keep.kept < len(body):
                await keep.append(body[keep.kept :])
        finally:
            self._coming.pop(keep, None)
        return body

    async def forget(self) -> None:
        """Delete all of them: the baseline has what they hold."""
        await self._workers.run(partial(shutil.rmtree, self._path, ignore_errors=True))

    def _free(self) -> int:
        return shutil.disk_usage(self._path.parent).free
