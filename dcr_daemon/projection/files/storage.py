"""The elements of a piece, read range by range from its file; the file's own table says where they are.

A safetensors file says where its tensors lie. In a distributed checkpoint each piece is a torch archive: a zip of a
pickle, which says how the piece lies in a storage, and of that storage, uncompressed. Only the table is parsed; then
elements are read from the file like any others (`canonical.gather`), and no piece is ever held whole.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcr_daemon.canonical.compose import compose
from dcr_daemon.canonical.dtypes import item_size
from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.gather import gather
from dcr_daemon.canonical.region import Region, merge, row_major, whole
from dcr_daemon.checkpoint.safetensors import read_at
from dcr_daemon.errors import Corrupt
from dcr_daemon.projection.files.pickle_reader import PERSISTENT, Opaque, read_pickle
from dcr_daemon.projection.files.piece_map import Piece
from dcr_daemon.projection.values import TORCH_NAMES

TABLE_LIMIT = 1 << 20  #: bytes that an archive's tables may have; torch's have a few hundred
_LOCAL_HEADER = 30  #: bytes before the name in a zip entry's own header
_REBUILDERS = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
#: what reading a damaged or hostile archive may raise: zipfile's own errors, and those of lookups in its table
_FAULTS = (
    zipfile.BadZipFile, struct.error, EOFError, RuntimeError, ValueError, LookupError, TypeError, AttributeError,
)  # fmt: skip
_STORAGES = {
    "BoolStorage": "BOOL", "ByteStorage": "U8", "CharStorage": "I8", "ShortStorage": "I16", "IntStorage": "I32",
    "LongStorage": "I64", "HalfStorage": "F16", "BFloat16Storage": "BF16", "FloatStorage": "F32",
    "DoubleStorage": "F64", "ComplexFloatStorage": "C64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """Where a piece lies: `region` leads from places, in elements from byte `at` of the file, to its own elements in
    row-major order; None if it has no elements."""

    at: int
    region: Region | None


def plain(piece: Piece) -> StoredPiece:
    """The place of a piece in a safetensors file."""
    return StoredPiece(piece.span[0], next(iter(whole(piece.tensor, piece.shape)), None))


def archived(descriptor: int, piece: Piece, *, path: Path) -> StoredPiece:
    """The place of a piece in a distributed checkpoint; nothing in the archive is executed.

    Raises:
        Corrupt: what lies there is not this piece.
    """
    if os.fstat(descriptor).st_size < piece.span[1]:
        raise Corrupt(f"{path} ends before the piece of {piece.tensor} that its table promises")
    try:
        return _archived(descriptor, piece)
    except _FAULTS as error:
        raise Corrupt(f"{path} does not hold the piece of {piece.tensor} that its table promises: {error}") from error


def _archived(descriptor: int, piece: Piece) -> StoredPiece:
    if piece.packed:
        raise ValueError(f"it is packed by {piece.packed}")
    window = _Window(descriptor, *piece.span)
    with zipfile.ZipFile(window) as archive:
        names = archive.namelist()
        (table,) = [name for name in names if name.endswith("data.pkl")]
        home = table.removesuffix("data.pkl")
        if f"{home}byteorder" in names and _entry(archive, f"{home}byteorder") != b"little":
            raise ValueError("its bytes are not little-endian")
        key, region = _region(read_pickle(_entry(archive, table)), piece)
        info = archive.getinfo(f"{home}data/{key}")
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError("its storage is compressed")
    header = window.at(info.header_offset, _LOCAL_HEADER)
    name, extra = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    at = piece.span[0] + info.header_offset + _LOCAL_HEADER + name + extra
    if at + info.file_size > piece.span[1]:
        raise ValueError("its storage reaches beyond it")
    if region and (region.src_last + 1) * item_size(piece.dtype) > info.file_size:
        raise ValueError("it reaches beyond its storage")
    return StoredPiece(at, region)


def _entry(archive: zipfile.ZipFile, name: str) -> bytes:
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > TABLE_LIMIT:
        raise ValueError(f"its {Path(name).name} is no plain table")
    return archive.read(info)


def _region(rebuilt: Any, piece: Piece) -> tuple[str, Region | None]:
    """The name of the storage, and how the piece lies in it."""
    if not isinstance(rebuilt, Opaque) or rebuilt.kind not in _REBUILDERS:
        raise ValueError("it is no tensor")
    storage, first, size, stride = rebuilt.arguments[:4]
    if storage.kind != PERSISTENT or storage.arguments[0][0] != "storage":
        raise ValueError("it has no storage")
    _, kind, key, *_ = storage.arguments[0]
    shape, strides = _numbers(size), _numbers(stride)
    if shape != piece.shape or len(strides) != len(shape):
        raise ValueError(f"it is {shape}, not {piece.shape}")
    dtype = _dtype(kind.kind, rebuilt.arguments)
    if dtype != piece.dtype:
        raise ValueError(f"it is {dtype}, not {piece.dtype}")
    if 0 in shape:
        return str(key), None
    (start,) = _numbers((first,))
    axes = merge(zip(shape, strides, row_major(shape), strict=True))
    return str(key), Region("", (), start, (), 0, ()).with_axes(axes)


def _dtype(kind: str, arguments: tuple[Any, ...]) -> str:
    """The dtype of the storage's elements: a typed storage names it, an untyped one leaves it to the tensor."""
    home, _, name = kind.rpartition(".")
    if home == "torch" and name in _STORAGES:
        return _STORAGES[name]
    given = arguments[6].kind if len(arguments) > 6 else kind
    return next((dtype for dtype, name in TORCH_NAMES.items() if given == f"torch.{name}"), str(given))


def _numbers(values: Any) -> tuple[int, ...]:
    if isinstance(values, Opaque):  # a `torch.Size`
        (values,) = values.arguments
    if not isinstance(values, tuple) or any(type(n) is not int or not 0 <= n < 1 << 62 for n in values):
        raise ValueError("its sizes are no numbers")
    return values


class _Window(io.RawIOBase):
    """Bytes [start, stop) of a file, for `zipfile`. It reads tables only, so no read is larger than `TABLE_LIMIT`."""

    def __init__(self, descriptor: int, start: int, stop: int) -> None:
        super().__init__()
        self._descriptor, self._start, self._stop, self._place = descriptor, start, stop, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._stop - self._start}[whence]
        if origin + offset < 0:
            raise ValueError("it is too short for an archive")
        self._place = origin + offset
        return self._place

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._stop - self._start - self._place)
        part = self.at(self._place, left if size < 0 else min(size, left))
        self._place += len(part)
        return part

    def at(self, place: int, size: int) -> bytes:
        if size > TABLE_LIMIT:
            raise ValueError("its tables are too large")
        return os.pread(self._descriptor, size, self._start + place)


def read_region(descriptor: int, stored: StoredPiece, *, wanted: Region, out: Bits, origin: int) -> None:
    """Copy elements of a piece to their places.

    Args:
        wanted: from the piece's own row-major elements to canonical ones.
        out: bits of the piece's dtype [elements], from canonical element `origin` on.

    Raises:
        EOFError: the file ends before them.
        OSError: it cannot be read.
    """
    if stored.region is None:
        return

    def fill(first: int, part: Bits) -> None:
        read_at(descriptor, part, place=stored.at + first * part.itemsize)

    for part in compose(stored.region, wanted):
        gather(fill, part.shifted(dst=-origin), out)
