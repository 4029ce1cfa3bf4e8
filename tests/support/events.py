"""Events that a test recorded."""

from __future__ import annotations

from typing import TypeVar

from dcr_daemon.events import Event

T = TypeVar("T")


class RecordedEvents(list[Event]):
    """An `Emit` that keeps every event it is called with."""

    def __call__(self, event: Event) -> None:
        self.append(event)

    def of(self, kind: type[T]) -> list[T]:
        """The events of one class, in order."""
        return [event for event in self if isinstance(event, kind)]
