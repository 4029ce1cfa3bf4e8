"""A base checkpoint as canonical lanes, for whoever must not hold it whole."""

from __future__ import annotations

import asyncio

import numpy as np

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.fingerprint import MASK, Bits, Vector, sum_box
from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.codec.chunk import SEGMENT_BYTES
from dcr_daemon.publish.share import Block, gather, runs
from dcr_daemon.runtime import Workers


class CheckpointLanes:
    """Reads an open checkpoint, a block at a time."""

    def __init__(self, checkpoint: Checkpoint, workers: Workers) -> None:
        self.layout = checkpoint.layout
        self._checkpoint, self._workers = checkpoint, workers

    def lanes(self, tensor: int, box: Box) -> Bits:
        """Lanes of a box in its own order; called on any thread."""
        name = self.layout[tensor].name
        file = self._checkpoint.file(name)
        return gather(lambda start, count: file.read(name, start, count), box)

    async def fingerprint(self) -> Vector:
        """One pass over everything, on the workers."""
        blocks = [block for t, spec in enumerate(self.layout) for block in runs(t, spec, SEGMENT_BYTES)]
        sums = await asyncio.gather(*(self._workers.run(self._sum, block) for block in blocks))
        vector = [0] * len(self.layout)
        for block, value in zip(blocks, sums, strict=True):
            vector[block.tensor] = (vector[block.tensor] + value) & MASK
        return np.array(vector, dtype=np.uint64)

    def _sum(self, block: Block) -> int:
        return sum_box(self.lanes(block.tensor, block.box), block.box, int(self.layout.keys[block.tensor]))
