"""What listens to events: logs, metrics, health, the event file. The core knows none of it.

`Observer` is the one `Emit` that a daemon or command hands to the core.
"""

from __future__ import annotations

from dcr_daemon.observe.fanout import Observer

__all__ = ["Observer"]
