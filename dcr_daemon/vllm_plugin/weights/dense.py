"""Whole canonical tensors out of an anchor's safetensors files, mapped and not copied (docs/FORMAT.md 3).

Input: paths of verified files. Output: the bits of single tensors. The headers are checked again here, because a worker
that believes a wrong header would write outside a tensor. A dense load, its check, and the tensors that vLLM's loader
computes with read their values through it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from dcr_daemon.canonical.dtypes import bits_dtype
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.pieces import Piece, find_pieces
from dcr_daemon.checkpoint.safetensors import SafetensorsFile
from dcr_daemon.errors import Corrupt, Incompatible, NotFound
from dcr_daemon.vllm_plugin.weights.memory import Bits


class DenseFiles:
    """What a set of files holds of a layout; a context manager. Tensors that the layout leaves out (a tied head) are
    ignored.

    Raises:
        Corrupt: a file is absent, a header does not parse, or an entry disagrees with the layout or with its file.
    """

    def __init__(self, paths: Sequence[str], layout: Layout) -> None:
        self._layout = layout
        self._pieces: dict[int, list[tuple[SafetensorsFile, Piece]]] = {}
        with contextlib.ExitStack() as opened:
            for path in paths:
                try:
                    file = opened.enter_context(SafetensorsFile(Path(path)))
                    for piece in find_pieces(file, layout, skip_unknown=True):
                        self._pieces.setdefault(piece.tensor, []).append((file, piece))
                except (Corrupt, Incompatible, NotFound) as error:
                    raise Corrupt(f"anchor file {path}: {error.message}", hint="fetch the anchor again") from error
            self._opened = opened.pop_all()

    def missing(self, tensors: Sequence[int]) -> list[str]:
        """Names of those of `tensors` that the files do not hold in full."""
        return [self._layout[t].name for t in tensors if self._held(t) != self._layout[t].elements]

    def _held(self, tensor: int) -> int:
        return sum(piece.entry.elements for _, piece in self._pieces.get(tensor, ()))

    def bits(self, tensor: int) -> Bits:
        """A tensor's bits, flat: a view of the map where it is stored whole and aligned, else joined in host memory."""
        spec, pieces = self._layout[tensor], self._pieces.get(tensor, [])
        if len(pieces) == 1 and pieces[0][1].whole(self._layout):
            return pieces[0][0].bits(spec.name)
        joined = np.empty(spec.elements, dtype=bits_dtype(spec.width))
        for file, piece in pieces:
            if piece.box is not None:
                piece.box.view(joined)[...] = file.bits(piece.entry.name).reshape(piece.box.shape)
        return joined

    def close(self) -> None:
        """Close the files. Views that are still in use keep their maps."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
