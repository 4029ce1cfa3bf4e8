"""Follows the ledger for a replica: prefetches the version that is open, wakes the driver at every new record.

The ledger has stored its high-water mark on disk before a record is seen here (must T1).
"""

from __future__ import annotations

import asyncio

from dcr_daemon import runtime
from dcr_daemon.errors import ResourceExhausted
from dcr_daemon.events import Emit, OpenSeen, Retrying, SealSeen
from dcr_daemon.ledger.follow import Follower, Polling
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.records import Abort, AnyRecord, Epoch, Open, OpenRef, Release, Seal
from dcr_daemon.subscribe.backoff import back_off
from dcr_daemon.subscribe.fetch.prefetch import Prefetch
from dcr_daemon.subscribe.fetch.stage import Stage


class LedgerFollower:
    """Follows the ledger in the background. To be made after the first `Ledger.read`, before anything reads on."""

    def __init__(self, ledger: Ledger, stage: Stage, *, polling: Polling, emit: Emit) -> None:
        self._ledger, self._stage, self._polling, self._emit = ledger, stage, polling, emit
        self._records: Follower = ledger.follow()
        self._changed = asyncio.Event()
        self._prefetch: Prefetch | None = None
        self._sealed: Prefetch | None = None  #: of the attempt that was sealed last: it comes to its end by itself
        self._skip = 0
        if opened := ledger.state.open:
            self._start_prefetch(opened)

    def skip_to(self, version: int) -> None:
        """Do not prefetch versions up to this one: the engine has passed them."""
        self._skip = max(self._skip, version)

    async def run(self) -> None:
        """Follow until cancelled. Raises what reading a ledger raises (`Corrupt`, `Incompatible`).

        While the state directory is full it retries: a record that cannot be remembered is not acted on (must T1).
        """
        tries = 0
        try:
            while True:
                try:
                    async for record in self._records:
                        await self._handle(record)
                        self._changed.set()
                        tries = 0
                except ResourceExhausted as error:
                    self._emit(Retrying(what=str(error)))
                    await runtime.sleep(back_off(self._polling.first, tries))
                    tries += 1
        finally:
            for prefetch in filter(None, (self._prefetch, self._sealed)):
                await prefetch.cancel()

    async def _handle(self, record: AnyRecord) -> None:
        match record:
            case Open():
                self._emit(OpenSeen(version=record.version, attempt=record.seq))
                for prefetch in filter(None, (self._prefetch, self._sealed)):
                    await prefetch.stop()
                self._prefetch = self._sealed = None
                self._start_prefetch(OpenRef(record.seq, record.version, record.base, record.group, record.call))
            case Seal():
                self._emit(SealSeen(version=record.version, seq=record.seq, step=record.step))
                self.finish_prefetch(record.attempt)
                self._sealed, self._prefetch = self._prefetch, None
            case Abort() | Epoch() | Release():
                if self._prefetch:
                    await self._prefetch.cancel()
                    self._stage.forget_attempt(self._prefetch.opened.seq)
                    self._prefetch = None

    def _start_prefetch(self, opened: OpenRef) -> None:
        # A reader that lags behind the ledger sees opens whose seals are there already.
        if opened.version > max(self._skip, self._ledger.state.seal.version):
            self._prefetch = Prefetch(
                self._ledger.store, self._stage, opened=opened, polling=self._polling, emit=self._emit
            )

    def finish_prefetch(self, attempt: int) -> None:
        """An attempt is sealed: its prefetch begins nothing more, and what is on its way is waited for by the stage."""
        if self._prefetch and self._prefetch.opened.seq == attempt:
            self._prefetch.finish()

    async def wait_change(self, seconds: float) -> bool:
        """Wait for the next record, `seconds` at most; returns whether there was one."""
        changed = await runtime.wait_event(self._changed, seconds)
        self._changed.clear()
        return changed
