"""The `dcr` command: one module per subcommand, which parses options and calls the package that does the work.

stdout carries results, stderr everything else. `main` is the console script; `app` is the one place where errors become
exit codes.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

DAEMONS = ("publish", "subscribe")


class Stopped(SystemExit):
    """SIGTERM ended the command. The exit code is 0 for a daemon, which is stopped this way, and 143 for any other."""

    def __init__(self) -> None:
        super().__init__(0 if any(name in sys.argv[1:] for name in DAEMONS) else 128 + signal.SIGTERM)


def main() -> None:
    """Console script. The SIGTERM handler is installed before the imports, which take seconds."""

    def stop(*_: Any) -> None:
        raise Stopped

    signal.signal(signal.SIGTERM, stop)
    if any(name in sys.argv[1:] for name in DAEMONS) and not sys.stderr.isatty():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the daemon runs, which then reloads (`cli.daemon`)
    try:
        from dcr_daemon.cli.app import run

        code = run(sys.argv[1:])
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the process is ending already
    sys.exit(code)


__all__ = ["Stopped", "main"]
