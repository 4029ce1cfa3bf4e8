"""The redo journal of a checkpoint directory: a change in full, under one digest (must E8).

A journal is written once, made durable, and then only read. It holds absolute new values, so that redoing it any number
of times, or after any part of it was written, gives the same bytes; and the old values, for a rollback. A journal that
is torn or altered is recognised by its digest, and counts as absent.

    "DCRJRNL1", u64 length, JSON head, entries, SHA-256 of everything before it
    entry: u64 tensor, u64 k, u64 bytes per position (4 or 8), k positions, k new values, k old values
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec
import numpy as np

from dcr_daemon import runtime
from dcr_daemon.canonical.dtypes import bits_dtype
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.disk import disk_error, sync_file
from dcr_daemon.engine.directory.compose import AbsoluteChanges
from dcr_daemon.errors import Corrupt
from dcr_daemon.untrusted import decode_json

MAGIC = b"DCRJRNL1"
_HEAD_LIMIT = 16 << 20
_ENTRY = np.dtype([("tensor", "<u8"), ("changed", "<u8"), ("position", "<u8")])
_SUM = 32


class Head(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What both kinds have: the transaction, and the fields of the marker to write when the change is complete."""

    txn: str
    stream: str
    layout: str
    version: int
    label: str
    vector: str  #: SHA-256 of the vector that the directory will have


class Patch(Head, frozen=True, kw_only=True, tag="patch"):
    """A change of some elements."""

    base: int


class Install(Head, frozen=True, kw_only=True, tag="install"):
    """A whole checkpoint, complete in `.dcr/incoming`, replaces the present one: `files` are moved, `stale` removed."""

    files: list[str]
    stale: list[str]


_decoder = msgspec.json.Decoder(Patch | Install)


class _Hash(Protocol):
    def update(self, data: Any, /) -> None: ...


def write_journal(path: Path, head: Patch | Install, *, entries: Iterable[AbsoluteChanges] = ()) -> int:
    """Write a journal and make it durable; returns how many elements it changes.

    Raises:
        ResourceExhausted: the disk is full; nothing is left behind.
    """
    changed = 0
    try:
        runtime.failpoint("disk.journal.write")
        with path.open("wb") as file:
            body, seen = msgspec.json.encode(head), hashlib.sha256()
            _put(file, seen, MAGIC + len(body).to_bytes(8, "little") + body)
            for entry in entries:
                changed += entry.positions.size
                _put_entry(file, seen, entry)
            file.write(seen.digest())
            file.flush()
            sync_file(file.fileno(), path, site="journal")
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise disk_error(error, path) from error
    return changed


def _put(file: BinaryIO, seen: _Hash, data: bytes | memoryview) -> None:
    seen.update(data)
    file.write(data)


def _put_entry(file: BinaryIO, seen: _Hash, entry: AbsoluteChanges) -> None:
    k = entry.positions.size
    if not k:
        return
    narrow = int(entry.positions[-1]) < 1 << 32
    positions = entry.positions.astype("<u4" if narrow else "<i8")
    _put(file, seen, np.array([(entry.tensor, k, positions.itemsize)], dtype=_ENTRY).tobytes())
    for column in (positions, entry.new, entry.old):
        _put(file, seen, np.ascontiguousarray(column).data)


class Journal:
    """A journal whose digest is good. Close it when done; arrays from `entries` are copies.

    The digest shows that the file is complete, not that its content is valid: every entry is checked before it is used.
    """

    def __init__(self, head: Patch | Install, data: mmap.mmap, *, first: int) -> None:
        self.head = head
        self._data = data
        self._first = first

    def entries(self, layout: Layout) -> Iterator[AbsoluteChanges]:
        """The changes, tensor by tensor; memory is that of one tensor's changes.

        Raises:
            Corrupt: an entry does not fit the layout, or the journal.
        """
        at, end = self._first, len(self._data) - _SUM
        while at < end:
            if end - at < _ENTRY.itemsize:
                raise _corrupt("an entry is cut off")
            row = np.frombuffer(self._data[at : at + _ENTRY.itemsize], dtype=_ENTRY)[0]
            tensor, k, width = int(row["tensor"]), int(row["changed"]), int(row["position"])
            at += _ENTRY.itemsize
            if tensor >= len(layout) or width not in (4, 8):
                raise _corrupt(f"it names tensor {tensor} of {len(layout)}, positions of {width} bytes")
            bits = np.dtype(bits_dtype(layout[tensor].width))
            if not 1 <= k <= (end - at) // (width + 2 * bits.itemsize):
                raise _corrupt(f"it does not hold the {k} changes of {layout[tensor].name}")
            columns = []
            for dtype in (np.dtype("<u4" if width == 4 else "<i8"), bits, bits):
                columns.append(np.frombuffer(self._data[at : at + k * dtype.itemsize], dtype=dtype))
                at += k * dtype.itemsize
            where = columns[0].astype(np.int64)
            if where[0] < 0 or where[-1] >= layout[tensor].elements or not bool((where[1:] > where[:-1]).all()):
                raise _corrupt(f"positions in {layout[tensor].name} are out of order or outside")
            yield AbsoluteChanges(tensor, where, columns[1], columns[2])

    def close(self) -> None:
        self._data.close()


def read_journal(path: Path) -> Journal | None:
    """The journal at `path`; None if there is none, its digest is wrong, or its head cannot be read."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < len(MAGIC) + 8 + _SUM:
                return None
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        return None
    good, whole = hashlib.sha256(), len(data) - _SUM
    with memoryview(data) as view:
        good.update(view[:whole])
    length = int.from_bytes(data[len(MAGIC) : len(MAGIC) + 8], "little")
    first = len(MAGIC) + 8 + length
    sound = data[: len(MAGIC)] == MAGIC and good.digest() == data[whole:] and length <= _HEAD_LIMIT and first <= whole
    if not sound:
        data.close()
        return None
    try:
        head = decode_json(_decoder, data[len(MAGIC) + 8 : first])
        if isinstance(head, Install) and any(Path(name).name != name for name in (*head.files, *head.stale)):
            raise ValueError("it names a file outside its directory")
    except ValueError:
        data.close()
        return None
    return Journal(head, data, first=first)


def _corrupt(reason: str) -> Corrupt:
    return Corrupt(f"the journal is damaged: {reason}", hint="empty the directory, then start again")
