"""Events of a `Publisher` as messages of Python's own logging, logger `dcr_daemon`, for a training script.

Every message has its event's level: what somebody has to know (tensors that cannot be published directly, refusals,
retries, alarms, aborted updates) is a warning or an error, which Python prints by default. A caller who wants the
events themselves passes `emit` to the publisher.
"""

from __future__ import annotations

import logging

from dcr_daemon.events import Aborted, Alarm, Event, FencedOut, Mapped, Notice, RepetitionFilter, Sealed, kind_of
from dcr_daemon.wording import LINE_BYTES, cut, json_line, printable

_logger = logging.getLogger("dcr_daemon")


class EventLog:
    """An `Emit` that logs each event at its own level, and a repeated `Notice` once."""

    def __init__(self) -> None:
        self._filter = RepetitionFilter()

    def __call__(self, event: Event) -> None:
        level = logging.getLevelNamesMapping()[event.severity.upper()]
        if not self._filter.repeats(event) and _logger.isEnabledFor(level):
            _logger.log(level, "%s", cut(_text(event), LINE_BYTES))


def _text(event: Event) -> str:
    match event:
        case Mapped():
            report = "\n".join(map(printable, event.report.split("\n")))
            return f"what {event.ranks} ranks publish:\n{report}"
        case Alarm():
            return printable(f"{event.what} (must {event.must})")
        case FencedOut():
            return printable(f"{event.what} was claimed by publisher {event.by}")
        case Aborted():
            return printable(f"version {event.version} was aborted: {event.reason}")
        case Sealed():
            return f"version {event.version}: {event.changed} elements changed, {event.bytes} bytes"
        case Notice():
            return printable(f"{kind_of(type(event))}: {event.what}")
    return json_line(event)
