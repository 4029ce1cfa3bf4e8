"""Writing a staged file whole or not at all, and the digest of a file in bounded memory."""

from __future__ import annotations

import hashlib
from pathlib import Path

from dcr_daemon.disk import disk_error, write_atomically

_BLOCK = 1 << 20


def write_staged(path: Path, body: bytes) -> None:
    """Write a file, which gets its name only when all of it is there. Its directory is made for this user only.

    Not durable: a staged file is verified by its digest whenever it is used.

    Raises:
        ResourceExhausted: the file system is full, or does not take it.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, body, site="staged", durable=False)
    except OSError as error:
        raise disk_error(error, path) from error


def file_digest(path: Path) -> str:
    """SHA-256 in hex; empty if there is no such file or it cannot be read: the caller fetches it again then."""
    seen = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                seen.update(block)
    except OSError:
        return ""
    return seen.hexdigest()
