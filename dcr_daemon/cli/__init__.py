"""The `dcr` command: one file per subcommand, options in, `run_*` calls out.

stdout carries results, stderr everything else. `main` is the console script; it is the one place where errors become
exit codes.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

DAEMONS = ("publish", "subscribe")


class Stopped(SystemExit):
    """SIGTERM came: 0 for a daemon, which is meant to be ended so; the shell's 143 for what was cut short."""

    def __init__(self) -> None:
        super().__init__(0 if any(name in sys.argv[1:] for name in DAEMONS) else 128 + signal.SIGTERM)


def main() -> None:
    """Console script. SIGTERM ends it in order from the first instant: a daemon's imports take seconds."""

    def stop(*_: Any) -> None:
        raise Stopped

    signal.signal(signal.SIGTERM, stop)
    try:
        from dcr_daemon.cli.app import run

        code = run(sys.argv[1:])
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is on its way out already
    sys.exit(code)


__all__ = ["Stopped", "main"]
