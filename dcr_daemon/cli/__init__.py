"""The `dcr` command: one file per subcommand, options in, `run_*` calls out.

stdout carries results, stderr everything else. `main` is the console script; it is the one place where errors become
exit codes.
"""

from __future__ import annotations

from dcr_daemon.cli.app import main

__all__ = ["main"]
