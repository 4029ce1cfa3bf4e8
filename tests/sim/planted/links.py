"""Bugs of whoever moves bytes over a link that stalls (F1, L4)."""

from __future__ import annotations

from typing import Any

from sim.planted.bug import Put, bug

from dcr_daemon.store.port import Outcome
from dcr_daemon.store.s3.download import Download
from dcr_daemon.store.s3.store import S3Store


@bug("L6 (elsewhere: a large object over a slow link began anew for ever)", "stalled_streams")
def stalled_download_begins_anew(put: Put) -> None:
    """Each try at an object begins at its first byte, whatever has arrived before."""
    right = Download.run

    async def run(self: Download, attempt: Any) -> bytes:
        await self._restart()
        return await right(self, attempt)

    put(Download, "run", run)


@bug("L4", "stalled_streams")
def stalled_upload_is_believed(put: Put) -> None:
    """An upload whose body has stalled counts as done."""
    right = S3Store.create

    async def create(self: S3Store, key: str, body: Any) -> Outcome:
        outcome = await right(self, key, body)
        return Outcome.WON if outcome is Outcome.UNKNOWN else outcome

    put(S3Store, "create", create)
