"""Checkpoints whose tensors lie in pieces, one writer per rank: which pieces there are, and where each lies in its
tensor.

Two kinds are read: torch's distributed checkpoints (a `.metadata` table, written last, over `.distcp` files) and
safetensors files of a sharded writer (`DCP_SHARDING_INFO` in their metadata). Both say where each piece begins in its
tensor, so a piece is a shard like any other, and nothing has to be gathered.

The tables are not always right: torch's own offsets are wrong for some uneven FSDP over TP. `region_map.gaps` detects
it, and such a checkpoint must not be published from.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dcr_daemon.canonical.layout import countable
from dcr_daemon.canonical.region import Region, slab
from dcr_daemon.checkpoint.safetensors import Header, open_plain
from dcr_daemon.errors import Corrupt, Incompatible, NotFound
from dcr_daemon.projection.files.pickle_reader import Opaque, read_pickle
from dcr_daemon.projection.values import TORCH_NAMES
from dcr_daemon.untrusted import load_json

METADATA = ".metadata"
SHARDING_INFO = "DCP_SHARDING_INFO"
METADATA_LIMIT = 1 << 30  #: bytes of a table; one of a million pieces has a tenth of it
_FILE_LIMIT = 1 << 62  #: bytes: the largest offset accepted in a table before the file is opened
_HOME = "torch.distributed.checkpoint"
_DTYPES = {f"torch.{name}": dtype for dtype, name in TORCH_NAMES.items()}


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangular piece of one tensor in one file.

    Attributes:
        tensor: as the checkpoint names it.
        whole: shape of the tensor; `shape` and `starts` are those of the piece in it.
        dtype: safetensors name; torch's own (`torch.quint8`) where safetensors has none, as a trainer's state may have.
        file: relative to the checkpoint's directory, and inside it.
        span: byte range [from, to) that holds the piece: the elements in a safetensors file, a torch archive in a
            distributed checkpoint (`storage.archived`).
        packed: the writer's extension that packed the archive; empty for a plain one.
    """

    tensor: str
    whole: tuple[int, ...]
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    dtype: str
    file: str
    span: tuple[int, int]
    packed: str = ""

    @property
    def label(self) -> str:
        """The name of its shard: several pieces of one tensor may lie in one directory."""
        return f"{self.file}:{self.span[0]}:{self.tensor}"

    @property
    def regions(self) -> list[Region]:
        """The piece in its own whole tensor."""
        return slab(self.tensor, self.whole, starts=self.starts, sizes=self.shape)


def pieces_of(headers: Mapping[str, Header], directory: Path) -> list[Piece]:
    """Pieces in files of a sharded writer, by file and name. A tensor's shape is inferred from the pieces that these
    files have.

    Raises:
        Incompatible: a file has no table of offsets: it holds whole tensors.
        Corrupt: a table that does not fit its file.
    """
    found: list[tuple[str, str, tuple[int, ...], tuple[int, ...], str, tuple[int, int]]] = []
    for file, header in sorted(headers.items()):
        path = directory / file
        offsets = _offsets(path, header.metadata.get(SHARDING_INFO))
        for spec in header.specs:
            starts = offsets.get(spec.name)
            if starts is None or len(starts) != len(spec.shape):
                raise Corrupt(f"{path} does not say where its piece of {spec.name} begins")
            found.append((spec.name, file, spec.shape, starts, spec.dtype, header.spans[spec.name]))
    whole: dict[str, tuple[int, ...]] = {}
    for name, _, shape, starts, _, _ in found:
        ends = tuple(a + n for a, n in zip(starts, shape, strict=True))
        known = whole.setdefault(name, ends)
        if len(known) != len(ends):
            raise Corrupt(f"{directory} has pieces of {name} with {len(known)} and with {len(ends)} axes")
        whole[name] = tuple(map(max, known, ends))
        if not countable(whole[name]):
            raise Corrupt(f"{directory} has pieces of {name} that together have a shape that no tensor has")
    return [
        Piece(name, whole[name], shape, starts, dtype, file, span) for name, file, shape, starts, dtype, span in found
    ]


