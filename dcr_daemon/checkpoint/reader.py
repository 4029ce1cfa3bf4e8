"""Boxes of an open checkpoint, for callers that must not hold it whole: `Baseline.load`, writers of anchors, sums."""

from __future__ import annotations

from functools import partial

import numpy as np

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.dtypes import bits_dtype
from dcr_daemon.canonical.fingerprint import Bits, Vector
from dcr_daemon.canonical.gather import gather_box
from dcr_daemon.checkpoint.blocks import Block, BlockSet, Run, fingerprint, sum_block
from dcr_daemon.checkpoint.directory import Checkpoint


class CheckpointReader:
    """Reads with `pread`, never through a map: a file that shrinks is an error and does not end the process."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.layout = checkpoint.layout
        self._checkpoint = checkpoint

    def read_box(self, tensor: int, box: Box, out: Bits | None = None) -> Bits:
        """The bits of a box as unsigned integers [elements], in the box's row-major order; any thread.

        Args:
            tensor: layout index.
            out: where to; a new array by default.

        Raises:
            Corrupt: the file has shrunk.
        """
        spec = self.layout[tensor]
        file = self._checkpoint.file(spec.name)
        if out is None:
            out = np.empty(box.elements, dtype=bits_dtype(spec.width))
        gather_box(partial(file.read_into, spec.name), box, out=out)
        return out

    async def fingerprint(self, run: Run) -> Vector:
        """The vector of the whole checkpoint; `run` as `blocks.fingerprint` takes it."""

        def sum_of(block: Block) -> int:
            return sum_block(self.layout, block, bits=self.read_box(block.tensor, block.box))

        return await fingerprint(BlockSet.whole(self.layout), sum_of, run)
