"""Checkpoints whose tensors lie in pieces: every rank wrote its own, and nobody put them together.

Two kinds: torch's distributed checkpoints (a `.metadata` table, written last, over `.distcp` files) and safetensors
files of a sharded writer (`DCP_SHARDING_INFO` in their metadata). Both say where each piece begins in its tensor, which
makes a piece a shard like any other, to be published without gathering anything.

What they say is not always true: torch's own offsets are wrong for some uneven FSDP over TP. `plan.gaps` shows it, and
such a checkpoint must not be published from.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dcr_daemon.canonical.compose import chain
from dcr_daemon.canonical.dtypes import item_size, lane_dtype
from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import Layout, countable
from dcr_daemon.canonical.region import Region, slab, span
from dcr_daemon.checkpoint.safetensors import read_header
from dcr_daemon.errors import Corrupt, Incompatible, NotFound
from dcr_daemon.projection.pickled import PERSISTENT, Opaque, read_pickle
from dcr_daemon.projection.plan import Map, shards_of
from dcr_daemon.projection.values import TORCH_NAMES
from dcr_daemon.untrusted import load_json

METADATA = ".metadata"
SHARDING_INFO = "DCP_SHARDING_INFO"
_HOME = "torch.distributed.checkpoint"
_REBUILDERS = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_DTYPES = {f"torch.{name}": dtype for dtype, name in TORCH_NAMES.items()}


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangular piece of one tensor in one file.

    Attributes:
        tensor: as the checkpoint names it.
        whole: shape of the tensor; `shape` and `starts` are those of the piece in it.
        dtype: safetensors name.
        file: relative to the checkpoint's directory.
        span: byte range [from, to) of what holds the piece: the elements themselves in a safetensors file, a torch
            archive in a distributed checkpoint (`read_archived`).
    """

    tensor: str
    whole: tuple[int, ...]
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    dtype: str
    file: str
    span: tuple[int, int]

    @property
    def label(self) -> str:
        """What a shard of it is called: several pieces of one tensor may lie in one directory."""
        return f"{self.file}:{self.span[0]}:{self.tensor}"

    @property
    def regions(self) -> list[Region]:
        """The piece in its own whole tensor."""
        return slab(self.tensor, self.whole, self.starts, self.shape)


def map_of_pieces(
    pieces: Iterable[Piece], layout: Layout, targets: Mapping[str, Sequence[Region]] | None = None, *, prefix: str = ""
) -> Map:
    """The map of whoever reads these pieces. Tensors that lead to nothing canonical (optimizer states) are left out.

    Args:
        targets: regions from whole tensors of the checkpoint to canonical ones (`Conversion.regions`), if it is a
            training framework's; none if its tensors are the canonical ones.
        prefix: what the checkpoint writes before every name, `model.` of a state dict inside a state dict.
    """
    shards = []
    for piece in pieces:
        name = piece.tensor.removeprefix(prefix)
        if not piece.tensor.startswith(prefix) or name not in (layout if targets is None else targets):
            continue
        regions = slab(name, piece.whole, piece.starts, piece.shape)
        regions = regions if targets is None else chain(regions, targets)
        shards += shards_of(piece.label, piece.shape, piece.dtype, regions, layout)
    return Map(tuple(shards))


