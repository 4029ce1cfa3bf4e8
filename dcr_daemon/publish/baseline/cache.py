"""The baseline's memory, and its file in the state directory, from which a restarted publisher begins.

The file holds the bytes of one version, which may be behind the memory's; the chain leads from it to the newest one. It
is mapped privately: what changes in memory stays there, so a version costs no write to the disk. `write` copies the
memory into the file, a span at a time, between updates.

The file is not trusted: at start it is used only if its fingerprint is that of a sealed version (must P3). The hint
beside it names the version. It is removed before the first byte of a copy is written, and written after the last.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from pathlib import Path

import msgspec

from dcr_daemon import runtime
from dcr_daemon.disk import disk_error, reserve, write_atomically
from dcr_daemon.untrusted import decode_json

SPAN = 4 << 20  #: bytes that are copied at a time: an update that begins waits for no more


class Hint(msgspec.Struct, frozen=True, kw_only=True):
    """The version that the file was last known to be."""

    stream: str
    layout: str
    share: str  #: digest of the blocks
    version: int
    vector: str


_hints = msgspec.json.Decoder(Hint)


class BaselineCache:
    """`baseline.bin` and `baseline.json` in the directory of the state.

    Args:
        size: bytes of the baseline.

    Attributes:
        new: the file is new, so it has nothing to be verified.
        memory: of `size` bytes; at first those of the file.

    Raises:
        ResourceExhausted: the disk cannot hold a dense copy of the model.
    """

    def __init__(self, directory: Path, size: int) -> None:
        self.size = max(size, mmap.PAGESIZE)
        self._path, self._hint = directory / "baseline.bin", directory / "baseline.json"
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise disk_error(error, self._path) from error
        try:
            self.new, self.memory = self._map()
        except OSError as error:
            os.close(self._file)
            raise disk_error(error, self._path) from error

    def _map(self) -> tuple[bool, mmap.mmap]:
        """The disk space of the file is reserved: a full disk must show here, not when it is written."""
        runtime.failpoint("disk.baseline.write")
        new = os.fstat(self._file).st_size != self.size
        if new:
            self.forget()
            os.ftruncate(self._file, 0)
        reserve(self._file, self.size)
        if new:
            memory = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            _advise(memory, mmap.MADV_HUGEPAGE)
        else:
            memory = mmap.mmap(self._file, self.size, access=mmap.ACCESS_COPY)
        # A forked process (a trainer's data loader) has no use for it: each page that changes would be copied.
        _advise(memory, mmap.MADV_DONTFORK)
        _not_forked.add(memory)
        return new, memory

    def hint(self) -> Hint | None:
        """What the file holds, to be verified; None if that is not known."""
        try:
            return decode_json(_hints, self._hint.read_bytes())
        except (OSError, ValueError):
            return None

    def forget(self) -> None:
        """The file is not to be begun from."""
        self._hint.unlink(missing_ok=True)

    def write(self, start: int) -> int:
        """Copy the span of the memory that begins at byte `start`; where the next one begins, at most `size`. Blocking.

        Raises:
            OSError: it could not be written.
        """
        end = min(start + SPAN, self.size)
        with memoryview(self.memory) as whole:
            while start < end:
                start += os.pwrite(self._file, whole[start:end], start)
        return end

    def keep(self, hint: Hint) -> None:
        """All spans were written: the file holds what `hint` says."""
        with contextlib.suppress(OSError):  # without the hint the next start rebuilds: slower, never wrong
            write_atomically(self._hint, msgspec.json.encode(hint), site="hint", durable=False)

    def close(self) -> None:
        """Unmap. The kernel writes the file's pages; after a crash of the host the fingerprint shows whether it did."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        with contextlib.suppress(BufferError):  # a view is still alive; the map goes with it
            self.memory.close()


_not_forked: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def _keep_forever() -> None:
    """In a fork. The addresses are free there, and soon those of other memory: an object that goes would unmap that."""
    for memory in _not_forked:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


os.register_at_fork(after_in_child=_keep_forever)


def _advise(memory: mmap.mmap, advice: int) -> None:
    with contextlib.suppress(OSError):  # a kernel without it
        memory.madvise(advice)
