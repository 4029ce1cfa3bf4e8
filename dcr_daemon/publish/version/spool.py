"""Chunks of the undecided attempt, with what is needed to undo them, until the fate is known (musts P3, P7).

In memory up to a budget, then in files of the state directory. An entry that was admitted can be read until
`clear`, whatever became of its upload. A full disk raises `ResourceExhausted`; the entry in question is then kept in
memory, because the attempt is over, but its undo is not.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from dcr_daemon import runtime
from dcr_daemon.codec.encode import EncodedChunk
from dcr_daemon.disk import disk_error
from dcr_daemon.errors import ResourceExhausted
from dcr_daemon.runtime import Workers


class Spool:
    """Used from one event loop; file work goes to the workers.

    Args:
        directory: made empty: what lies there belongs to a process that is gone.
        memory: bytes of chunks and old bits kept in memory.
    """

    def __init__(self, directory: Path, memory: int, *, workers: Workers) -> None:
        self._directory, self._memory, self._workers = directory, memory, workers
        shutil.rmtree(directory, ignore_errors=True)
        try:
            directory.mkdir(parents=True)
        except OSError as error:
            raise disk_error(error, directory) from error
        self._held: dict[int, tuple[bytes, bytes]] = {}
        self._numbers: list[int] = []
        self._bytes = 0

    @property
    def numbers(self) -> list[int]:
        """Chunk numbers admitted, in order of admission."""
        return list(self._numbers)

    async def put(self, chunk: EncodedChunk) -> None:
        """Admit a finished chunk. Raises `ResourceExhausted` if the memory is used up and the disk is full."""
        n, size = chunk.id.n, len(chunk.data) + len(chunk.undo)
        self._numbers.append(n)
        if self._bytes + size > self._memory:
            try:
                return await self._workers.run(self._write, n, chunk)
            except ResourceExhausted:
                self._hold(n, chunk)
                raise
        return self._hold(n, chunk)

    def _hold(self, n: int, chunk: EncodedChunk) -> None:
        self._held[n] = (chunk.data, chunk.undo)
        self._bytes += len(chunk.data) + len(chunk.undo)

    def _write(self, n: int, chunk: EncodedChunk) -> None:
        for path, body in ((self._path(n, "dcr"), chunk.data), (self._path(n, "old"), chunk.undo)):
            try:
                runtime.failpoint("disk.spool.write")
                path.write_bytes(body)
            except OSError as error:
                path.unlink(missing_ok=True)
                raise disk_error(error, path) from error

    async def data(self, n: int) -> bytes:
        """The chunk object. Raises `ResourceExhausted` if the disk does not give it back."""
        held = self._held.get(n)
        return held[0] if held else await self._workers.run(self._read, self._path(n, "dcr"))

    async def undo(self, n: int) -> bytes:
        """Old bits of its overwritten elements. Raises `ResourceExhausted` likewise."""
        held = self._held.get(n)
        return held[1] if held else await self._workers.run(self._read, self._path(n, "old"))

    def _read(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise disk_error(error, path) from error

    def clear(self) -> None:
        """The fate is known and acted on."""
        for n in self._numbers:
            if n not in self._held:
                self._path(n, "dcr").unlink(missing_ok=True)
                self._path(n, "old").unlink(missing_ok=True)
        self._held.clear()
        self._numbers.clear()
        self._bytes = 0

    def _path(self, n: int, suffix: str) -> Path:
        return self._directory / f"{n}.{suffix}"
