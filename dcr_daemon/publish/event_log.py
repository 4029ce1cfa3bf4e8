"""Events of a `Publisher` as messages of Python's own logging, logger `dcr_daemon`, for a training script.

Every message has its event's level: what somebody has to know (tensors that cannot be published directly, refusals,
retries, alarms, aborted updates) is a warning or an error, which Python prints by default. A caller who wants the
events themselves passes `emit` to the publisher.
"""

from __future__ import annotations

import logging

import msgspec

from dcr_daemon.events import Aborted, Alarm, Event, FencedOut, Mapped, Notice, RepetitionFilter, Sealed, kind_of

_logger = logging.getLogger("dcr_daemon")


class EventLog:
    """An `Emit` that logs each event at its own level, and a repeated `Notice` once."""

    def __init__(self) -> None:
        self._filter = RepetitionFilter()

    def __call__(self, event: Event) -> None:
        level = logging.getLevelNamesMapping()[event.severity.upper()]
        if not self._filter.repeats(event) and _logger.isEnabledFor(level):
            _logger.log(level, "%s", _text(event))


def _text(event: Event) -> str:
    match event:
        case Mapped():
            return f"what {event.ranks} ranks publish:\n{event.report}"
        case Alarm():
            return f"{event.what} (must {event.must})"
        case FencedOut():
            return f"{event.what} was claimed by publisher {event.by}"
        case Aborted():
            return f"version {event.version} was aborted: {event.reason}"
        case Sealed():
            return f"version {event.version}: {event.changed} elements changed, {event.bytes} bytes"
        case Notice():
            return f"{kind_of(type(event))}: {event.what}"
    return msgspec.json.encode(event).decode()
