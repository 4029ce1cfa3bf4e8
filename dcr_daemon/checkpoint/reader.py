"""A base checkpoint as canonical lanes, for whoever must not hold it whole."""

from __future__ import annotations

import asyncio

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.fingerprint import Bits, Vector
from dcr_daemon.checkpoint.blocks import BlockSet, gather
from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.runtime import Workers


class CheckpointReader:
    """Reads an open checkpoint, a block at a time."""

    def __init__(self, checkpoint: Checkpoint, workers: Workers) -> None:
        self.layout = checkpoint.layout
        self._checkpoint, self._workers = checkpoint, workers

    def read_box(self, tensor: int, box: Box, out: Bits | None = None) -> Bits:
        """Lanes of a box in its own order, in `out` if it is given; called on any thread."""
        name = self.layout[tensor].name
        file = self._checkpoint.file(name)
        return gather(lambda start, count: file.read(name, start, count), box, out)

    async def fingerprint(self) -> Vector:
        """One pass over everything, on the workers."""
        blocks = BlockSet.whole(self.layout)

        def measure(number: int) -> int:
            return blocks.sum(number, self.read_box(blocks[number].tensor, blocks[number].box))

        return blocks.vector(await asyncio.gather(*(self._workers.run(measure, n) for n in range(len(blocks)))))
