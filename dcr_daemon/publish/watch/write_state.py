"""What the kernel tells about a file that somebody else writes: whether anybody has it open for writing, and whether
some of it was never written. Both only of a local file system: on a network file system the writer's kernel is another.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
from enum import Enum
from pathlib import Path

from dcr_daemon.checkpoint.safetensors import open_plain
from dcr_daemon.errors import Incompatible, NotFound

#: file systems all of whose writers are processes of this kernel; any other type counts as a network file system
LOCAL = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "jfs", "tmpfs", "ramfs", "zfs", "overlay"}
)
#: those of them that store every zero that is written: elsewhere (zfs with compression) a hole may be written zeros
STORES_ZEROS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs"})

_FIEMAP, _SYNC, _UNWRITTEN, _LAST = 0xC020660B, 1, 0x800, 1
_REQUEST = struct.Struct("=QQIIII")  #: start, length, flags, extents found, room for extents, reserved
_EXTENT = struct.Struct("=QQQQQIIII")  #: logical and physical offset, length, reserved (2), flags, reserved (3)
_EXTENTS = 256  #: asked for at a time


class Writers(Enum):
    """Whether anybody has a file open for writing, or mapped so."""

    NONE = "none"
    SOME = "some"
    UNKNOWN = "unknown"  #: another user's file (without CAP_LEASE), or a file system that cannot tell


class WriteState:
    """Asks about files on a file system of type `file_system`, as /proc/self/mountinfo names it."""

    def __init__(self, file_system: str) -> None:
        self.file_system = file_system

    @property
    def is_local(self) -> bool:
        return self.file_system in LOCAL

    def writers(self, path: Path) -> Writers:
        """Who has the file open for writing: the kernel grants a read lease only if nobody has."""
        if not self.is_local:
            return Writers.UNKNOWN
        try:
            descriptor = open_plain(path)
        except (NotFound, Incompatible):
            return Writers.UNKNOWN
        try:
            # Who opens the file for writing meanwhile breaks the lease, which is a signal to this process: one that is
            # ignored by default, and not SIGIO, which would end it.
            fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except BlockingIOError:
            return Writers.SOME
        except OSError:
            return Writers.UNKNOWN
        finally:
            os.close(descriptor)
        return Writers.NONE

    def first_unwritten(self, path: Path) -> int | None:
        """The first byte of a file that was never written; None if there is none, or nobody can tell."""
        if self.file_system not in STORES_ZEROS:
            return None
        try:
            descriptor = open_plain(path)
        except (NotFound, Incompatible):
            return None
        try:
            return _first_unwritten(descriptor)
        except OSError:
            return None
        finally:
            os.close(descriptor)


def file_system_of(path: Path) -> str:
    """Type of the file system that holds `path`, as `ext4` or `nfs4`; empty if it cannot be found out."""
    found, longest = "", -1
    with contextlib.suppress(OSError):
        place = os.path.realpath(path).rstrip("/") + "/"
        for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
            fields, _, source = line.partition(" - ")
            mount = _unescape(fields.split(" ")[4]).rstrip("/") + "/"
            if place.startswith(mount) and len(mount) >= longest:  # of several mounts on one point the last is seen
                found, longest = source.split(" ")[0], len(mount)
    return found


def _unescape(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def _first_unwritten(descriptor: int) -> int | None:
    size = os.fstat(descriptor).st_size
    hole = os.lseek(descriptor, 0, os.SEEK_HOLE) if size else 0
    if hole < size:
        return hole
    # Space that was reserved and then read lies in the page cache as zeros, and is no hole. Its extent still says so,
    # but so does that of data that did not reach the disk yet: only after a sync is it certain.
    if _first_reserved(descriptor, size, flags=0) is None:
        return None
    return _first_reserved(descriptor, size, flags=_SYNC)


def _first_reserved(descriptor: int, size: int, *, flags: int) -> int | None:
    """The first byte in an extent that was reserved and never written."""
    start = 0
    while start < size:
        request = bytearray(_REQUEST.size + _EXTENTS * _EXTENT.size)
        _REQUEST.pack_into(request, 0, start, size - start, flags, 0, _EXTENTS, 0)
        fcntl.ioctl(descriptor, _FIEMAP, request)
        count, state = _REQUEST.unpack_from(request)[3], 0
        for n in range(count):
            logical, _, length, _, _, state, *_ = _EXTENT.unpack_from(request, _REQUEST.size + n * _EXTENT.size)
            if state & _UNWRITTEN and logical < size:
                return int(logical)
            start = logical + length
        if not count or state & _LAST:
            return None
    return None
