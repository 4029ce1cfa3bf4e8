"""One safetensors file: a bounded header parser, a view of its bits, a streaming writer.

Promises: nothing is allocated by an unchecked length; a file whose header parses here is exactly
8 + header + data bytes long, its tensors lie side by side without gap or overlap, and every dtype is byte-sized.
Weights are never loaded: `bits` is a view over a map of the file, `read` copies what is asked for. A file that
somebody else may still change is only ever `read`: touching a map of a truncated file would end the process.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import reprlib
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dcr_daemon import runtime
from dcr_daemon.canonical.dtypes import bits_dtype, item_size
from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import TensorSpec, countable
from dcr_daemon.disk import disk_error, out_of_handles, sync_file
from dcr_daemon.errors import Corrupt, DcrError, Incompatible, NotFound
from dcr_daemon.untrusted import load_json

HEADER_LIMIT = 100 << 20  #: bytes of JSON, as in the reference implementation
_BLOCK = 16 << 20
_ELEMENTS = 1 << 18  #: changed elements of one write at most: their positions take eight bytes each, several times over
_GAP = 16 << 10  #: bytes between two changed elements up to which they are written together

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds. `spans` are absolute byte ranges, `size` is that of the whole file."""

    specs: tuple[TensorSpec, ...]
    spans: dict[str, tuple[int, int]]
    metadata: dict[str, str]
    size: int


def _counts(value: Any) -> list[int]:
    if not isinstance(value, list) or any(type(n) is not int or n < 0 for n in value):
        raise ValueError(f"{reprlib.repr(value)} is not a list of sizes")
    return value


def _entry(name: str, entry: Any) -> tuple[TensorSpec, int, int]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry of {name!r} is not dtype, shape and data_offsets")
    name.encode()  # a lone surrogate has no UTF-8 form and could be neither sorted nor stored
    spec = TensorSpec(name, str(entry["dtype"]), tuple(_counts(entry["shape"])))
    if not countable(spec.shape):
        raise ValueError(f"{name!r} has a shape that no tensor has: {reprlib.repr(spec.shape)}")
    begin, end = _counts(entry["data_offsets"])
    if end - begin != spec.nbytes:
        raise ValueError(f"{name!r} is {spec.dtype} {list(spec.shape)} but spans {end - begin} bytes")
    return spec, begin, end


def parse_header(raw: bytes, data: int) -> Header:
    """Parse the JSON of a header over `data` bytes of tensors.

    Raises:
        ValueError: anything wrong with it, said in words.
        Incompatible: a dtype that is not byte-sized.
    """
    table = load_json(raw)
    if not isinstance(table, dict):
        raise ValueError("the header is not a JSON object")
    metadata = table.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or any(not isinstance(text, str) for text in metadata.values()):
        raise ValueError("__metadata__ is not a table of strings")
    entries = sorted((_entry(name, entry) for name, entry in table.items()), key=lambda e: (e[1], e[2]))
    place, origin = 0, 8 + len(raw)
    for spec, begin, end in entries:
        if begin != place:
            raise ValueError(f"{spec.name!r} begins at byte {begin} of the data, not at {place}")
        place = end
    if place != data:
        raise ValueError(f"its tensors are {place} bytes, the file holds {data}")
    spans = {spec.name: (origin + begin, origin + end) for spec, begin, end in entries}
    return Header(tuple(spec for spec, _, _ in entries), spans, metadata, origin + data)


def _read_exact(descriptor: int, size: int, at: int) -> bytes:
    parts = []
    while size and (part := os.pread(descriptor, min(size, _BLOCK), at)):
        parts.append(part)
        size, at = size - len(part), at + len(part)
    if size:
        raise EOFError(at)
    return b"".join(parts)


def read_at(descriptor: int, out: Bits, *, place: int) -> None:
    """Fill `out` (1-D, contiguous) with the bytes of a file from byte `place` on.

    Raises:
        EOFError: the file ends before them.
        OSError: it cannot be read.
    """
    left = out.view("u1").data
    while left:
        size = os.preadv(descriptor, [left[:_BLOCK]], place)
        if not size:
            raise EOFError(place)
        left, place = left[size:], place + size


def read_header(path: Path) -> Header:
    """Read and check a file's header; not one byte of weights.

    Raises:
        NotFound: there is no such file.
        Incompatible: it is no safetensors file, or holds a dtype that is not byte-sized.
        Corrupt: it is one, but truncated, too long, or inconsistent.
    """
    descriptor = open_plain(path)
    try:
        return _header_of(path, descriptor)
    finally:
        os.close(descriptor)


