"""systemd's notification socket: READY, STATUS, WATCHDOG and STOPPING in a few lines.

Everything is a no-op where `NOTIFY_SOCKET` is not set.
"""

from __future__ import annotations

import contextlib
import os
import socket

from dcr_daemon.wording import printable


def notify(*lines: str) -> bool:
    """Send `KEY=value` lines, each one assignment whatever the value holds; False if they were not sent.

    Never raises: a supervisor's fault ends no daemon.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out, contextlib.suppress(OSError):
        out.connect(address)
        out.sendall("\n".join(map(printable, lines)).encode())
        return True
    return False


def watchdog_interval() -> float | None:
    """Seconds between watchdog notifications: half of what systemd's `WatchdogSec` allows. None without a watchdog."""
    usec = os.environ.get("WATCHDOG_USEC", "")
    pid = os.environ.get("WATCHDOG_PID", str(os.getpid()))
    if not usec.isdigit() or int(usec) == 0 or pid != str(os.getpid()):
        return None
    return int(usec) / 2_000_000
