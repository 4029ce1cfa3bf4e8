"""Blocks of canonical tensors: what one segment may span, and what a baseline, a checksum or a scrub works through.

A *block* is a box of one tensor, at most 16 MiB of weights. A process that publishes whole tensors has all blocks of
the layout, each of consecutive elements; one rank of many has the boxes of its own shards
(`projection.binding.blocks`). What is read (a chunk of a group with other degrees, an anchor, a base checkpoint) has
canonical coordinates, and `BlockSet` finds the blocks that it touches. `fingerprint` is the one way to sum a whole
checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.fingerprint import MASK, Bits, Vector, sum_box
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.contents import Boxes, Outlines
from dcr_daemon.codec.chunk import SEGMENT_BYTES
from dcr_daemon.codec.decode import Chunk
from dcr_daemon.task_limiter import run_limited

AT_ONCE = 32  #: batches of blocks that are summed at a time: twice as many as `runtime.Workers` has threads
BATCH_BLOCKS = 1024  #: blocks of one batch at most
_STEP = 1 << 20  #: elements whose places are held at a time

Run = Callable[[Callable[[Any], Any], Any], Coroutine[Any, Any, Any]]


@dataclass(frozen=True, slots=True)
class Block:
    """The elements of `box` in the tensor with layout index `tensor`."""

    tensor: int
    box: Box


def block_bytes(chunk_bytes: int) -> int:
    """Bytes of weights that are diffed at a time: small against an encoded chunk of `chunk_bytes`, large against the
    cost of a thread switch, and a power of two, so that tensors of any dtype are cut alike."""
    return 1 << (min(SEGMENT_BYTES, 4 * chunk_bytes).bit_length() - 1)


def split_tensor(tensor: int, spec: TensorSpec, *, limit: int = SEGMENT_BYTES) -> list[Block]:
    """A whole tensor as blocks of at most `limit` bytes, each of consecutive elements; none for an empty tensor."""
    if not spec.elements:
        return []
    return [Block(tensor, box) for box in Box.flat(0, spec.elements).split(max(1, limit // spec.width))]


def sum_block(layout: Layout, block: Block, *, bits: Bits) -> int:
    """The fingerprint sum of a block; `bits` as `sum_box` takes them. Any thread."""
    return sum_box(bits, block.box, key=int(layout.keys[block.tensor]))


async def sum_blocks(blocks: BlockSet, sum_of: Callable[[int], int], run: Run) -> list[int]:
    """The fingerprint sums of the blocks, by their number: a pass over all of them, a bounded number at a time.

    Args:
        sum_of: reads the block with this number and sums it (`sum_block`); called on any thread.
        run: calls a function on a thread, as `Workers.run` does.
    """

    def sum_batch(numbers: range) -> list[int]:
        return [sum_of(number) for number in numbers]

    sums = await run_limited((partial(run, sum_batch, numbers) for numbers in blocks.batches()), AT_ONCE)
    return [value for batch in sums for value in batch]


async def fingerprint(blocks: BlockSet, sum_of: Callable[[Block], int], run: Run) -> Vector:
    """The vector of the blocks; `sum_of` reads a block and sums it, otherwise as `sum_blocks`."""
    return blocks.vector(await sum_blocks(blocks, lambda number: sum_of(blocks[number]), run))


class BlockSet:
    """Blocks, by number. No element lies in two of them.

    Args:
        layout: the stream's.
        blocks: as `projection.binding.blocks.blocks` cuts them, or `split_tensor` whole ones.
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
        return cls(layout, (block for t, spec in enumerate(layout) for block in split_tensor(t, spec, limit=limit)))

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def __getitem__(self, number: int) -> Block:
        return self._blocks[number]

    def batches(self) -> Iterator[range]:
        """The numbers of all blocks in runs of at most `SEGMENT_BYTES` and `BATCH_BLOCKS`: work for one thread.

        A model of a million small tensors then costs some thousand hops to a thread, not a million.
        """
        first, size = 0, 0
        for number in range(len(self)):
            size += self.nbytes(number)
            if number > first and (size > SEGMENT_BYTES or number - first == BATCH_BLOCKS):
                yield range(first, number)
                first, size = number, self.nbytes(number)
        if first < len(self):
            yield range(first, len(self))

    def of(self, tensor: int) -> Sequence[int]:
        """Numbers of a tensor's blocks, in the order in which they were given."""
        return self._of[tensor]

    def elements(self, tensor: int) -> int:
        """How many elements of a tensor the blocks have."""
        return sum(self._blocks[number].box.elements for number in self._of[tensor])

    def sum(self, number: int, bits: Bits) -> int:
        """The fingerprint sum of a block with these bits."""
        return sum_block(self.layout, self._blocks[number], bits=bits)

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


def transfer(bits: Bits, source: Box, *, into: Bits, target: Box) -> int:
    """Copy the elements that lie in both boxes; returns how many.

    Args:
        bits: of `source`, in its row-major order.
        into: of `target`, likewise, of the same dtype.
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