def open_plain(path: Path, access: int = os.O_RDONLY) -> int:
    """A descriptor of a plain file. Anything else is refused, and a pipe is not waited for.

    Raises:
        NotFound: there is no such file.
        Incompatible: it is something else, or may not be read.
        ResourceExhausted: no descriptors are left.
    """
    try:
        descriptor = os.open(path, access | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"there is no file {path}") from error
    except OSError as error:
        if out_of_handles(error):
            raise disk_error(error, path) from error
        raise Incompatible(f"{path} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Incompatible(f"{path} is not a regular file", hint="remove it, or rename it")
    return descriptor


def _header_of(path: Path, descriptor: int) -> Header:
    """`read_header` of an open file; every error names it."""
    try:
        return _read_header(path, descriptor)
    except (EOFError, OSError) as error:
        why = "it shrank while it was read" if isinstance(error, EOFError) else error.strerror
        raise Corrupt(f"{path} cannot be read: {why}", hint="write the file again") from error
    except DcrError as error:
        if str(path) in error.message:
            raise
        raise type(error)(f"{path}: {error.message}", hint=error.hint) from error


def _read_header(path: Path, fd: int) -> Header:
    size = os.fstat(fd).st_size
    if size < 8:
        raise Corrupt(f"{path} is truncated: {size} bytes", hint="write the file again")
    length = int.from_bytes(_read_exact(fd, 8, 0), "little")
    if not 2 <= length <= HEADER_LIMIT:
        raise Incompatible(
            f"{path} is not a safetensors file: it claims a header of {length} bytes",
            hint="DCR reads safetensors only; convert or remove it",
        )
    if 8 + length > size:
        raise Corrupt(f"{path} is truncated: {size} bytes, its header alone needs {8 + length}")
    raw = _read_exact(fd, length, 8)
    if not raw.startswith(b"{"):
        raise Incompatible(f"{path} is not a safetensors file: its header is not JSON")
    try:
        return parse_header(raw, size - 8 - length)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{path} is truncated or damaged: {error}", hint="write the file again") from error


class SafetensorsFile:
    """An open file. Views from `bits` must be dropped before `close`; a context manager.

    Args:
        path: the file.
        writable: open it for `write_elements` too.
    """

    def __init__(self, path: Path | str, *, writable: bool = False) -> None:
        self.path = Path(path)
        self._fd = open_plain(self.path, os.O_RDWR if writable else os.O_RDONLY)
        self._map: mmap.mmap | None = None
        try:
            self.header = _header_of(self.path, self._fd)
        except DcrError:
            os.close(self._fd)
            raise
        self.specs = self.header.specs
        self.metadata = self.header.metadata
        self._by_name = {spec.name: spec for spec in self.specs}

    def spec(self, name: str) -> TensorSpec:
        """`NotFound` if the file has no such tensor."""
        try:
            return self._by_name[name]
        except KeyError:
            raise NotFound(f"{self.path} holds no tensor {name}") from None

    def bits(self, name: str) -> Bits:
        """The tensor's bits as unsigned integers [elements]: a view over the map, or a copy if the file is not
        aligned."""
        spec = self.spec(name)
        if self._map is None:
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        begin, _ = self.header.spans[name]
        view = np.frombuffer(self._map, dtype=bits_dtype(spec.width), count=spec.elements, offset=begin)
        return view if view.flags.aligned else view.copy()

    def read(self, name: str, start: int = 0, count: int | None = None) -> Bits:
        """Copy `count` elements from number `start` (default: all). Raises `Corrupt` if the file has shrunk."""
        spec = self.spec(name)
        count = spec.elements - start if count is None else count
        out = np.empty(count, dtype=bits_dtype(spec.width))
        self.read_into(name, start, out)
        return out

    def read_into(self, name: str, start: int, out: Bits) -> None:
        """Fill `out` (1-D, contiguous) with the tensor's elements from number `start` on. Raises as `read` does."""
        place = self.header.spans[name][0] + start * out.itemsize
        try:
            read_at(self._fd, out, place=place)
        except EOFError:
            raise Corrupt(f"{self.path} was truncated while it was read", hint="write the file again") from None

    def write_elements(self, name: str, positions: Ints, *, values: Bits) -> None:
        """Write elements of a tensor in place: `positions` int64 [k], ascending, and their new `values` [k].

        The parts of the file that they lie in are read, changed and written back. Through a map, a disk that fills up
        would end the process by SIGBUS.

        Raises:
            Corrupt: the file has shrunk.
            OSError: the disk is full, or fails.
        """
        for first in range(0, positions.size, _ELEMENTS):
            part = slice(first, first + _ELEMENTS)
            self._write_runs(name, _frozen(positions[part]), values=_frozen(values[part]))

    def holds_elements(self, name: str, positions: Ints, *, values: Bits) -> bool:
        """Whether the elements of a tensor at `positions` int64 [k], ascending, are `values` [k]. Through the map."""
        from dcr_daemon.checkpoint import kernels

        return bool(kernels.holds(_frozen(self.bits(name)), _frozen(positions), _frozen(values)))

    def _write_runs(self, name: str, positions: Ints, *, values: Bits) -> None:
        from dcr_daemon.checkpoint import kernels

        begin, width = self.header.spans[name][0], values.itemsize
        for first, end in _runs(positions, width):
            start = int(positions[first])
            part = self.read(name, start, int(positions[end - 1]) + 1 - start)
            if not kernels.patch(part, positions[first:end], values[first:end], start):
                continue  # a full disk does not prevent a rollback of what was not written
            _write_at(self._fd, part, place=begin + start * width)

    def sync(self) -> None:
        """Make what was written durable."""
        sync_file(self._fd, self.path, site="tensors")

    def close(self) -> None:
        if self._fd < 0:
            return
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a view is still alive; the map goes with it
                self._map.close()
            self._map = None
        os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _runs(positions: Ints, width: int) -> list[tuple[int, int]]:
    """Cut ascending positions of elements into runs, as ranges of their indexes: each run is written at once."""
    if not positions.size:
        return []
    place = positions * width
    cuts = (np.diff(place) > _GAP) | (np.diff(place // _BLOCK) > 0)
    edges = [0, *(np.flatnonzero(cuts) + 1).tolist(), positions.size]
    return list(pairwise(edges))


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A read-only view, so that kernels see one type of array and compile once."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def _write_at(descriptor: int, data: Bits, *, place: int) -> None:
    left = data.view("u1").data
    while left:
        size = os.pwrite(descriptor, left, place)
        left, place = left[size:], place + size


class SafetensorsBytes:
    """A whole file in memory, already checked to be what it should be; `name` is for errors.

    Raises:
        Corrupt: the bytes are no consistent safetensors file.
    """

    def __init__(self, body: bytes | bytearray | memoryview, name: str) -> None:
        self.path = Path(name)
        self._body = memoryview(body)
        length = int.from_bytes(self._body[:8], "little")
        if not 2 <= length <= min(HEADER_LIMIT, len(self._body) - 8):
            raise Corrupt(f"{name} is not a safetensors file: it claims a header of {length} bytes")
        try:
            self.header = parse_header(bytes(self._body[8 : 8 + length]), len(self._body) - 8 - length)
        except (ValueError, RecursionError) as error:
            raise Corrupt(f"{name} is damaged: {error}") from error
        self.specs, self.metadata = self.header.specs, self.header.metadata
        self._by_name = {spec.name: spec for spec in self.specs}

    def bits(self, name: str) -> Bits:
        """A tensor's bits as unsigned integers [elements], a view over the bytes."""
        spec = self._by_name[name]
        begin, _ = self.header.spans[name]
        return np.frombuffer(self._body, dtype=bits_dtype(spec.width), count=spec.elements, offset=begin)


def encode_header(specs: Sequence[TensorSpec], metadata: dict[str, str]) -> bytes:
    """Length and JSON of a file that holds `specs` in this order; padded so that the data begin 8-aligned."""
    table: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    place = 0
    for spec in specs:
        end = place + spec.nbytes
        table[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [place, end]}
        place = end
    raw = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def aligned(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """`specs` in the order files are written: wide elements first, so that every tensor is aligned."""
    return sorted(specs, key=lambda spec: (-item_size(spec.dtype), spec.name.encode()))


def write_safetensors(
    path: Path, items: Sequence[tuple[TensorSpec, Bits]], *, metadata: dict[str, str] | None = None
) -> int:
    """Write a file, streaming, and make it durable; returns its size in bytes.

    Args:
        path: a new file in an existing directory.
        items: each tensor with its bits as unsigned integers [elements] (views are fine, nothing is copied).
        metadata: the `__metadata__` of the header.

    Raises:
        ResourceExhausted: the disk is full, or does not take it; the partial file is removed.
        FileExistsError: there is such a file; it stays as it is.
    """
    parts = _parts(items, metadata)
    try:
        with path.open("xb", buffering=0) as file:
            for part in parts:
                runtime.failpoint("disk.tensors.write")
                _write_all(file.fileno(), part)
            sync_file(file.fileno(), path, site="tensors")
    except FileExistsError:
        raise  # it is not ours to remove, and no fault of the disk
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise disk_error(error, path) from error
    return sum(len(part) for part in parts)


def pack_safetensors(items: Sequence[tuple[TensorSpec, Bits]], metadata: dict[str, str] | None = None) -> bytearray:
    """The bytes that `write_safetensors` would write: a copy of every tensor."""
    body = bytearray()
    for part in _parts(items, metadata):
        body += part
    return body


def _parts(items: Sequence[tuple[TensorSpec, Bits]], metadata: dict[str, str] | None) -> list[memoryview]:
    by_name = {spec.name: bits for spec, bits in items}
    specs = aligned([spec for spec, _ in items])
    for spec in specs:
        bits = by_name[spec.name]
        if bits.size != spec.elements or bits.itemsize != spec.width:
            raise ValueError(f"{spec.name}: {bits.size} elements of {bits.itemsize} bytes for {spec}")
    bodies = [np.ascontiguousarray(by_name[spec.name]).view("u1").data for spec in specs]
    return [memoryview(encode_header(specs, metadata or {})), *bodies]


def _write_all(descriptor: int, left: memoryview) -> None:
    while left:
        left = left[os.write(descriptor, left[:_BLOCK]) :]
