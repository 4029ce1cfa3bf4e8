"""Keeps on disk what has arrived of an object, so that a later download continues there, also in another process.

It promises nothing about the bytes: whoever completes the object compares its digest, and clears the file if that is
wrong. Keeping them is a help and never a condition: a disk that does not take them is no error.
"""

from __future__ import annotations

from pathlib import Path

from dcr_daemon.runtime import Workers

SUFFIX = ".arrived"


def partial_path(path: Path) -> Path:
    """Where the bytes are kept that have arrived of what becomes the file `path`."""
    return path.with_name(f".{path.name}{SUFFIX}")


class PartialFile:
    """What has arrived of one object, in a file beside the one that it becomes. One download at a time uses it.

    Attributes:
        path: the file; its directory is made when it is needed.
        kept: bytes in it, once `load` has been called.
        grows: False: nothing is appended, as where the disk has no room; what is there is used.
    """

    def __init__(self, path: Path, *, workers: Workers) -> None:
        self.path = partial_path(path)
        self.kept = 0
        self.grows = True
        self._workers = workers
        self._broken = False

    async def exists(self) -> bool:
        """Whether anything is kept, perhaps by an earlier process."""
        return not self._broken and await self._workers.run(self.path.exists)

    async def load(self) -> bytes:
        """What is kept; empty if there is nothing, or it cannot be read."""
        found = b"" if self._broken else await self._workers.run_uncancellable(self._read)
        self.kept = len(found)
        return found

    async def append(self, data: bytes) -> None:
        """Keep bytes that follow those that are kept."""
        if self.grows and not self._broken:
            await self._workers.run_uncancellable(self._write, data)

    async def clear(self) -> None:
        """Delete what is kept. If the disk does not allow it, nothing is kept or loaded any more."""
        await self._workers.run_uncancellable(self._unlink)

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError:
            return b""

    def _write(self, data: bytes) -> None:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.path.open("r+b" if self.kept else "wb") as file:
                file.seek(self.kept)
                self.kept += file.write(data)
        except OSError:  # a part of the data may be there, which is no part of the object's beginning any more
            self._broken = True
            self._unlink()

    def _unlink(self) -> None:
        self.kept = 0
        try:
            self.path.unlink(missing_ok=True)
        except OSError:  # a disk that became read-only
            self._broken = True
