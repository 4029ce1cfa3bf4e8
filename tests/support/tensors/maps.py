"""What a rank or a reader of pieces has, as one map, and one whole piece of a distributed checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dcr_daemon.canonical.compose import chain
from dcr_daemon.canonical.dtypes import bits_dtype, item_size
from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.canonical.region import Region, slab, whole
from dcr_daemon.checkpoint.safetensors import open_plain, read_header
from dcr_daemon.errors import Corrupt
from dcr_daemon.projection.files.piece_map import Piece, pieces_of
from dcr_daemon.projection.files.storage import archived, read_region
from dcr_daemon.projection.region_map import Map, shards_of
from dcr_daemon.projection.sharding.dtensor import shards
from dcr_daemon.projection.tracing import Conversion


def map_of(
    tensors: Iterable[tuple[str, Any]],
    layout: Layout,
    *,
    conversion: Conversion | None = None,
    plain_replica: tuple[int, int] = (0, 1),
) -> Map:
    """The map of this rank from its named tensors (a `state_dict`'s items: DTensors and plain tensors).

    Args:
        conversion: of a module whose tensors are not canonical ones.
        plain_replica: number of this rank, and how many, among those that hold the same plain tensors: (rank, world
            size) without pipeline stages.
    """
    targets: Mapping[str, Sequence[Region]] = conversion.regions if conversion else {}
    made = [
        shard
        for name, tensor in tensors
        for shard in shards(
            name,
            tensor,
            layout,
            targets.get(name, ()) if conversion else None,
            replica=(0, 1) if hasattr(tensor, "placements") else plain_replica,
        )
    ]
    opaque = conversion.opaque if conversion else {}
    return Map(tuple(made), {name: why for name, why in opaque.items() if name in layout})


def map_of_pieces(
    pieces: Iterable[Piece], layout: Layout, *, targets: Mapping[str, Sequence[Region]] | None = None, prefix: str = ""
) -> Map:
    """The map of a reader of these pieces. Tensors that become nothing canonical (optimizer states) are left out.

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
        regions = slab(name, piece.whole, starts=piece.starts, sizes=piece.shape)
        regions = regions if targets is None else chain(regions, targets)
        shards += shards_of(piece.label, piece.shape, piece.dtype, regions, layout)
    return Map(tuple(shards))


def safetensors_pieces(directory: Path) -> list[Piece]:
    """Pieces in the safetensors files of a sharded writer; see `pieces_of`."""
    return pieces_of({path.name: read_header(path) for path in directory.glob("*.safetensors")}, directory)


def read_archived(directory: Path, piece: Piece) -> Bits:
    """The bits of one whole piece of a distributed checkpoint, in its row-major order.

    Raises:
        NotFound: its file is gone.
        Corrupt: what lies there is not this piece.
    """
    path = directory / piece.file
    descriptor = open_plain(path)
    try:
        stored = archived(descriptor, piece, path=path)
        everything = whole(piece.tensor, piece.shape)
        out = np.empty(sum(region.elements for region in everything), bits_dtype(item_size(piece.dtype)))
        for region in everything:
            read_region(descriptor, stored, wanted=region, out=out, origin=0)
    except (EOFError, OSError) as error:
        raise Corrupt(f"{path} cannot be read: {error}") from error
    finally:
        os.close(descriptor)
    return out
