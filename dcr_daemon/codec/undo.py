"""Undo of a chunk: restores the baseline from before an aborted attempt (must P7).

`ulp` and `xor` segments say themselves what they changed; `overwrite` segments need the old bits that the encoder
handed out beside the chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from dcr_daemon.canonical.dtypes import bits_dtype
from dcr_daemon.canonical.fingerprint import Bits, sum_at
from dcr_daemon.codec.chunk import Operation, Segment
from dcr_daemon.codec.decode import Chunk
from dcr_daemon.errors import Corrupt

#: a segment and ordinals in its box (int64) -> a writable array of bits, and where in it (int64) they lie
Locate = Callable[[Segment, npt.NDArray[np.int64]], tuple[Bits, npt.NDArray[np.int64]]]


def undo_chunk(chunk: Chunk, undo: bytes | memoryview, *, locate: Locate) -> None:
    """Put back, in place, the bits that the elements of `chunk` had before it.

    Chunks of an attempt may be undone in any order: a writer never covers an element twice.

    Args:
        undo: `EncodedChunk.undo` of the same chunk.
        locate: where the baseline holds what a segment changed.

    Raises:
        Corrupt: `undo` has the wrong length, or the baseline does not hold what the chunk wrote. Nothing of the
            segment in question is changed then.
        CorruptChunk: the chunk does not decode.
    """
    saved = memoryview(undo)
    for i, segment in enumerate(chunk.segments):
        changes = chunk.changes(i)
        bits, where = locate(segment, changes.positions)
        if segment.operation is Operation.OVERWRITE:
            size = segment.changed * bits.itemsize
            if len(saved) < size:
                raise Corrupt("the undo bytes are shorter than their chunk needs", hint="rebuild the baseline")
            old = np.frombuffer(saved[:size], dtype=bits_dtype(bits.itemsize))
            saved = saved[size:]
            current = bool(np.array_equal(bits[where], changes.operands))
        else:
            old, current = changes.revert(bits[where]), True
        key = int(chunk.layout.keys[segment.tensor])
        if not current or sum_at(old, segment.box.canonical(changes.positions), key=key) != segment.before:
            name = chunk.layout[segment.tensor].name
            raise Corrupt(f"the baseline of {name} is not what the chunk left", hint="rebuild the baseline")
        bits[where] = old
    if len(saved):
        raise Corrupt(f"{len(saved)} undo bytes belong to no segment", hint="rebuild the baseline")
