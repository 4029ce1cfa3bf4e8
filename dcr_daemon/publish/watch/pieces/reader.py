"""Reads tensors of a checkpoint in pieces: any flat range, put together from the pieces that hold some of it.

No tensor is ever assembled: a range of 16 MiB costs its size, a block of the file, and the table of an archive. Each
read opens the file anew and checks that it is still the one that was found complete. So a checkpoint of a thousand
files needs few file descriptors, and a file that is rewritten never gets into a version.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dcr_daemon.canonical.dtypes import bits_dtype, item_size
from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import TensorSpec
from dcr_daemon.canonical.region import intersect_dst
from dcr_daemon.checkpoint.safetensors import open_plain
from dcr_daemon.errors import Corrupt, Incompatible, NotFound
from dcr_daemon.projection.files.piece_map import Piece
from dcr_daemon.projection.files.storage import StoredPiece, archived, plain, read_region
from dcr_daemon.publish.inputs.cast import cast_bits
from dcr_daemon.publish.inputs.sources import SourceChanged
from dcr_daemon.publish.watch.file_identity import FileIdentity, identity_of
from dcr_daemon.publish.watch.pieces.fit import Part, PiecedTensor


class ContentMismatch(SourceChanged):
    """A file is the one that was found complete, but does not hold what the checkpoint's table says. Reading it
    again is of no use before somebody writes it again."""

    kind = "NotAsPromised"


@dataclass(frozen=True, slots=True)
class PieceFiles:
    """The files of one checkpoint, as they were found complete.

    Attributes:
        directory: of the checkpoint.
        identities: what each file must still be, by its name in the directory.
        archives: whether pieces are torch archives; else they are tensors of safetensors files.
    """

    directory: Path
    identities: Mapping[str, FileIdentity]
    archives: bool
    _stored: dict[tuple[str, int, str], StoredPiece] = field(default_factory=dict, repr=False)

    def read(self, part: Part, start: int, out: Bits) -> None:
        """Copy what `part` has of the tensor's elements from `start` on into `out`, bits of the piece's dtype.

        Raises:
            SourceChanged: the file is not the same any more, or cannot be read.
        """
        boxes = intersect_dst(part.region, start, start + out.size)
        if not boxes:
            return
        path = self.directory / part.piece.file
        with self._opened(path, part.piece.file) as descriptor:
            try:
                stored = self._place(descriptor, part.piece, path)
                for box in boxes:
                    read_region(descriptor, stored, wanted=box, out=out, origin=start)
            except (EOFError, OSError) as error:
                raise SourceChanged(f"{path} cannot be read to its end: {error}") from error

    @contextlib.contextmanager
    def _opened(self, path: Path, name: str) -> Iterator[int]:
        try:
            descriptor = open_plain(path)
        except (NotFound, Incompatible) as error:
            raise SourceChanged(f"{path} was taken away: {error.message}") from error
        try:
            if identity_of(name, os.fstat(descriptor)) != self.identities[name]:
                raise SourceChanged(f"{path} was changed while it was read", hint="it is tried again when complete")
            yield descriptor
        finally:
            os.close(descriptor)

    def _place(self, descriptor: int, piece: Piece, path: Path) -> StoredPiece:
        key = piece.file, piece.span[0], piece.tensor
        if (known := self._stored.get(key)) is None:
            try:
                known = archived(descriptor, piece, path=path) if self.archives else plain(piece)
            except Corrupt as error:
                raise ContentMismatch(error.message, hint="write the checkpoint again") from error
            self._stored[key] = known
        return known


class PiecedSource:
    """One tensor in pieces, as a `Source`. The pieces must hold every element exactly once, as `PieceFit` has them."""

    def __init__(self, files: PieceFiles, tensor: PiecedTensor) -> None:
        self.given: TensorSpec = tensor.given
        self._files, self._parts = files, tensor.parts

    def read(self, start: int, count: int, dtype: str) -> Bits:
        """`count` elements from number `start`, as bits of `dtype`; called on any thread.

        Raises:
            SourceChanged: a file changed, is gone, or does not hold what it should.
        """
        out = np.empty(count, bits_dtype(item_size(self.given.dtype)))
        for part in self._parts:
            if part.region.dst < start + count and start <= part.region.dst_last:
                self._files.read(part, start, out)
        return cast_bits(out, self.given.dtype, canonical=dtype)
