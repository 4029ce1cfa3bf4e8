"""What the codec's tests share: an identity, ways to encode and to apply. (Malformed chunks: support/chunks.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.chunks.malformed import ID, EditableChunk, reseal, sample_chunk, sample_layout

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.codec.chunk import ChunkId, Codec
from dcr_daemon.codec.decode import Chunk, open_chunk
from dcr_daemon.codec.encode import ChunkEncoder, EncodedChunk

Bits = npt.NDArray[Any]


@pytest.fixture(scope="session")
def identity() -> ChunkId:
    return ID


def encode_flat(dtype: str, old: Bits, new: Bits, codec: Codec = Codec.AUTO) -> tuple[EncodedChunk, Layout]:
    """One whole 1-D tensor as one segment; neither array is changed."""
    layout = Layout([TensorSpec("t", dtype, (old.size,))])
    encoder = ChunkEncoder(layout, codec=codec)
    encoder.add(0, Box.flat(0, old.size), old.copy(), new)
    return encoder.finish(ID), layout


def apply_chunk(chunk: Chunk, tensors: list[Bits]) -> None:
    """Write a chunk into flat tensors, the slow and obvious way."""
    for i, segment in enumerate(chunk.segments):
        changes = chunk.changes(i)
        where = segment.box.canonical(changes.positions)
        tensors[segment.tensor][where] = changes.resolve(tensors[segment.tensor][where])


def iid_bound(old: Bits, new: Bits) -> float:
    """Bytes that positions and ulp differences take if both were iid: k * (H(p)/p + H(d)) / 8."""
    differs = old != new
    return bound_of(int(differs.sum()), old.size, np.bincount((new - old)[differs], minlength=1 << 16))


def bound_of(changed: int, elements: int, differences: npt.NDArray[np.int64]) -> float:
    """`iid_bound` from counts pooled over a version: changes, elements, histogram of 16-bit differences."""
    p, q = changed / elements, differences[differences > 0] / changed
    positions = -(p * np.log2(p) + (1 - p) * np.log2(1 - p)) * elements
    return float(positions - changed * (q * np.log2(q)).sum()) / 8


@pytest.fixture(scope="session")
def flat() -> Callable[..., tuple[EncodedChunk, Layout]]:
    return encode_flat


@pytest.fixture(scope="session")
def apply() -> Callable[[Chunk, list[Bits]], None]:
    return apply_chunk


@pytest.fixture(scope="session")
def bound() -> Callable[..., float]:
    return bound_of


@pytest.fixture(scope="session")
def bound_between() -> Callable[[Bits, Bits], float]:
    return iid_bound


@pytest.fixture(scope="session")
def sample() -> Callable[[Codec, int], tuple[EncodedChunk, list[Bits], list[Bits]]]:
    return sample_chunk


@pytest.fixture(scope="session")
def layout() -> Layout:
    return sample_layout()


@pytest.fixture(scope="session")
def forge() -> Callable[[bytes], EditableChunk]:
    return EditableChunk.of


@pytest.fixture(scope="session")
def sealed() -> Callable[[bytes], bytes]:
    return reseal


@pytest.fixture(scope="session")
def read_all() -> Callable[[bytes, Layout], Chunk]:
    """Open a chunk and decode every segment."""

    def read(data: bytes, layout: Layout) -> Chunk:
        chunk = open_chunk(data, layout)
        for i in range(len(chunk.segments)):
            chunk.changes(i)
        return chunk

    return read
