"""What a training script hears of its publisher without asking: Python's own logging, logger `dcr_daemon`.

What somebody has to know (tensors that could not be projected, alarms, updates that came to nothing) is a warning or an
error, which Python prints unless told otherwise; progress is `info` and `debug`. Whoever wants facts gives `emit`.
"""

from __future__ import annotations

import logging

import msgspec

from dcr_daemon.events import Aborted, Alarm, Event, FencedOut, Mapped, Sealed, Waiting

_logger = logging.getLogger("dcr_daemon")


def log_event(event: Event) -> None:
    """An `Emit`."""
    match event:
        case Mapped():
            level = logging.WARNING if event.residual_bytes else logging.INFO
            _logger.log(level, "what %d ranks publish:\n%s", event.ranks, event.report)
        case Alarm():
            _logger.error("%s (must %s)", event.what, event.must)
        case FencedOut():
            _logger.error("%s was claimed by publisher %s", event.what, event.by)
        case Aborted():
            _logger.warning("version %d was given up: %s", event.version, event.reason)
        case Sealed():
            _logger.info("version %d: %d elements changed, %d bytes", event.version, event.changed, event.bytes)
        case Waiting():
            _logger.info("waiting for %s", event.what)
        case _:
            if _logger.isEnabledFor(logging.DEBUG):
                _logger.debug("%s", msgspec.json.encode(event).decode())
