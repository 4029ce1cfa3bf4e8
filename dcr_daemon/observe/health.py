"""Readiness of a daemon, from its events.

Live means that the loop turns (the HTTP server and the watchdog run in it); the store's state never makes a daemon
dead, or one bucket outage would restart the fleet. Ready means: a publisher holds the claim; a subscriber has its
engine serving a version that the stream's policy allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from dcr_daemon import events as e

Role = Literal["publisher", "subscriber"]


class Health:
    """An `Emit`. `status` is one line for people."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._changed: Callable[[], None] = lambda: None
        self._head = 0
        self.ready = False
        self.status = "starting"

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever status or readiness changes, in the thread that emits."""
        self._changed = changed

    def __call__(self, event: e.Event) -> None:
        before = (self.ready, self.status)
        if self._role == "publisher":
            self._publisher(event)
        else:
            self._subscriber(event)
        if (self.ready, self.status) != before:
            self._changed()

    def _publisher(self, event: e.Event) -> None:
        match event:
            case e.Claimed():
                self.ready, self.status = True, f"claimed, epoch {event.epoch}"
            case e.FencedOut():
                self.ready, self.status = False, f"fenced by {event.by}"
            case e.Opened():
                self.status = f"building version {event.version}"
            case e.Sealed():
                self.status = f"sealed version {event.version}"
            case e.Aborted():
                self.status = f"aborted version {event.version}: {event.reason}"
            case e.Waiting():
                self.status = f"waiting: {event.what}"

    def _subscriber(self, event: e.Event) -> None:
        match event:
            case e.Serving():
                self.ready = True
                self._head = max(self._head, event.version)
                self.status = f"serving version {event.version}, lag {self._head - event.version}"
            case e.SealSeen():
                self._head = max(self._head, event.version)
            case e.FencedOut():
                self.ready, self.status = False, f"fenced by {event.by}"
            case e.EngineLost():
                self.ready, self.status = False, f"engine lost: {event.reason}"
            case e.Waiting() if not self.ready:
                self.status = f"waiting: {event.what}"
