"""The encoder takes only what the format can say, keeps its books, and starts each chunk afresh."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.codec.chunk import SEGMENT_BYTES, ChunkId, Codec
from dcr_daemon.codec.decode import open_chunk
from dcr_daemon.codec.encode import FIRST_BYTES, ChunkEncoder
from dcr_daemon.codec.format import MAX_SEGMENTS, RAW_LIMIT


def zeros(count: int, lane: str = "<u2") -> Any:
    return np.zeros(count, dtype=lane)


BIG = Layout([TensorSpec("t", "BF16", (1 << 30,)), TensorSpec("u", "F32", (10, 10))])


@pytest.mark.parametrize(
    ("tensor", "box", "base", "new"),
    [
        (0, Box.flat(0, 8), zeros(7), zeros(8)),
        (0, Box.flat(0, 8), zeros(8), zeros(9)),
        (0, Box.flat(0, 8), zeros(8, "<u4"), zeros(8, "<u4")),
        (0, Box.flat(0, 8), zeros(8, "<i2"), zeros(8)),
        (0, Box.flat(0, 8), zeros(16)[::2], zeros(8)),
        (0, Box.flat(0, 8), zeros(8).reshape(2, 4), zeros(8)),
        (0, Box.flat((1 << 30) - 7, 8), zeros(8), zeros(8)),
        (1, Box(0, (10, 11), (10, 1)), zeros(110, "<u4"), zeros(110, "<u4")),
        (1, Box(0, (2, 2), (1, 1)), zeros(4, "<u4"), zeros(4, "<u4")),
        (0, Box.flat(0, SEGMENT_BYTES // 2 + 1), zeros(SEGMENT_BYTES // 2 + 1), zeros(SEGMENT_BYTES // 2 + 1)),
    ],
)
def test_what_is_no_box_of_the_tensor_is_refused_untouched(tensor: int, box: Box, base: Any, new: Any) -> None:
    encoder = ChunkEncoder(BIG)
    new = new + 1
    with pytest.raises(ValueError, match=r"no piece|contiguous elements|at most"):
        encoder.add(tensor, box, base, new)
    assert not base.any()
    assert not encoder.pending


def test_a_read_only_baseline_is_refused() -> None:
    with pytest.raises(ValueError, match="read-only"):
        ChunkEncoder(BIG).add(0, Box.flat(0, 4), np.frombuffer(bytes(8), "<u2"), np.ones(4, "<u2"))


def test_nothing_changed_is_no_segment_and_no_chunk(identity: ChunkId) -> None:
    encoder = ChunkEncoder(BIG)
    assert encoder.add(0, Box.flat(0, 8), zeros(8), zeros(8)) is None
    assert (encoder.pending, encoder.changed, encoder.full) == (0, 0, False)
    with pytest.raises(ValueError, match="at least one segment"):
        encoder.finish(identity)


def test_the_books_and_a_fresh_start(identity: ChunkId) -> None:
    encoder = ChunkEncoder(BIG)
    first = encoder.add(0, Box.flat(100, 1000), zeros(1000), np.arange(1000, dtype="<u2") % 2)
    assert first is not None
    assert encoder.changed == first.changed == 500
    assert 0 < encoder.pending < 2000
    chunk = encoder.finish(identity)
    assert (chunk.id, chunk.segments, chunk.changed) == (identity, (first,), 500)
    assert (encoder.pending, encoder.changed) == (0, 0)
    encoder.add(1, Box.flat(0, 100), zeros(100, "<u4"), np.arange(100, dtype="<u4"))
    second = open_chunk(encoder.finish(identity).data, BIG)
    assert [segment.tensor for segment in second.segments] == [1]


def test_pending_is_an_upper_estimate_that_closes_chunks_near_their_target(identity: ChunkId) -> None:
    random = np.random.default_rng(30)
    encoder = ChunkEncoder(BIG, target=100_000)
    start, sizes = 0, []
    while len(sizes) < 3:
        old = random.integers(0, 1 << 16, 1 << 18, dtype=np.uint16)
        step = random.choice(np.array([1, -1, 5], np.int16), 1 << 18, p=[0.46, 0.46, 0.08]).view(np.uint16)
        new = old + step * (random.random(1 << 18) < 0.02)
        encoder.add(0, Box.flat(start, 1 << 18), old, new)
        start += 1 << 18
        if encoder.full:
            pending = encoder.pending
            sizes.append(len(encoder.finish(identity).data))
            assert 0.7 * pending < sizes[-1] <= pending
    assert all(65_000 < size < 110_000 for size in sizes)


def test_first_chunks_are_small_and_little_is_left_for_the_end(identity: ChunkId) -> None:
    """A chunk leaves when it is closed: what is still open when all is compared has yet to be sent."""
    encoder, new = ChunkEncoder(BIG, codec=Codec.OVERWRITE, target=1 << 20), np.ones(1 << 15, "<u2")
    step, closed, sizes = new.nbytes + 64, 0, list[int]()
    while closed < 8 << 20:
        encoder.add(0, Box.flat(len(sizes) << 15, 1 << 15), zeros(1 << 15), new)
        assert encoder.pending <= max(FIRST_BYTES, closed // 3) + step
        if encoder.full:
            sizes.append(encoder.pending)
            closed += encoder.pending
            encoder.finish(identity)
    assert sizes == sorted(sizes)
    assert sizes[0] <= FIRST_BYTES + step
    assert 1 << 20 <= sizes[-1] <= (1 << 20) + step


def test_a_chunk_never_outgrows_what_a_reader_takes(identity: ChunkId) -> None:
    """Even if its writer ignores `full`: adding stops, and what was added before still reads."""
    encoder, added = ChunkEncoder(BIG, codec=Codec.OVERWRITE), 0
    lanes = SEGMENT_BYTES // 2
    new = np.random.default_rng(31).integers(1, 1 << 16, lanes, dtype=np.uint16)
    while encoder.pending + 2 * SEGMENT_BYTES <= RAW_LIMIT:
        encoder.add(0, Box.flat(added * lanes, lanes), zeros(lanes), new)
        added += 1
    with pytest.raises(ValueError, match="full"):
        encoder.add(0, Box.flat(added * lanes, lanes), zeros(lanes), new)
    assert encoder.pending <= RAW_LIMIT
    chunk = open_chunk(encoder.finish(identity).data, BIG)
    assert len(chunk.segments) == added


def test_tiny_segments_close_a_chunk_before_the_table_is_too_long(identity: ChunkId) -> None:
    encoder = ChunkEncoder(BIG)
    base, one, n = zeros(1), np.ones(1, "<u2"), 0
    while not encoder.full:
        base[0] = 0
        encoder.add(0, Box.flat(n, 1), base, one)
        n += 1
    assert n <= MAX_SEGMENTS
    assert len(open_chunk(encoder.finish(identity).data, BIG).segments) == n


@pytest.mark.parametrize("bad", ["", "UPPER", "a/b", "a" * 33, "é", "a\0"])
def test_an_identity_that_no_reader_takes_is_not_written(bad: str, identity: ChunkId) -> None:
    encoder = ChunkEncoder(BIG)
    encoder.add(0, Box.flat(0, 1), zeros(1), np.ones(1, "<u2"))
    with pytest.raises(ValueError, match="is no id"):
        encoder.finish(msgspec.structs.replace(identity, group=bad))
    assert encoder.finish(identity).changed == 1


def test_encoders_run_side_by_side(identity: ChunkId) -> None:
    def encode(seed: int) -> bytes:
        random = np.random.default_rng(seed)
        encoder = ChunkEncoder(BIG)
        for n in range(6):
            new = (random.random(1 << 16) < 0.05).astype("<u2")
            encoder.add(0, Box.flat(n << 16, 1 << 16), zeros(1 << 16), new)
        return encoder.finish(identity).data

    alone = [encode(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(encode, range(4))) == alone


def test_a_chunk_may_be_decoded_from_several_threads(sample: Any, layout: Layout) -> None:
    encoded, _, _ = sample(Codec.AUTO, 3)
    alone = open_chunk(encoded.data, layout)
    expected = [alone.changes(i) for i in range(len(alone.segments))]
    for _ in range(5):
        chunk = open_chunk(encoded.data, layout)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(chunk.changes, range(len(chunk.segments))))
        for a, b in zip(found, expected, strict=True):
            assert np.array_equal(a.positions, b.positions)
            assert np.array_equal(a.operands, b.operands)


def test_after_compiling_ahead_nothing_is_compiled() -> None:
    """In a process of its own: here the kernels are compiled already. A compile in a worker would hold generation."""
    program = """
import numpy as np
from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.codec import kernels, vector_kernels
from dcr_daemon.codec.chunk import ChunkId, Codec
from dcr_daemon.codec.decode import open_chunk
from dcr_daemon.codec.encode import ChunkEncoder
from dcr_daemon.codec.warm import compile_kernels

def compiled():
    found = [*vars(kernels).values(), *vars(vector_kernels).values()]
    return [len(k.signatures) for k in found if hasattr(k, "signatures")]

compile_kernels((2,))
before = compiled()
layout = Layout([TensorSpec("w", "BF16", (50, 100))])
identity = ChunkId(stream="a", attempt=1, base=0, version=1, group="b", rank=0, nonce="c", n=0)
for codec in Codec:
    for every in (2500, 900, 7, 3, 1):
        new = np.zeros(5000, dtype="<u2")
        new[::every] = 300
        encoder = ChunkEncoder(layout, codec=codec)
        encoder.add(0, Box(0, (100, 50), (1, 100)), np.zeros(5000, dtype="<u2"), new)
        chunk = open_chunk(bytearray(encoder.finish(identity).data), layout)
        assert chunk.changes(0).positions.size
assert before == compiled() and any(before), (before, compiled())
"""
    subprocess.run([sys.executable, "-c", program], check=True)
