"""The canonical values of the last sealed version that one rank is the source of, in memory.

It holds one block after the other, each in its own row-major order. While an attempt is being diffed, the bytes run
ahead of the version; only `commit` moves the version, only undo restores the bytes. A copy in a file (`cache`) outlives
the process. It follows between updates, and only when the chunks since the last copy outweigh a share of it: a start
from a file that is versions behind takes the chain from there.

One sum per block is kept beside the vector, so that any block can be checked by itself while no attempt is under way
(must P4). An *unverified base*: the bytes do not equal the version, and the version can no longer be built. Their own
fingerprint is known, so the next version can still be diffed from them, and brings every element to its true value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.dtypes import bits_dtype
from dcr_daemon.canonical.fingerprint import MASK, Bits, Vector, advance
from dcr_daemon.canonical.layout import Layout, describe_difference
from dcr_daemon.checkpoint.blocks import Block, BlockSet, sum_blocks, transfer
from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.checkpoint.reader import CheckpointReader
from dcr_daemon.codec.chunk import Segment
from dcr_daemon.codec.decode import Chunk
from dcr_daemon.errors import Corrupt, Incompatible
from dcr_daemon.publish.baseline.cache import BaselineCache, Hint
from dcr_daemon.runtime import Workers
from dcr_daemon.task_limiter import TaskLimiter
from dcr_daemon.wording import shorten

ALIGNMENT = 64  #: bytes; every block begins on a cache line of its own


#: the file follows when the chunks since the last copy are this share of it: at most twice their bytes are written
SAVE_SHARE = 0.5


class Baseline:
    """Bytes of one version.

    Args:
        directory: of the state; `baseline.bin` and `baseline.json` lie in it.
        blocks: what is kept of the stream's layout.
        stream: its random id.
        workers: for passes over all bytes.

    Raises:
        ResourceExhausted: the disk cannot hold a dense copy of the model.
    """

    def __init__(self, directory: Path, blocks: BlockSet, stream: str, workers: Workers) -> None:
        self.blocks, self.layout = blocks, blocks.layout
        self.version: int | None = None
        self.unverified_base = False
        self.stream, self._workers = stream, workers
        self._sums = [0] * len(blocks)
        self._vector = np.zeros(len(self.layout), dtype=np.uint64)
        offsets, size = _offsets(blocks)
        self._cache = BaselineCache(directory, size)
        self.new = self._cache.new  #: there is no file to begin from
        self._unsaved = self._cache.size  #: bytes of chunks since the file was last written, or was about to be
        self._saving: tuple[int, int] | None = None  #: the version that is being copied, and where the next span begins
        self._bits = [
            np.frombuffer(
                self._cache.memory, dtype=bits_dtype(self.layout[b.tensor].width), count=b.box.elements, offset=offset
            )
            for b, offset in zip(blocks, offsets, strict=True)
        ]

    def __getitem__(self, number: int) -> Bits:
        """The bits of a block, by its number, as unsigned integers [elements]; writable."""
        return self._bits[number]

    def name(self, number: int) -> str:
        """The tensor that a block is of."""
        return self.layout[self.blocks[number].tensor].name

    def locate(self, segment: Segment, ordinals: npt.NDArray[np.int64]) -> tuple[Bits, npt.NDArray[np.int64]]:
        """The bits of the block that a segment of this rank changed, and where in them (the ordinals) the changes
        are."""
        return self[self.blocks.number[Block(segment.tensor, segment.box)]], ordinals

    def read(self, tensor: int, start: int, count: int) -> Bits:
        """Consecutive elements of a tensor of which all are held, as unsigned integers [count]."""
        if not count:
            return np.empty(0, dtype=bits_dtype(self.layout[tensor].width))
        return self.read_box(tensor, Box.flat(start, count))

    def read_box(self, tensor: int, box: Box) -> Bits:
        """The bits of a box of which all is held, in the box's row-major order; a view if it is a block, else a
        copy."""
        number = self.blocks.number.get(Block(tensor, box))
        if number is not None:
            return self[number]
        out = np.empty(box.elements, dtype=bits_dtype(self.layout[tensor].width))
        held = sum(
            transfer(self[n], self.blocks[n].box, into=out, target=box) for n in self.blocks.touching(tensor, box)
        )
        assert held == box.elements
        return out

    @property
    def vector(self) -> Vector:
        """Fingerprint of what the map holds at `version`, over its blocks alone, carried along by commits. A copy."""
        return self._vector.copy()

    def hint(self) -> tuple[int, Vector] | None:
        """The version of the file, and its vector, if that is known. To be verified by `prove`."""
        hint = self._cache.hint()
        if hint is None:
            return None
        try:
            vector = np.frombuffer(bytes.fromhex(hint.vector), dtype="<u8")
        except ValueError:
            return None
        known = self.stream, self.layout.digest, self.blocks.digest, len(self.layout)
        if (hint.stream, hint.layout, hint.share, vector.size) != known:
            return None
        return hint.version, vector

    def begin(self) -> None:
        """The bytes are about to run ahead of their version: a copy that was begun is void."""
        self._saving = None

    def commit(self, version: int, segments: Iterable[Segment], *, size: int = 0) -> None:
        """Move to `version`, which was sealed with exactly these segments of the blocks, in chunks of `size` bytes."""
        segments = list(segments)
        for segment in segments:
            number = self.blocks.number[Block(segment.tensor, segment.box)]
            self._sums[number] = (self._sums[number] + segment.after - segment.before) & MASK
        self.version, self.unverified_base = version, False
        self._vector = advance(self._vector, segments)
        self._unsaved += size

    async def prove(self, *candidates: tuple[int, Vector]) -> Vector:
        """Sum the bytes as they are, and adopt the first candidate whose vector that is. Returns the vector found."""
        sums = await self._measure()
        found = self.blocks.vector(sums)
        for version, vector in candidates:
            if np.array_equal(found, vector):
                self.version, self._vector, self._sums, self.unverified_base = version, found, sums, False
                self._unsaved = 0 if self._saved else self._cache.size
                break
        return found

    async def adopt_unverified(self, version: int, *, unverified_base: bool = False) -> None:
        """Use the bytes as they are as the base of the next version, without a vector to compare them with.

        Args:
            unverified_base: the bytes are not those of `version`, and nothing in the bucket leads to it any more.
        """
        self.begin()
        sums = await self._measure()
        self.version, self.unverified_base = version, unverified_base
        self._vector, self._sums, self._unsaved = self.blocks.vector(sums), sums, self._cache.size

    async def restored(self) -> bool:
        """After an undo: whether the bytes, by their full fingerprint, are those of `version` again."""
        return self.version is not None and await self._measure() == self._sums

    async def intact(self, number: int) -> bool:
        """Whether a block has the sum it should have. No attempt may be under way."""
        return await self._workers.run(self._sum, number) == self._sums[number]

    @property
    def _saved(self) -> bool:
        """Whether the file holds the version."""
        hint = self.hint()
        return hint is not None and hint[0] == self.version and np.array_equal(hint[1], self._vector)

    @property
    def save_due(self) -> bool:
        """Whether the file is to follow now. No attempt may be under way."""
        if self.version is None or self.unverified_base:
            return False
        return self._saving is not None or self._unsaved >= SAVE_SHARE * self._cache.size

    async def save_step(self) -> None:
        """Copy one span into the file; with the last one it holds the version. No attempt may be under way."""
        assert self.version is not None
        try:
            if self._saving is None or self._saving[0] != self.version:
                self._unsaved = 0
                self._cache.forget()
                self._saving = self.version, 0
            version, start = self._saving
            end = await self._workers.run_uncancellable(self._cache.write, start)
        except OSError:  # as without the hint
            self._saving = None
            return
        self._saving = (version, end) if end < self._cache.size else None
        if self._saving is None:
            self._cache.keep(self._hint_of(version))

    async def save(self) -> None:
        """Bring the file to the version, if it is behind. No attempt may be under way."""
        if self.version is None or self.unverified_base or self._saved:
            return
        await self.save_step()
        while self._saving is not None:
            await self.save_step()

    def _hint_of(self, version: int) -> Hint:
        body = self._vector.astype("<u8").tobytes().hex()
        return Hint(
            stream=self.stream, layout=self.layout.digest, share=self.blocks.digest, version=version, vector=body
        )

    def invalidate(self) -> None:
        """Forget what the bytes are; they have to be loaded again."""
        self.version, self.unverified_base = None, False
        self.begin()

    def distrust(self) -> None:
        """As `invalidate`; nor is the file to be begun from."""
        self.invalidate()
        self._cache.forget()

    async def fingerprint(self) -> Vector:
        """The vector of the bytes as they are now: a full pass, on the workers."""
        return self.blocks.vector(await self._measure())

    async def _measure(self) -> list[int]:
        return await sum_blocks(self.blocks, self._sum, self._workers.run)

    def _sum(self, number: int) -> int:
        return self.blocks.sum(number, self._bits[number])

    async def load(self, checkpoint: Checkpoint, told: Callable[[int], None] = lambda size: None) -> None:
        """Copy the blocks of a checkpoint. Claims no version.

        Args:
            told: called with the bytes of each block that is there.

        Raises:
            Incompatible: its layout is another, with the names that differ.
            Corrupt: a file shrinks while it is read.
        """
        self.invalidate()
        if difference := describe_difference(checkpoint.layout, self.layout):
            raise Incompatible(
                f"{checkpoint.path} does not have the stream's layout: {difference}",
                hint="give the checkpoint that the stream was created from",
            )

        source = CheckpointReader(checkpoint)

        async def copy(number: int) -> None:
            block = self.blocks[number]
            await self._workers.run_uncancellable(source.read_box, block.tensor, block.box, self._bits[number])
            told(self.blocks.nbytes(number))

        async with TaskLimiter(2 * self._workers.count) as group:
            for number in range(len(self.blocks)):
                await group.start(partial(copy, number))

    def place(self, tensor: int, box: Box, bits: Bits) -> int:
        """Copy a box of canonical elements into the blocks; returns how many they have of it. Claims no version."""
        return sum(
            transfer(bits, box, into=self[n], target=self.blocks[n].box) for n in self.blocks.touching(tensor, box)
        )

    def apply(self, chunk: Chunk) -> None:
        """Apply what a verified chunk changes in the blocks. Any thread. Claims no version.

        Raises:
            CorruptChunk: a segment does not decode.
        """
        for i in self.blocks.segments(chunk):
            segment, changes, elements = chunk.segment(i), None, None
            for number in self.blocks.touching(segment.tensor, segment.box):
                changes = changes or chunk.changes(i)
                if elements is None:
                    elements = segment.box.canonical(changes.positions)
                inside, where = self.blocks[number].box.ordinals(elements)
                if where.size:
                    bits = self._bits[number]
                    bits[where] = changes.only(inside).resolve(bits[where])

    def close(self) -> None:
        """Give the memory back. The file stays as it was saved."""
        self._bits = []
        self._cache.close()


def _offsets(blocks: BlockSet) -> tuple[list[int], int]:
    offsets, place = [], 0
    for number in range(len(blocks)):
        offsets.append(place)
        place += -(-blocks.nbytes(number) // ALIGNMENT) * ALIGNMENT
    return offsets, place


def check_vector(want: Vector, have: Vector, *, layout: Layout, what: str, hint: str) -> None:
    """Raise `Corrupt` that names the tensors in which two fingerprints differ."""
    wrong = [layout[int(i)].name for i in np.flatnonzero(want != have)]
    if wrong:
        raise Corrupt(f"{what}: the fingerprint differs in {shorten(wrong)}", hint=hint)
