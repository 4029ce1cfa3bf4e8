"""The chunk's bytes: header, directory, table, and the names of its streams (docs/FORMAT.md is the authority).

    header   magic, format, xxh3-64 of everything behind it, identity, number of segments and of streams
    directory  one row per stream: kind, packing, raw size, stored size; kinds ascending, empty streams absent
    streams  in directory order, each stored as it is or as one zstd frame

Packs and unpacks only; `decode` decides what is acceptable.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from dcr_daemon.codec.chunk import ChunkId

MAGIC = b"DCRC"
FORMAT = 1
HASHED_FROM = 16  #: the xxh3-64 covers every byte from here to the end
MAX_SEGMENTS = 1 << 16
RAW_LIMIT = 64 << 20  #: bytes of table and streams together, unpacked
MAX_SHIFT = 8

HEADER = struct.Struct("<4s HHQ QQQ II 32s32s32s HHI")
ENTRY = struct.Struct("<BBII")
ID = re.compile(rb"([a-z0-9]{1,32})\0*")  #: a stream, group or nonce id, zero-padded to 32 bytes


class Stream(IntEnum):
    """Kinds of streams; planes take consecutive numbers, one per byte of an element."""

    TABLE = 0
    GAPS = 1
    LOW = 2
    BITMASK = 3
    CODES = 4
    ESCAPE = 8  #: 8..11, escaped differences of ulp segments
    MASK = 16  #: 16..19, operands of xor segments
    VALUE = 24  #: 24..31, operands of overwrite segments


KINDS = frozenset({*range(5), *range(8, 12), *range(16, 20), *range(24, 32)})


class Packing(IntEnum):
    RAW = 0
    ZSTD = 1


@dataclass(slots=True)
class Header:
    id: ChunkId
    checksum: int
    segments: int
    streams: int


def pack_header(header: Header) -> bytes:
    """The header's bytes. Raises `ValueError` for an identity that no reader would take."""
    i = header.id
    for name in (i.stream, i.group, i.nonce):
        if "\0" in name or not ID.fullmatch(name.encode()):
            raise ValueError(f"{name!r} is no id: 1 to 32 of [a-z0-9]")
    return HEADER.pack(
        MAGIC, FORMAT, 0, header.checksum, i.attempt, i.base, i.version, i.rank, i.n,
        i.stream.encode("ascii"), i.group.encode("ascii"), i.nonce.encode("ascii"), header.streams, 0, header.segments,
    )  # fmt: skip


@dataclass(slots=True)
class Table:
    """One row per segment, in columns. `axes` columns hold `rank` values per segment, one after the other."""

    tensor: npt.NDArray[np.uint32]
    changed: npt.NDArray[np.uint32]
    carries: npt.NDArray[np.uint32]
    escapes: npt.NDArray[np.uint32]
    positions: npt.NDArray[np.uint8]
    operation: npt.NDArray[np.uint8]
    shift: npt.NDArray[np.uint8]
    rank: npt.NDArray[np.uint8]
    dst: npt.NDArray[np.uint64]
    before: npt.NDArray[np.uint64]
    after: npt.NDArray[np.uint64]
    shape: npt.NDArray[np.uint64]
    strides: npt.NDArray[np.uint64]


#: Columns with one value per segment, then those with one per axis: (name, numpy dtype).
ROW_COLUMNS = (
    ("rank", "u1"), ("positions", "u1"), ("operation", "u1"), ("shift", "u1"),
    ("tensor", "<u4"), ("changed", "<u4"), ("carries", "<u4"), ("escapes", "<u4"),
    ("dst", "<u8"), ("before", "<u8"), ("after", "<u8"),
)  # fmt: skip
AXIS_COLUMNS = (("shape", "<u8"), ("strides", "<u8"))
ROW_BYTES = sum(np.dtype(dtype).itemsize for _, dtype in ROW_COLUMNS)
AXIS_BYTES = sum(np.dtype(dtype).itemsize for _, dtype in AXIS_COLUMNS)

assert {f.name for f in fields(Table)} == {name for name, _ in ROW_COLUMNS + AXIS_COLUMNS}


def pack_table(table: Table) -> bytes:
    """Columns one after the other, each as byte planes: the zero bytes of small numbers then cost nothing."""
    planes = []
    for name, dtype in ROW_COLUMNS + AXIS_COLUMNS:
        column = np.ascontiguousarray(getattr(table, name), dtype=dtype)
        planes.append(column.view("u1").reshape(column.size, column.itemsize).T.tobytes())
    return b"".join(planes)


def unpack_table(raw: bytes | memoryview, rows: int) -> Table | None:
    """The table of `rows` segments, or None if `raw` is not exactly as long as its ranks say."""
    if len(raw) < rows * ROW_BYTES:
        return None
    axes = int(np.frombuffer(raw, "u1", rows).sum(dtype=np.int64))
    if len(raw) != rows * ROW_BYTES + axes * AXIS_BYTES:
        return None
    columns, at = {}, 0
    for group, count in ((ROW_COLUMNS, rows), (AXIS_COLUMNS, axes)):
        for name, dtype in group:
            width = np.dtype(dtype).itemsize
            planes = np.frombuffer(raw, "u1", count * width, at).reshape(width, count)
            columns[name] = np.ascontiguousarray(planes.T).reshape(-1).view(dtype)
            at += count * width
    return Table(**columns)
