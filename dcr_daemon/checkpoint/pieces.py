"""How a version is cut into files that one PUT can carry, and joined again (docs/FORMAT.md 3, anchors).

A tensor that fits is stored under its own name. A larger one, or a box that one rank of many owns, is stored as
entries `name#n`; the file's `__metadata__` maps each such entry to the JSON `[name, dst, shape, dst_strides]`.
Publishers plan and write the files; restore, the engines and `dcr verify` read them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

import msgspec

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.safetensors import SafetensorsBytes, SafetensorsFile
from dcr_daemon.errors import Corrupt
from dcr_daemon.untrusted import decode_json

_places = msgspec.json.Decoder(tuple[str, int, tuple[int, ...], tuple[int, ...]])


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements of `box` in canonical tensor `tensor`, stored as `entry`; no box for an empty tensor."""

    tensor: int
    box: Box | None
    entry: TensorSpec

    @property
    def run(self) -> slice:
        """The canonical elements, where they follow each other."""
        return slice(self.box.dst, self.box.dst + self.box.elements) if self.box else slice(0, 0)

    def whole(self, layout: Layout) -> bool:
        return self.entry.name == layout[self.tensor].name


def plan_files(layout: Layout, limit: int) -> list[list[Piece]]:
    """Cut `layout` into files of at most `limit` bytes of tensors each, in layout order."""
    return _packed((piece for tensor in range(len(layout)) for piece in _cut(layout, tensor, limit)), limit)


def plan_boxes(layout: Layout, boxes: Iterable[tuple[int, Box]], *, limit: int) -> list[list[Piece]]:
    """Boxes of canonical tensors, `(layout index, box)`, as files of at most `limit` bytes each, in their order.

    Entries are numbered per tensor. A number distinguishes the entries of one rank's files; other ranks may use the
    same ones.
    """
    numbers: defaultdict[int, Iterator[int]] = defaultdict(count)
    return _packed((_piece(layout, t, box=box, number=next(numbers[t])) for t, box in boxes), limit)


def _packed(pieces: Iterable[Piece], limit: int) -> list[list[Piece]]:
    files: list[list[Piece]] = [[]]
    room = limit
    for piece in pieces:
        if piece.entry.nbytes > room and files[-1]:
            files.append([])
            room = limit
        files[-1].append(piece)
        room -= piece.entry.nbytes
    return files


def _cut(layout: Layout, tensor: int, limit: int) -> Iterator[Piece]:
    spec = layout[tensor]
    if spec.nbytes <= limit:
        yield Piece(tensor, Box.flat(0, spec.elements) if spec.elements else None, spec)
        return
    for n, box in enumerate(Box.flat(0, spec.elements).split(max(1, limit // spec.width))):
        yield _piece(layout, tensor, box=box, number=n)


def _piece(layout: Layout, tensor: int, *, box: Box, number: int) -> Piece:
    spec, mark = layout[tensor], "#"
    while f"{spec.name}{mark}{number}" in layout:  # a tensor may itself have such a name
        mark += "#"
    return Piece(tensor, box, TensorSpec(f"{spec.name}{mark}{number}", spec.dtype, (box.elements,)))


def piece_metadata(layout: Layout, pieces: list[Piece]) -> dict[str, str]:
    """The `__metadata__` of a file of `pieces`."""
    table = {"format": "pt"}
    for piece in pieces:
        if piece.box and not piece.whole(layout):
            box = piece.box
            place = [layout[piece.tensor].name, box.dst, list(box.shape), list(box.strides)]
            table[piece.entry.name] = json.dumps(place, separators=(",", ":"), ensure_ascii=False)
    return table


def read_pieces(file: SafetensorsFile | SafetensorsBytes, layout: Layout) -> Iterator[tuple[int, Box | None, Bits]]:
    """Every entry of an anchor file as `(tensor, box, bits)`; `box` is None for an empty tensor.

    Raises:
        Corrupt: an entry that is neither a tensor of the layout nor a well-placed piece of one.
    """
    for piece in find_pieces(file, layout):
        yield piece.tensor, piece.box, file.bits(piece.entry.name)


def find_pieces(
    file: SafetensorsFile | SafetensorsBytes, layout: Layout, *, skip_unknown: bool = False
) -> Iterator[Piece]:
    """Every entry of an anchor file, from its header alone; `skip_unknown` leaves out tensors not in the layout.

    Raises:
        Corrupt: an entry that is neither a tensor of the layout nor a well-placed piece of one.
    """
    for entry in file.specs:
        if skip_unknown and entry.name not in layout and entry.name not in file.metadata:
            continue
        # Metadata has other keys too ("format"), and a tensor may have such a name: its own name comes first.
        name, box = (entry.name, None) if entry.name in layout else _place(file, entry)
        if name not in layout:
            if skip_unknown:
                continue
            raise Corrupt(f"{file.path}: {name} is not in the stream's layout")
        tensor = layout.index(name)
        spec = layout[tensor]
        if box is None:
            if entry != spec:
                raise Corrupt(f"{file.path}: {name} is {entry.dtype} {entry.shape}, not {spec.dtype} {spec.shape}")
            box = Box.flat(0, spec.elements) if spec.elements else None
        elif entry.dtype != spec.dtype or not box.fits(spec.elements) or box.elements != entry.elements:
            raise Corrupt(f"{file.path}: {entry.name} is no piece of {name}")
        yield Piece(tensor, box, entry)


def _place(file: SafetensorsFile | SafetensorsBytes, entry: TensorSpec) -> tuple[str, Box]:
    if entry.name not in file.metadata:
        raise Corrupt(f"{file.path}: {entry.name} is not in the stream's layout")
    try:
        name, dst, shape, strides = decode_json(_places, file.metadata[entry.name].encode())
        return name, Box(dst, shape, strides)
    except ValueError as error:
        raise Corrupt(f"{file.path}: the place of {entry.name} does not parse: {error}") from error
