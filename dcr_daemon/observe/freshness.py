"""Notices that this process cannot see the end of the ledger any more, and says so.

What a daemon knows of the newest version is as old as its last look at the end of the ledger (`LedgerPolled`). If that
is `limit` seconds ago, one `LedgerUnread` says so, and `LedgerRead` tells the next look: metrics, readiness and logs
depend on these two events. A subscriber always looks. A publisher that compares or uploads does not look, which is no
fault; so for a publisher a request to the store must have failed since.
"""

from __future__ import annotations

from datetime import datetime

from dcr_daemon import events as e
from dcr_daemon import runtime
from dcr_daemon.observe.health import Role

LIMIT = 50.0  #: seconds; with `CHECK_EVERY` a reader that is cut off says so within a minute
CHECK_EVERY = 5.0
_ANSWERED = ("ok", "won", "lost", "missing")  #: outcomes of requests which a store has answered


def limit_for(longest_poll: float) -> float:
    """Seconds without a look after which a reader that polls at least every `longest_poll` seconds is cut off."""
    return max(LIMIT, 1.6 * longest_poll)  # a pause is up to a quarter longer than that, and the request takes time


class LedgerFreshness:
    """An `Emit` that emits `LedgerUnread` and `LedgerRead` itself, through `emit`."""

    def __init__(self, role: Role, emit: e.Emit, *, limit: float = LIMIT) -> None:
        self._role, self._emit, self._limit = role, emit, limit
        self._looked = runtime.monotonic()
        self._looked_at: datetime | None = None
        self._failing = False
        self._told = False

    def __call__(self, event: e.Event) -> None:
        match event:
            case e.LedgerPolled():
                self._looked, self._looked_at = runtime.monotonic(), runtime.now()
                if self._told:
                    self._told = False
                    self._emit(e.LedgerRead(head=event.head))
            case e.StoreRequest() if event.outcome != "cancelled":
                self._failing = event.outcome not in _ANSWERED

    def check(self) -> None:
        """Emit `LedgerUnread` if it is time."""
        seconds = runtime.monotonic() - self._looked
        if self._told or seconds < self._limit or (self._role == "publisher" and not self._failing):
            return
        self._told = True
        since = self._looked_at.isoformat(timespec="seconds") if self._looked_at else None
        self._emit(e.LedgerUnread(seconds=seconds, since=since))

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await runtime.sleep(CHECK_EVERY)
            self.check()