def safetensors_pieces(directory: Path) -> list[Piece]:
    """Pieces in the safetensors files of a sharded writer, by file and name.

    Raises:
        Incompatible: a file has no table of offsets: it holds whole tensors.
        Corrupt: a table that does not fit its file.
    """
    found: list[tuple[str, str, tuple[int, ...], tuple[int, ...], str, tuple[int, int]]] = []
    for path in sorted(directory.glob("*.safetensors")):
        header = read_header(path)
        offsets = _offsets(path, header.metadata.get(SHARDING_INFO))
        for spec in header.specs:
            starts = offsets.get(spec.name)
            if starts is None or len(starts) != len(spec.shape):
                raise Corrupt(f"{path} does not say where its piece of {spec.name} begins")
            found.append((spec.name, path.name, spec.shape, starts, spec.dtype, header.spans[spec.name]))
    whole: dict[str, tuple[int, ...]] = {}
    for name, _, shape, starts, _, _ in found:
        ends = tuple(a + n for a, n in zip(starts, shape, strict=True))
        known = whole.setdefault(name, ends)
        if len(known) != len(ends):
            raise Corrupt(f"{directory} has pieces of {name} with {len(known)} and with {len(ends)} axes")
        whole[name] = tuple(map(max, known, ends))
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
    """Pieces of a torch distributed checkpoint, from its `.metadata`; nothing in it is run.

    Raises:
        NotFound: there is no `.metadata`: it is no such checkpoint, or still being written.
        Corrupt: the table cannot be read, or contradicts itself.
        Incompatible: a tensor of a dtype that no safetensors checkpoint holds, or pieces packed by an extension.
    """
    path = directory / METADATA
    try:
        body = path.read_bytes()
    except FileNotFoundError:
        raise NotFound(f"{directory} has no {METADATA}", hint="it is written last: wait for it") from None
    try:
        table = _fields(read_pickle(body), "metadata.Metadata")
        stored = {
            _place(index): _fields(info, "filesystem._StorageInfo") for index, info in table["storage_data"].items()
        }
        return [
            piece
            for name, entry in table["state_dict_metadata"].items()
            if _is(entry, "metadata.TensorStorageMetadata")
            for piece in _tensor_pieces(name, entry.state, stored)
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Corrupt(f"{path} is no table of a distributed checkpoint: {error}") from error


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
        raise ValueError(f"{value!r} is no list of sizes")
    return tuple(value)


def _place(index: Any) -> tuple[str, tuple[int, ...] | None]:
    """What a stored thing is: name and offset; tensors have an offset, other objects have none."""
    fields = _fields(index, "metadata.MetadataIndex")
    offset = fields.get("offset")
    return fields["fqn"], None if offset is None else _size(offset)


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
        info = stored[name, starts]
        if info.get("transform_descriptors"):
            raise Incompatible(
                f"{name} is packed by {info['transform_descriptors']}", hint="write the checkpoint without extensions"
            )
        file, offset, length = info["relative_path"], *_counts((info["offset"], info["length"]))
        if not isinstance(file, str) or Path(file).is_absolute() or ".." in Path(file).parts:
            raise ValueError(f"a piece of {name} lies in {file!r}, outside the checkpoint")
        pieces.append(Piece(name, whole, shape, starts, dtype, file, (offset, offset + length)))
    return pieces


def _dtype(name: str, properties: Any) -> str:
    if not _is(properties, "metadata.TensorProperties") or not isinstance(properties.state, tuple):
        raise ValueError(f"{name} has no dtype")
    kind = properties.state[0].kind
    if kind not in _DTYPES:
        raise Incompatible(f"{name} has dtype {kind}, which no safetensors checkpoint holds")
    return _DTYPES[kind]


def read_archived(directory: Path, piece: Piece) -> Bits:
    """Lanes of one piece of a distributed checkpoint, in its row-major order. Reads and holds that piece only.

    Raises:
        NotFound: its file is gone.
        Corrupt: what lies there is not this piece.
    """
    path = directory / piece.file
    start, stop = piece.span
    try:
        with path.open("rb") as file:
            file.seek(start)
            body = file.read(stop - start)
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}") from None
    if len(body) != stop - start:
        raise Corrupt(f"{path} ends before the piece of {piece.tensor} that its table promises")
    try:
        return _unpacked(body, piece)
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{path} does not hold the piece of {piece.tensor} that its table promises: {error}") from error


def _unpacked(body: bytes, piece: Piece) -> Bits:
    """The tensor in a `torch.save` archive: a pickle that says how it lies in a storage, and the storage."""
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        (table,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        home = table.removesuffix("data.pkl")
        if f"{home}byteorder" in archive.namelist() and archive.read(f"{home}byteorder") != b"little":
            raise ValueError("its bytes are not little-endian")
        rebuilt = read_pickle(archive.read(table))
        if not isinstance(rebuilt, Opaque) or rebuilt.kind not in _REBUILDERS:
            raise ValueError("it is no tensor")
        storage, first, size, stride = rebuilt.arguments[:4]
        if storage.kind != PERSISTENT or storage.arguments[0][0] != "storage":
            raise ValueError("it has no storage")
        lanes = np.frombuffer(archive.read(f"{home}data/{storage.arguments[0][2]}"), lane_dtype(item_size(piece.dtype)))
    shape, strides = _counts(size), _counts(stride)
    if shape != piece.shape or len(strides) != len(shape) or type(first) is not int or first < 0:
        raise ValueError(f"it is {shape}, not {piece.shape}")
    if 0 in shape:
        return lanes[:0]
    if first + span(shape, strides) >= lanes.size:
        raise ValueError("it reaches beyond its storage")
    view = np.lib.stride_tricks.as_strided(lanes[first:], shape, tuple(s * lanes.itemsize for s in strides))
    return np.ascontiguousarray(view).reshape(-1)
