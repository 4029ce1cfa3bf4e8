"""A publisher's state directory: it keeps the publisher's name, and its lock lets one process use it at a time."""

from __future__ import annotations

import os
from pathlib import Path

from dcr_daemon import runtime
from dcr_daemon.disk import disk_error, disk_full, try_lock, write_atomically
from dcr_daemon.errors import UsageError


class StateDirectory:
    """The state of the publisher of one stream, locked while this process lives.

    Layout: `lock`, `name`, `mark.json` (high-water mark), `baseline.bin`, `baseline.json`, `published.json`,
    `chain.json` (the versions since the newest anchor), `spool/`.

    Raises:
        UsageError: another process holds it, or it cannot be made.
        ResourceExhausted: the disk is full, or its file system cannot lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if disk_full(error):
                raise disk_error(error, path) from error
            raise UsageError(
                f"state directory {path} cannot be used: {error.strerror}", hint="name one with --state"
            ) from error
        try:
            if not try_lock(self._lock, path / "lock"):
                raise UsageError(
                    f"another publisher process uses the state directory {path}",
                    hint="one process publishes to a stream; stop the other, or give this one its own --state",
                )
        except BaseException:
            self.close()
            raise

    @property
    def mark(self) -> Path:
        return self.path / "mark.json"

    @property
    def chain(self) -> Path:
        return self.path / "chain.json"

    @property
    def spool(self) -> Path:
        return self.path / "spool"

    @property
    def fetched(self) -> Path:
        return self.path / "fetched"

    def name(self, given: str | None) -> str:
        """The publisher's name: `given`, else the one kept here, else a new one; kept for the next start."""
        kept = self.path / "name"
        known = None if given else self._known(kept)
        name = given or known or f"publisher-{runtime.nonce(4)}"
        if name != known:
            try:
                write_atomically(kept, name.encode(), site="name")
            except OSError as error:
                raise disk_error(error, kept) from error
        return name

    def _known(self, kept: Path) -> str | None:
        try:
            name = kept.read_bytes().decode("ascii").strip()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{kept} cannot be read: {error}", hint="give --name with this publisher's name"
            ) from error
        return name or None

    def close(self) -> None:
        """Let the next process have it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
