"""Readiness of a daemon, from its events.

Live means that the event loop runs (the HTTP server and the watchdog run in it). The state of the store never makes a
daemon not live: one outage of the bucket would restart the fleet. A publisher is ready while it holds the claim. A
subscriber is ready while its engine generates and is verified at a version that the policy allows. An unreachable store
does not change that: the replica serves what it has, a restart could not make it newer, and otherwise all replicas
would become unready at once. Its lag is unknown then, and `status` says since when. A record of the ledger that does
not follow what was read before it (must L2) ends readiness: this process may have misread something, so what it calls
the newest version may be an old one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from dcr_daemon import events as e
from dcr_daemon import runtime

Role = Literal["publisher", "subscriber"]
#: With 0 the whole fleet would be unready between every seal and its commit. A replica that is more versions behind is
#: stuck and not slow, however fast the trainer is: several versions are fetched and applied as one.
WITHIN = 4


@dataclass(frozen=True, slots=True)
class Policy:
    """The versions with which a replica is ready: at most `within` behind the newest known, or behind a lower `pin`."""

    within: int = WITHIN
    pin: int | None = None

    def target(self, head: int) -> int:
        return head if self.pin is None else min(head, self.pin)


class Health:
    """An `Emit`. `status` is one line for people; it says why if not `ready`."""

    def __init__(self, role: Role, policy: Policy | None = None) -> None:
        self.role = role
        self._policy = policy or Policy()
        self._changed: Callable[[], None] = lambda: None
        self._head = 0
        self._read_at: str | None = None  #: when the end of the ledger was last seen
        self._served: int | None = None
        self._blocked: e.Blocked | None = None
        self._claimed = False
        self._doubt = ""
        self._unread = ""
        self._why = "starting"
        self.ready = False
        self.status = "starting"

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever status or readiness changes, in the thread that emits."""
        self._changed = changed

    def __call__(self, event: e.Event) -> None:
        before = (self.ready, self.status)
        match event:
            case e.LedgerDoubted():
                self._head = max(self._head, event.head)
                self._doubt = f"in doubt about record {event.seq}: {event.reason}"
            case e.LedgerPolled():
                self._head = max(self._head, event.head)
                self._read_at = runtime.now().isoformat(timespec="milliseconds")
            case e.LedgerUnread():
                self._unread = (
                    f"the ledger was not read since {event.since}" if event.since else "the ledger was not read"
                )
            case e.LedgerRead():
                self._doubt = self._unread = ""
        if self.role == "publisher":
            self._publisher(event)
        else:
            self._subscriber(event)
            self._update()
        if (self.ready, self.status) != before:
            self._changed()

    def _publisher(self, event: e.Event) -> None:
        match event:
            case e.Claimed():
                self._claimed, self.status = True, f"claimed, epoch {event.epoch}"
            case e.FencedOut():
                self._claimed, self.status = False, f"fenced by {event.by}"
            case e.LedgerDoubted():
                self.status = self._doubt
            case e.LedgerUnread():
                self.status = self._unread
            case e.LedgerRead():
                self.status = f"the ledger is read to its end, version {event.head}"
            case e.Opened():
                self.status = f"building version {event.version}"
            case e.Sealed():
                self.status = f"sealed version {event.version}"
            case e.Aborted():
                self.status = f"aborted version {event.version}: {event.reason}"
            case e.Notice():
                self.status = f"{e.kind_of(type(event))}: {event.what}"
        self.ready = self._claimed and not self._doubt

    def _subscriber(self, event: e.Event) -> None:
        match event:
            case e.LedgerRead():
                self._head = max(self._head, event.head)
            case e.SealSeen():
                self._head = max(self._head, event.version)
            case e.Serving():
                self._head = max(self._head, event.version)
                self._served = event.version
                if self._blocked and (self._blocked.version is None or self._blocked.version <= event.version):
                    self._blocked = None
            case e.Blocked():
                self._blocked = event
            case e.Notice() if self._served is None and not self._why.startswith(_LASTING):
                self._why = f"{e.kind_of(type(event))}: {event.what}"
            case _:
                if reason := _why_not(event):
                    self._served, self._why = None, reason

    def _update(self) -> None:
        """Compute `ready` and `status`."""
        blocked = ""
        if self._blocked is not None:
            version = "" if self._blocked.version is None else f" at version {self._blocked.version}"
            blocked = f"{'poisoned' if self._blocked.poisoned else 'blocked'}{version}: {self._blocked.reason}"
        if self._served is None:
            self.ready, self.status = False, "; ".join(filter(None, (self._why, self._doubt, self._unread, blocked)))
            return
        lag = self._policy.target(self._head) - self._served
        near = lag <= self._policy.within
        self.ready = near and not self._doubt
        allowed = "" if near else f" (ready within {self._policy.within})"
        serving = f"serving version {self._served}, lag {'unknown' if self._unread else max(lag, 0)}{allowed}"
        self.status = "; ".join(filter(None, (serving, self._doubt, self._unread, blocked)))

    def report(self) -> dict[str, Any]:
        """What /status says: the versions and the lag are None where they are not known."""
        known = self._served is not None and not self._unread
        return {
            "role": self.role,
            "ready": self.ready,
            "status": self.status,
            "head": self._head if self._read_at or self._head else None,
            "served": self._served,
            "lag": max(self._policy.target(self._head) - (self._served or 0), 0) if known else None,
            "ledger_read_at": self._read_at,
            "ledger_unread": bool(self._unread),
            "blocked": self._blocked.reason if self._blocked else None,
        }


_LASTING = (
    "fenced",
    "engine lost",
    "unsupported",
    "loading",
    "paused",
    "damaged",
)  #: reasons that a notice does not replace


def _why_not(event: e.Event) -> str:
    """Why a replica is not ready from this event on; empty if the event does not make it unready."""
    match event:
        case e.EngineLost():
            return f"engine lost: {event.reason}"
        case e.Unsupported():
            return f"unsupported engine: {event.reason}"
        case e.Loading():
            return f"loading all of version {event.version}"
        case e.Paused():
            return f"paused by another client at version {event.version}"
        case e.Damaged():
            return f"damaged: {event.what}"
        case e.FencedOut():
            return f"fenced by {event.by}"
    return ""
