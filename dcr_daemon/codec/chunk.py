"""The terms of the chunk format, shared by encoder and decoder (docs/FORMAT.md is the authority).

A chunk is one immutable object: an identity, a table of segments, and streams shared by all segments. A segment
is the changes of one box of one canonical tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dcr_daemon.canonical.box import Box

CHUNK_LIMIT = 64 << 20  #: bytes of one chunk object, refused above
SEGMENT_BYTES = 16 << 20  #: dense bytes of the weights one segment may span, at most
TARGET_BYTES = 4 << 20  #: encoded size at which a writer closes a chunk


class ChunkId(msgspec.Struct, frozen=True, kw_only=True):
    """The writer of a chunk, the attempt it belongs to, and its number `n` among the writer's chunks."""

    stream: str
    attempt: int
    base: int
    version: int
    group: str
    rank: int
    nonce: str
    n: int


class Positions(IntEnum):
    GAPS = 0  #: u8 of gap >> shift, 255 carries; `shift` low bits packed apart
    BITMASK = 1
    ALL = 2


class Operation(IntEnum):
    """How an operand changes old bits. Only `OVERWRITE` may be repeated (must E7)."""

    ULP = 0  #: new = old + operand mod 2^w
    XOR = 1  #: new = old ^ operand
    OVERWRITE = 2  #: new = operand


class Codec(IntEnum):
    """What a writer is asked to use; `AUTO` takes the smaller of ulp, xor and overwrite per segment."""

    AUTO = -1
    ULP = 0
    XOR = 1
    OVERWRITE = 2


@dataclass(frozen=True, slots=True)
class Segment:
    """One row of a chunk's table. `before` and `after` are fingerprint sums over the changed elements only."""

    tensor: int
    box: Box
    changed: int
    operation: Operation
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Changes:
    """A decoded segment.

    `positions`: int64 [k], strictly ascending ordinals in the segment's box.
    `operands`: unsigned integers of the tensor's width [k], to be combined with the old bits by `resolve`.
    """

    segment: Segment
    positions: npt.NDArray[np.int64]
    operands: npt.NDArray[Any]

    def only(self, which: npt.NDArray[np.bool_]) -> Changes:
        """Some of them, by a mask [k]."""
        return Changes(self.segment, self.positions[which], self.operands[which])

    def resolve(self, old: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """New bits [k] from old bits [k] (the same unsigned type)."""
        match self.segment.operation:
            case Operation.ULP:
                return old + self.operands
            case Operation.XOR:
                return old ^ self.operands
            case _:
                return self.operands

    def revert(self, new: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Old bits [k] from new bits [k]; not defined for `OVERWRITE`."""
        if self.segment.operation is Operation.ULP:
            return new - self.operands
        if self.segment.operation is Operation.XOR:
            return new ^ self.operands
        raise ValueError("an overwrite does not say what it overwrote")