def _offsets(path: Path, text: str | None) -> dict[str, tuple[int, ...]]:
    if text is None:
        raise Incompatible(f"{path} holds whole tensors: there is no {SHARDING_INFO} in it")
    try:
        table = load_json(text.encode())
        return {name: _counts(entry["saved_offsets"]) for name, entry in table.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Corrupt(f"{SHARDING_INFO} of {path} is no table of offsets: {error}") from error


def dcp_pieces(directory: Path) -> list[Piece]:
    """Pieces of a torch distributed checkpoint, from its `.metadata`, of which nothing is executed.

    Raises:
        NotFound: there is no `.metadata`: it is no such checkpoint, or still being written.
        Corrupt: the table cannot be read, or contradicts itself.
        Incompatible: it is no regular file, or cannot be read.
    """
    path = directory / METADATA
    body = _table_body(path)
    try:
        table = _fields(read_pickle(body), "metadata.Metadata")
        stored = {
            _place(index): _fields(info, "filesystem._StorageInfo") for index, info in table["storage_data"].items()
        }
        return [
            piece
            for name, entry in table["state_dict_metadata"].items()
            if _is(entry, "metadata.TensorStorageMetadata")
            for piece in _tensor_pieces(_text(name), entry.state, stored)
        ]
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise Corrupt(f"{path} is no table of a distributed checkpoint: {error}") from error


def _table_body(path: Path) -> bytes:
    try:
        descriptor = open_plain(path)
    except NotFound:
        raise NotFound(f"{path.parent} has no {path.name}", hint="it is written last: wait for it") from None
    with os.fdopen(descriptor, "rb") as file:
        try:
            body = file.read(min(os.fstat(descriptor).st_size, METADATA_LIMIT) + 1)
        except OSError as error:
            raise Incompatible(f"{path} cannot be read: {error.strerror}") from error
    if len(body) > METADATA_LIMIT:
        raise Corrupt(f"{path} is larger than {METADATA_LIMIT} bytes, which no table of pieces is")
    return body


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, Opaque) and value.kind == f"{_HOME}.{kind}"


def _fields(value: Any, kind: str) -> dict[str, Any]:
    """The fields of a record of one of the library's own kinds."""
    if not _is(value, kind) or not isinstance(value.state, dict):
        raise ValueError(f"a {kind} was expected")
    return value.state


def _size(value: Any) -> tuple[int, ...]:
    """A `torch.Size`."""
    if not isinstance(value, Opaque) or value.kind != "torch.Size" or len(value.arguments) != 1:
        raise ValueError("a torch.Size was expected")
    return _counts(value.arguments[0])


def _counts(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or any(type(n) is not int or n < 0 for n in value) or not countable(value):
        raise ValueError(f"{reprlib.repr(value)} is no list of sizes")
    return tuple(value)


def _text(value: Any) -> str:
    """A name. Lone surrogates are refused: such a name could be neither sorted nor printed."""
    if not isinstance(value, str):
        raise ValueError("a name was expected")
    value.encode()
    return value


def _range(offset: Any, length: Any) -> tuple[int, int]:
    if any(type(n) is not int or not 0 <= n <= _FILE_LIMIT for n in (offset, length)):
        raise ValueError("a piece has no place in its file")
    return offset, offset + length


def _place(index: Any) -> tuple[str, tuple[int, ...] | None]:
    """Name and offset of a stored object; only tensors have an offset."""
    fields = _fields(index, "metadata.MetadataIndex")
    offset = fields.get("offset")
    return _text(fields["fqn"]), None if offset is None else _size(offset)


def _tensor_pieces(
    name: str, entry: dict[str, Any], stored: Mapping[tuple[str, tuple[int, ...] | None], dict[str, Any]]
) -> list[Piece]:
    whole, pieces = _size(entry["size"]), []
    dtype = _dtype(name, entry["properties"])
    for chunk in entry["chunks"]:
        fields = _fields(chunk, "metadata.ChunkStorageMetadata")
        starts, shape = _size(fields["offsets"]), _size(fields["sizes"])
        if not len(starts) == len(shape) == len(whole):
            raise ValueError(f"a piece of {name} has other axes than the tensor")
        if any(a + n > size for a, n, size in zip(starts, shape, whole, strict=True)):
            raise ValueError(f"a piece of {name} reaches beyond the tensor")
        if (name, starts) not in stored:
            raise ValueError(f"it does not say where a piece of {name} lies")
        info = stored[name, starts]
        packed = reprlib.repr(info["transform_descriptors"]) if info.get("transform_descriptors") else ""
        file, place = _file(name, info["relative_path"]), _range(info["offset"], info["length"])
        pieces.append(Piece(name, whole, shape, starts, dtype, file, place, packed))
    return pieces


def _file(name: str, value: Any) -> str:
    path = PurePosixPath(_text(value))
    if path.is_absolute() or ".." in path.parts or not path.name or "\0" in value:
        raise ValueError(f"a piece of {name} lies in {reprlib.repr(value)}, outside the checkpoint")
    return path.as_posix()


def _dtype(name: str, properties: Any) -> str:
    if not _is(properties, "metadata.TensorProperties") or not isinstance(properties.state, tuple):
        raise ValueError(f"{name} has no dtype")
    kind = _text(properties.state[0].kind)
    return _DTYPES.get(kind, kind)
