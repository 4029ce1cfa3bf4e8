"""Whole checkpoints on disk: joined from the files of an anchor or a base, and summed.

The result is a plain Hugging Face checkpoint, however the files were cut (docs/FORMAT.md 3, anchors). The caller
compares its vector with the seal's afterwards.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.dtypes import bits_dtype
from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.blocks import Block, sum_block
from dcr_daemon.checkpoint.directory import Checkpoint, read_side_files, write_checkpoint
from dcr_daemon.checkpoint.pieces import read_pieces
from dcr_daemon.checkpoint.safetensors import SafetensorsFile
from dcr_daemon.errors import EngineRefused
from dcr_daemon.wording import shorten

Piece = tuple[Box | None, Bits]


def build_checkpoint(out: Path, layout: Layout, *, files: Sequence[Path], shard_bytes: int) -> None:
    """Write the tensors of `files`, whole or in pieces, as a plain checkpoint in the new directory `out`.

    Side files (config, tokenizer) that lie beside the first of `files` go with them.

    Raises:
        EngineRefused: tensors of the layout are not in the files, or only in part.
        Corrupt: a file is damaged, or holds what is not in the layout.
        ResourceExhausted: the disk is full; nothing is left behind.
    """
    shutil.rmtree(out, ignore_errors=True)
    with contextlib.ExitStack() as opened:
        pieces = dict[int, list[Piece]]()
        for path in files:
            file = opened.enter_context(SafetensorsFile(path))
            for tensor, box, bits in read_pieces(file, layout):
                pieces.setdefault(tensor, []).append((box, bits))
        _check_whole(layout, pieces)
        side_files = read_side_files(files[0].parent) if files else {}
        write_checkpoint(
            out,
            layout,
            bits_of=lambda name: _join(layout, layout.index(name), pieces),
            side_files=side_files,
            shard_bytes=shard_bytes,
        )


def _check_whole(layout: Layout, pieces: Mapping[int, list[Piece]]) -> None:
    absent = [
        spec.name
        for tensor, spec in enumerate(layout)
        if sum(bits.size for _, bits in pieces.get(tensor, ())) != spec.elements  # no rank owns an empty tensor
    ]
    if absent:
        raise EngineRefused(f"the files given do not hold all of {shorten(absent)}")


def _join(layout: Layout, tensor: int, pieces: Mapping[int, list[Piece]]) -> Bits:
    spec, parts = layout[tensor], pieces.get(tensor, ())
    if len(parts) == 1 and (parts[0][0] is None or parts[0][0] == Box.flat(0, spec.elements)):
        return parts[0][1]
    whole = np.zeros(spec.elements, dtype=bits_dtype(spec.width))
    for box, bits in parts:
        if box is not None:
            box.view(whole)[...] = bits.reshape(box.shape)
    return whole


def sum_read(checkpoint: Checkpoint, layout: Layout, block: Block) -> int:
    """The sum of a block of consecutive elements; any thread.

    It is read and not mapped: the map of a file that shrank, or of a hole on a full tmpfs, ends the process.

    Raises `Corrupt` if the file has shrunk.
    """
    name = layout[block.tensor].name
    bits = checkpoint.file(name).read(name, block.box.dst, block.box.elements)
    return sum_block(layout, block, bits=bits)
