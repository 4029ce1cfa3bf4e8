"""Finds which elements of weights a copy holds, so that it can be written again whenever they change.

Runs in the worker process: `audit` calls `locate` at attach with tensors that are copies of weights, and `replay`
writes them after each write of weights. A copy may hold a whole weight, a part of it, several joined, with its axes in
any order, or cast. So a line of the copy is looked for in the memory of the weights, then the neighbours of this line
along the other axes: their distances are the strides in the weight. The largest box of the copy for which these strides
are right is one piece; what is left of the copy is located in the same way.

Promises: each element of the copy lies in one piece, and at the time of the search has the bits of its source. A piece
begins with a line that is in only one place of all weights, and so is its last line unless it is constant (padding), so
that another weight of equal content is not mistaken for the source (experts that begin as copies of one another). A
copy that is not understood is None.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from dcr_daemon.vllm_plugin.loader.computed import same_bits
from dcr_daemon.vllm_plugin.loader.line_search import BITS, LINE, Search, search, tells
from dcr_daemon.vllm_plugin.loader.reachable import whole

PIECES = 16  #: pieces of one copy


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a copy and its source: views of live memory, of equal shape. `parameter` holds the source."""

    target: torch.Tensor
    source: torch.Tensor
    parameter: str


@dataclass(frozen=True, slots=True)
class WeightCopy:
    """A copy of weights at `path`, the parameters it came from, and its pieces."""

    path: str
    sources: frozenset[str]
    pieces: tuple[Piece, ...]

    def write(self) -> None:
        """Copy all pieces from live weights again. Allocates nothing."""
        with torch.no_grad():
            for piece in self.pieces:
                piece.target.copy_(piece.source)

    def holds(self) -> bool:
        """Whether the copy has the bits that `write` would give it."""
        return all(_equal(piece.target, piece.source) for piece in self.pieces)


def locate(path: str, copy: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> WeightCopy | None:
    """Where all elements of `copy` came from; None if that cannot be told."""
    pieces: list[Piece] = []
    todo = [copy.detach()]
    while todo:
        part = todo.pop()
        piece = _largest(part, weights) if len(pieces) < PIECES and part.dtype in BITS and part.numel() else None
        if piece is None:
            return None
        pieces.append(piece)
        todo += _rest(part, piece.target.shape)
    return WeightCopy(path, frozenset(piece.parameter for piece in pieces), tuple(pieces))


def _largest(part: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> Piece | None:
    """The largest piece that begins where `part` does."""
    for axis in range(part.dim()):  # the one along which the source's elements are consecutive
        if part.shape[axis] >= LINE and (piece := _along(part.movedim(axis, -1), weights)) is not None:
            return Piece(piece.target.movedim(-1, axis), piece.source.movedim(-1, axis), piece.parameter)
    return None


def _along(part: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> Piece | None:
    """The piece, if the last axis of `part` is consecutive in the source."""
    others = part.shape[:-1]
    wide = [axis for axis, size in enumerate(others) if size > 1]
    corners = [[0] * len(others), *([int(a == axis) for a in range(len(others))] for axis in wide)]
    first, *next_ones = _find([part[(*at, slice(0, LINE))] for at in corners], weights)
    if len(first) != 1:
        return None
    name, start = first[0]
    flat = whole(weights[name])
    shape, strides = [1] * len(others), [0] * len(others)
    for axis, found in zip(wide, next_ones, strict=True):
        lines = part[tuple(slice(None) if a == axis else 0 for a in range(len(others)))][:, :LINE]
        for stride in {place - start for other, place in found if other == name and place > start}:
            if (length := _steps(lines, flat, start=start, stride=stride)) > shape[axis]:
                shape[axis], strides[axis] = length, stride
    row = part[(*corners[0],)]
    shape.append(_common(row, flat[start : start + len(row)]))
    strides.append(1)
    if start + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) >= flat.numel():
        return None
    piece = Piece(part[tuple(map(slice, shape))], flat.as_strided(shape, strides, start), name)
    last = piece.target[(*(size - 1 for size in shape[:-1]), slice(-LINE, None))]
    sole = not tells(last) or len(_find([last], weights)[0]) == 1
    return piece if sole and _equal(piece.target, piece.source) else None


def _find(lines: Sequence[torch.Tensor], weights: Mapping[str, torch.Tensor]) -> list[list[tuple[str, int]]]:
    """The places of each line in all weights; none of a line that cannot be told from others, or if some were not
    looked at."""
    wanted = Search(torch.stack(list(lines)))
    search(weights, [wanted])
    places = wanted.found if not wanted.partial else {}
    return [places.get(number, []) if tells(line) else [] for number, line in enumerate(lines)]


def _steps(lines: torch.Tensor, flat: torch.Tensor, *, start: int, stride: int) -> int:
    """How many of the lines follow one another in a weight, `stride` places apart."""
    most = min(len(lines), (flat.numel() - LINE - start) // stride + 1)
    return _common(lines[:most], flat.as_strided((most, LINE), (stride, 1), start))


def _common(one: torch.Tensor, source: torch.Tensor) -> int:
    """How many entries at the beginning of two tensors are equal, after a cast of the second."""
    count = min(len(one), len(source))
    bits = BITS[one.dtype]
    differ = one[:count].contiguous().view(bits) != source[:count].to(one.dtype).contiguous().view(bits)
    rows = differ.reshape(count, -1).any(dim=1).nonzero()
    return int(rows[0]) if len(rows) else count


def _equal(target: torch.Tensor, source: torch.Tensor) -> bool:
    return same_bits(target.contiguous(), source.to(target.dtype).contiguous())


def _rest(part: torch.Tensor, done: Sequence[int]) -> Iterator[torch.Tensor]:
    """What is left of `part` without the box of shape `done` at its beginning, as boxes."""
    for axis, (size, end) in enumerate(zip(part.shape, done, strict=True)):
        if end < size:
            before = [slice(0, stop) for stop in itertools.islice(done, axis)]
            yield part[(*before, slice(end, None))]
