"""The blocks of the canonical tensors that one rank of a publisher is the source of, and keeps a baseline of.

A *block* is what one segment may span: a box of one tensor, at most 16 MiB of weights. A process that publishes whole
tensors has all of the layout, as runs; a rank of many has the boxes of its own shards. What is read (a chunk of a group
with other degrees, an anchor, a base checkpoint) has canonical coordinates, and the blocks pick out what is theirs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.fingerprint import MASK, Bits, Vector, sum_box
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.contents import Boxes, Outlines
from dcr_daemon.codec.chunk import SEGMENT_BYTES
from dcr_daemon.codec.decode import Chunk

_STEP = 1 << 20  #: elements whose places are held at a time
_GAP = 1 << 14  #: elements between two rows that are read over
_SCRATCH = 1 << 21  #: elements read at one go


@dataclass(frozen=True, slots=True)
class Block:
    """The elements of `box` in the tensor with layout index `tensor`."""

    tensor: int
    box: Box


def block_bytes(chunk_bytes: int) -> int:
    """Bytes of weights that are diffed at one go: small against a chunk of `chunk_bytes` once encoded, large against a
    hop to a thread, and a power of two, so that runs of any dtype are cut alike."""
    return 1 << (min(SEGMENT_BYTES, 4 * chunk_bytes).bit_length() - 1)


def runs(tensor: int, spec: TensorSpec, limit: int) -> Iterator[Block]:
    """A whole tensor as blocks of at most `limit` bytes; none for an empty tensor."""
    step = max(1, limit // spec.width)
    for start in range(0, spec.elements, step):
        yield Block(tensor, Box.flat(start, min(step, spec.elements - start)))


class BlockSet:
    """Blocks, by number. No element lies in two of them.

    Args:
        layout: the stream's.
        blocks: as `projection.reader.blocks` cuts them, or `runs` of whole tensors.
    """

    def __init__(self, layout: Layout, blocks: Iterable[Block]) -> None:
        self.layout = layout
        self._blocks: Sequence[Block] = tuple(blocks)
        self._of: list[list[int]] = [[] for _ in layout]
        for number, block in enumerate(self._blocks):
            self._of[block.tensor].append(number)

    @classmethod
    def whole(cls, layout: Layout, limit: int = SEGMENT_BYTES) -> BlockSet:
        """All of the layout, cut into runs of at most `limit` bytes."""
        return cls(layout, (block for t, spec in enumerate(layout) for block in runs(t, spec, limit)))

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def __getitem__(self, number: int) -> Block:
        return self._blocks[number]

    def of(self, tensor: int) -> Sequence[int]:
        """Numbers of a tensor's blocks, in the order in which they were given."""
        return self._of[tensor]

    def elements(self, tensor: int) -> int:
        """How many elements of a tensor the blocks have."""
        return sum(self._blocks[number].box.elements for number in self._of[tensor])

    def sum(self, number: int, bits: Bits) -> int:
        """The fingerprint of a block whose lanes are `bits`."""
        block = self._blocks[number]
        return sum_box(bits, block.box, int(self.layout.keys[block.tensor]))

    def vector(self, sums: Iterable[int]) -> Vector:
        """The vector of the blocks, from the sums of its blocks in their order."""
        vector = [0] * len(self.layout)
        for block, value in zip(self._blocks, sums, strict=True):
            vector[block.tensor] = (vector[block.tensor] + value) & MASK
        return np.array(vector, dtype=np.uint64)

    def touching(self, tensor: int, box: Box) -> Iterator[int]:
        """Numbers of the blocks of a tensor that may hold elements of `box`."""
        for number in self._of[tensor]:
            if not box.apart(self._blocks[number].box):
                yield number

    @cached_property
    def boxes(self) -> Boxes:
        """All blocks, to be compared with what objects hold."""
        return Boxes([(block.tensor, block.box) for block in self._blocks])

    def segments(self, chunk: Chunk) -> list[int]:
        """Numbers of the segments of a chunk that may change something in the blocks."""
        if self.complete:
            return list(range(len(chunk)))
        table = chunk.table
        reach = (table.shape.astype(np.int64) - 1) * table.strides.astype(np.int64)
        first = table.dst.astype(np.int64)
        ends = np.cumsum(table.rank, dtype=np.int64)
        last = first + np.add.reduceat(reach, ends - table.rank)
        none = np.zeros_like(first)
        outlines = Outlines(table.tensor.astype(np.int64), first, last, none, none, none)
        return [int(n) for n in np.flatnonzero(self.boxes.touched(outlines))]

    @cached_property
    def complete(self) -> bool:
        """Whether it is all of the layout, since no element is in two blocks."""
        return all(self.elements(tensor) == spec.elements for tensor, spec in enumerate(self.layout))

    def nbytes(self, number: int) -> int:
        block = self._blocks[number]
        return block.box.elements * self.layout[block.tensor].width

    @cached_property
    def number(self) -> dict[Block, int]:
        """The number of each block."""
        return {block: number for number, block in enumerate(self._blocks)}

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the blocks in their order: baselines of equal blocks have the same bytes, and no others."""
        table = hashlib.sha256()
        for block in self._blocks:
            table.update(f"{block.tensor} {block.box.dst} {block.box.shape} {block.box.strides}\n".encode())
        return table.hexdigest()


def transfer(bits: Bits, source: Box, into: Bits, target: Box) -> int:
    """Copy the elements that lie in both boxes; how many they are.

    Args:
        bits: lanes of `source` in its own row-major order.
        into: lanes of `target`, likewise, of the same dtype.
    """
    if source.contiguous and target.contiguous:
        first, last = max(source.dst, target.dst), min(source.last, target.last)
        if first > last:
            return 0
        into[first - target.dst : last + 1 - target.dst] = bits[first - source.dst : last + 1 - source.dst]
        return last + 1 - first
    if source == target:
        into[:] = bits
        return target.elements
    copied = 0
    for start in range(0, target.elements, _STEP):
        places = np.arange(start, min(start + _STEP, target.elements), dtype=np.int64)
        inside, ordinals = source.ordinals(target.canonical(places))
        into[places[inside]] = bits[ordinals]
        copied += ordinals.size
    return copied


def gather(read: Callable[[int, int], Bits], box: Box, out: Bits | None = None) -> Bits:
    """Lanes of a box in its own order, where whole runs are all that can be read: `read(first, count)`.

    Rows that lie close together are read with what is between them, which costs less than a read of each (a disk's
    pages and read-ahead would bring it anyway); what is further apart is read by itself. No more than `_SCRATCH`
    elements are held beside the box.

    Args:
        out: where to; lanes [elements] of the box. New ones by default.
    """
    if out is None:
        if box.contiguous:
            return read(box.dst, box.elements)
        out = np.empty(box.elements, dtype=read(box.dst, 1).dtype)
    # By falling stride, so that the first axis is the outermost in the tensor; those of one place say nothing.
    order = sorted(range(len(box.shape)), key=lambda i: (box.shape[i] == 1, -box.strides[i]))
    axes = [(box.shape[i], box.strides[i]) for i in order if box.shape[i] > 1]
    shaped = out.reshape(box.shape).transpose(order)
    while shaped.ndim > len(axes):
        shaped = shaped[..., 0]
    _fill(read, box.dst, axes, shaped)
    return out


def _fill(read: Callable[[int, int], Bits], first: int, axes: list[tuple[int, int]], out: Bits) -> None:
    """Read elements from `first` on along `axes`, `(places, stride)` by falling stride, into an array of that shape."""
    if not axes:
        out[...] = read(first, 1)[0]
        return
    (n, stride), inner = axes[0], axes[1:]
    span = 1 + sum((places - 1) * step for places, step in inner)
    if _close(axes) and span <= _SCRATCH:
        most = min(n, max(1, (_SCRATCH - span) // stride + 1))
        for at in range(0, n, most):
            part = out[at : at + most]
            lanes = read(first + at * stride, (part.shape[0] - 1) * stride + span)
            steps = [step * lanes.itemsize for _, step in axes]
            part[...] = np.lib.stride_tricks.as_strided(lanes, part.shape, steps)
        return
    for at in range(n):
        _fill(read, first + at * stride, inner, out[at])


def _close(axes: list[tuple[int, int]]) -> bool:
    """Whether all places along the axes are so near each other that they are read together."""
    span = 1
    for n, stride in reversed(axes):
        if stride - span > _GAP:
            return False
        span += (n - 1) * stride
    return True
