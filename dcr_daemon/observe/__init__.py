"""The listeners to events: logs, metrics, readiness with its HTTP probes, the event file, systemd notifications.

`cli.daemon` builds an `Observer` over them, and passes it as `emit` to the package that runs. Packages below import
nothing from here.
"""

from __future__ import annotations

from dcr_daemon.observe.fanout import Observer

__all__ = ["Observer"]
