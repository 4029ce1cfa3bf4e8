"""A share: the blocks of the canonical tensors that one rank of a publisher is the source of, and keeps a baseline of.

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
from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.codec.chunk import SEGMENT_BYTES

_STEP = 1 << 20  #: elements whose places are held at a time
_SPARSE = 4  #: how many times a box's elements are read for it at one go
_SMALL = 1 << 16  #: elements


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


class Share:
    """Blocks, by number. No element lies in two of them.

    Args:
        layout: the stream's.
        blocks: as `projection.reader.blocks` cuts them, or `runs` of whole tensors.
    """

    def __init__(self, layout: Layout, blocks: Iterable[Block]) -> None:
        self.layout = layout
        self.blocks: Sequence[Block] = tuple(blocks)
        self._of: list[list[int]] = [[] for _ in layout]
        for number, block in enumerate(self.blocks):
            self._of[block.tensor].append(number)

    @classmethod
    def whole(cls, layout: Layout, limit: int = SEGMENT_BYTES) -> Share:
        """All of the layout, cut into runs of at most `limit` bytes."""
        return cls(layout, (block for t, spec in enumerate(layout) for block in runs(t, spec, limit)))

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, number: int) -> Block:
        return self.blocks[number]

    def of(self, tensor: int) -> Sequence[int]:
        """Numbers of a tensor's blocks, in the order in which they were given."""
        return self._of[tensor]

    def elements(self, tensor: int) -> int:
        """How many elements of a tensor the share has."""
        return sum(self.blocks[number].box.elements for number in self._of[tensor])

    def touching(self, tensor: int, box: Box) -> Iterator[int]:
        """Numbers of the blocks of a tensor that may hold elements of `box`."""
        for number in self._of[tensor]:
            mine = self.blocks[number].box
            if mine.dst <= box.last and box.dst <= mine.last:
                yield number

    @cached_property
    def complete(self) -> bool:
        """Whether it is all of the layout, since no element is in two blocks."""
        return all(self.elements(tensor) == spec.elements for tensor, spec in enumerate(self.layout))

    def nbytes(self, number: int) -> int:
        block = self.blocks[number]
        return block.box.elements * self.layout[block.tensor].width

    @cached_property
    def number(self) -> dict[Block, int]:
        """The number of each block."""
        return {block: number for number, block in enumerate(self.blocks)}

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the blocks in their order: baselines of equal shares are laid out alike, and no others."""
        table = hashlib.sha256()
        for block in self.blocks:
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


def gather(read: Callable[[int, int], Bits], box: Box) -> Bits:
    """Lanes of a box in its own order, where whole runs are all that can be read: `read(first, count)`.

    Rows that lie close together are read at one go; never much more than the box itself is held.
    """
    if box.contiguous:
        return read(box.dst, box.elements)
    span = box.last - box.dst + 1
    if span <= max(_SPARSE * box.elements, _SMALL):
        lanes = read(box.dst, span)
        strides = tuple(stride * lanes.itemsize for stride in box.strides)
        return np.ascontiguousarray(np.lib.stride_tricks.as_strided(lanes, box.shape, strides)).reshape(-1)
    axis = int(np.argmax([(n - 1) * stride for n, stride in zip(box.shape, box.strides, strict=True)]))
    shape, strides = list(box.shape), box.strides
    shape[axis] = 1
    rows = [gather(read, Box(box.dst + i * strides[axis], tuple(shape), strides)) for i in range(box.shape[axis])]
    return np.ascontiguousarray(np.concatenate([row.reshape(shape) for row in rows], axis=axis)).reshape(-1)
