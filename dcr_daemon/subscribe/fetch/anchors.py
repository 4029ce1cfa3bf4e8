"""Downloads anchors for an engine: verified files in the state directory, deleted once they are loaded.

They are not in the staging directory, because a whole model does not belong in tmpfs. An interrupted download continues
with the files that are there, whole or in part.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path, PurePosixPath

from dcr_daemon import runtime
from dcr_daemon.disk import disk_error
from dcr_daemon.errors import Corrupt, ResourceExhausted
from dcr_daemon.ledger.objects import Objects
from dcr_daemon.ledger.records import Anchor, ObjectRef
from dcr_daemon.runtime import Workers
from dcr_daemon.store.partial import PartialFile
from dcr_daemon.subscribe.fetch.files import file_digest, write_staged
from dcr_daemon.subscribe.fetch.stage import CONCURRENCY
from dcr_daemon.task_limiter import TaskLimiter

BUDGET_BYTES = 1 << 30  #: bytes of the files that are in memory together; a single file may have more


class AnchorFiles:
    """Fetches anchors into directories below `path`."""

    def __init__(self, path: Path, objects: Objects, *, workers: Workers) -> None:
        self.path = path
        self._objects = objects
        self._workers = workers

    async def fetch(self, anchor: Anchor) -> list[str]:
        """The safetensors files of an anchor, local and verified; its side files lie beside them.

        Raises:
            Corrupt: a file has other bytes than the index says, twice, or a name that is no plain file name.
            ResourceExhausted: there is no room for it on disk.
            ObjectPending, BelowFloor, StoreUnavailable: it cannot be fetched (now, or any more).
        """
        index = await self._objects.read_anchor_index(anchor)
        place = self.path / f"anchor-{anchor.version}-{anchor.seq}"
        self._forget(keep=place)  # files of another anchor, which may be below the floor, only take room
        wanted = {place / _file_name(ref): ref for ref in [*index.files, *index.extras]}
        if len(wanted) != len(index.files) + len(index.extras):
            raise Corrupt(f"the index of anchor {anchor.version} names a file twice")
        self._check_room(place, wanted)
        async with TaskLimiter(CONCURRENCY, BUDGET_BYTES, settles=True) as group:
            for path, ref in wanted.items():
                await group.start(partial(self._fetch_file, path, ref, anchor.version), ref.size)
        return [str(place / _file_name(ref)) for ref in index.files]

    async def _fetch_file(self, path: Path, ref: ObjectRef, version: int) -> None:
        if await self._workers.run(file_digest, path) == ref.sha256:
            return
        keep = PartialFile(path, workers=self._workers)
        body = await self._objects.read_file(ref, version, keep=keep)
        await keep.clear()
        await self._workers.run(write_staged, path, body)
        runtime.failpoint("subscribe.anchor.file")

    def _check_room(self, place: Path, wanted: dict[Path, ObjectRef]) -> None:
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(error, place) from error
        needed = sum(ref.size for path, ref in wanted.items() if not path.exists())
        free = shutil.disk_usage(place).free
        if needed > free:
            raise ResourceExhausted(
                f"an anchor of {needed} bytes does not fit into the {free} bytes free at {place}",
                hint="free space there, or name a directory elsewhere",
            )

    def forget(self) -> None:
        """Delete all downloaded anchors."""
        self._forget(keep=None)

    def _forget(self, *, keep: Path | None) -> None:
        for place in self.path.glob("anchor-*"):
            if place != keep:
                shutil.rmtree(place, ignore_errors=True)


def _file_name(ref: ObjectRef) -> str:
    name = PurePosixPath(ref.key).name
    if not name or name.startswith("."):
        raise Corrupt(f"{ref.key} is no name for a file of an anchor")
    return name
