"""Whatever the bits were and became, a chunk brings them over, and its undo brings them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chunks.whole_tensors import in_whole

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.fingerprint import advance, fingerprint
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.codec.chunk import ChunkId, Codec, Operation, Positions
from dcr_daemon.codec.decode import open_chunk
from dcr_daemon.codec.encode import ChunkEncoder
from dcr_daemon.codec.undo import undo_chunk

ALL_BF16 = np.arange(1 << 16, dtype=np.uint32).astype("<u2")
NEIGHBOURS: dict[str, Callable[[Any], Any]] = {
    "one up": lambda b: b + 1,
    "one down": lambda b: b - 1,
    "two up": lambda b: b + 2,
    "two down": lambda b: b - 2,
    "carry out of the mantissa": lambda b: b + 128,
    "sign flip": lambda b: b ^ 0x8000,
    "next NaN payload": lambda b: np.where((b & 0x7FFF) > 0x7F80, b ^ 1, 0x7FC1),
    "quiet NaN": lambda b: np.full_like(b, 0x7FC0),
    "signalling NaN": lambda b: np.full_like(b, 0xFF81),
    "infinity": lambda b: np.full_like(b, 0x7F80),
    "minus infinity": lambda b: np.full_like(b, 0xFF80),
    "smallest denormal": lambda b: np.full_like(b, 0x0001),
    "largest denormal": lambda b: np.full_like(b, 0x807F),
    "zero": lambda b: np.zeros_like(b),
    "minus zero": lambda b: np.full_like(b, 0x8000),
    "half the range away": lambda b: b + 0x8000,
    "far": lambda b: b * 40503 + 12345,
    "each by another difference": lambda b: b + b[::-1] * 7,
    "only some": lambda b: np.where(b % 11 == 0, b + 1, b),
    "hardly any": lambda b: np.where(b % 5003 == 0, b - 1, b),
}


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_every_bf16_pattern_to_every_neighbour(neighbour: str, codec: Codec, flat: Any, apply: Any) -> None:
    new = NEIGHBOURS[neighbour](ALL_BF16).astype("<u2")
    encoded, layout = flat("BF16", ALL_BF16, new, codec)
    chunk = open_chunk(encoded.data, layout)
    tensors = [ALL_BF16.copy()]
    apply(chunk, tensors)
    assert np.array_equal(tensors[0], new)
    assert sum(segment.changed for segment in chunk.segments) == encoded.changed == int((new != ALL_BF16).sum())
    undo_chunk(chunk, encoded.undo, locate=in_whole(tensors))
    assert np.array_equal(tensors[0], ALL_BF16)


@pytest.mark.parametrize(("dtype", "lane"), [("U8", "u1"), ("BF16", "<u2")])
@pytest.mark.parametrize("codec", [Codec.ULP, Codec.XOR])
def test_every_difference_there_is(dtype: str, lane: str, codec: Codec, flat: Any, apply: Any) -> None:
    size = 1 << 8 * np.dtype(lane).itemsize
    old = np.full(size, 0x5A, dtype=lane)
    new = np.arange(size, dtype=np.uint32).astype(lane)
    encoded, layout = flat(dtype, old, new, codec)
    tensors = [old]
    apply(open_chunk(encoded.data, layout), tensors)
    assert np.array_equal(tensors[0], new)


shards = st.integers(1, 4).flatmap(
    lambda rank: st.tuples(st.tuples(*[st.integers(1, 9)] * rank), st.permutations(range(rank)), st.integers(0, 2))
)


@given(
    shape=shards,
    dtype=st.sampled_from(["U8", "F8_E4M3", "BF16", "F16", "F32", "F64"]),
    codec=st.sampled_from(list(Codec)),
    rate=st.sampled_from([0.0, 0.001, 0.03, 0.3, 0.9, 1.0]),
    steps=st.sampled_from([[1], [1, -1], [1, -1, 2, -5], [1 << 7], [-(1 << 6), 99]]),
    seed=st.integers(0, 1 << 32),
)
@settings(max_examples=250, deadline=None)
def test_any_box_dtype_rate_and_codec(
    shape: Any, dtype: str, codec: Codec, rate: float, steps: list[int], seed: int
) -> None:
    extent, order, gap = shape
    strides, span = [0] * len(extent), 1
    for axis in order:
        strides[axis], span = span, span * (extent[axis] + gap)
    box = Box(3, extent, tuple(strides))
    layout = Layout([TensorSpec("other", "U8", (5,)), TensorSpec("t", dtype, (span + 9,))])
    random = np.random.default_rng(seed)
    lane = f"<u{layout[1].width}"
    old = random.integers(0, 256, layout[1].nbytes, dtype=np.uint8).view(lane)
    where = box.canonical(np.arange(box.elements, dtype=np.int64))
    new = old.copy()
    hit = where[random.random(where.size) < rate]
    new[hit] += random.choice(np.array(steps), hit.size).astype(lane)
    start = [np.zeros(5, dtype=np.uint8), old]

    encoder = ChunkEncoder(layout, codec=codec)
    base = old[where]
    segment = encoder.add(1, box, base, new[where])
    assert np.array_equal(base, new[where])
    if segment is None:
        assert np.array_equal(old, new)
        assert not encoder.pending
        return
    identity = ChunkId(stream="s", attempt=1, base=0, version=1, group="g", rank=0, nonce="n", n=0)
    encoded = encoder.finish(identity)
    chunk = open_chunk(encoded.data, layout, identity)
    assert chunk.segments == encoded.segments == (segment,)
    changes = chunk.changes(0)
    at = box.canonical(changes.positions)
    assert np.array_equal(np.sort(at), np.flatnonzero(old != new))
    assert np.array_equal(changes.resolve(old[at]), new[at])
    vector = fingerprint(layout, start)
    assert np.array_equal(advance(vector, chunk.segments), fingerprint(layout, [start[0], new]))
    tensors = [start[0], new.copy()]
    undo_chunk(chunk, encoded.undo, locate=in_whole(tensors))
    assert np.array_equal(tensors[1], old)


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("rate", [1, 2, 40])
def test_many_segments_share_their_streams(codec: Codec, rate: int, sample: Any, layout: Layout, apply: Any) -> None:
    encoded, old, new = sample(codec, rate)
    chunk = open_chunk(encoded.data, layout)
    tensors = [bits.copy() for bits in old]
    apply(chunk, tensors)
    assert all(np.array_equal(a, b) for a, b in zip(tensors, new, strict=True))
    undo_chunk(chunk, encoded.undo, locate=in_whole(tensors))
    assert all(np.array_equal(a, b) for a, b in zip(tensors, old, strict=True))


def test_segments_decode_in_any_order_and_after_release(sample: Any, layout: Layout) -> None:
    encoded, _, _ = sample(Codec.AUTO, 5)
    chunk = open_chunk(encoded.data, layout)
    forward = [chunk.changes(i) for i in range(len(chunk.segments))]
    chunk.release()
    for i in reversed(range(len(chunk.segments))):
        again = chunk.changes(i)
        assert np.array_equal(again.positions, forward[i].positions)
        assert np.array_equal(again.operands, forward[i].operands)


@pytest.mark.parametrize("rate", [3e-5, 4e-4, 2e-3, 2e-2, 0.3, 1.0])
def test_every_position_codec_and_shift_is_reached(rate: float, flat: Any, forge: Any, apply: Any) -> None:
    random = np.random.default_rng(11)
    old = random.integers(0, 1 << 16, 1 << 20, dtype=np.uint16)
    new = old + (random.random(old.size) < rate).astype(np.uint16)
    encoded, layout = flat("BF16", old, new)
    table = forge(encoded.data).table
    expected = {
        3e-5: (Positions.GAPS, 6), 4e-4: (Positions.GAPS, 4), 2e-3: (Positions.GAPS, 2),
        2e-2: (Positions.GAPS, 0), 0.3: (Positions.BITMASK, 0), 1.0: (Positions.ALL, 0),
    }  # fmt: skip
    assert (table.positions[0], table.shift[0]) == expected[rate]
    tensors = [old]
    apply(open_chunk(encoded.data, layout), tensors)
    assert np.array_equal(tensors[0], new)


def test_auto_overwrites_what_was_reset_and_steps_elsewhere(flat: Any) -> None:
    random = np.random.default_rng(12)
    old = random.integers(1, 1 << 16, 1 << 16, dtype=np.uint16)
    reset, _ = flat("BF16", old, np.zeros_like(old))
    assert reset.segments[0].operation is Operation.OVERWRITE
    assert len(reset.data) < 1000
    stepped, _ = flat("BF16", old, old + random.choice(np.array([1, 65535], dtype=np.uint16), old.size))
    assert stepped.segments[0].operation is Operation.ULP


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_unaligned_and_read_only_arrays_are_taken_as_they_are(offset: int, apply: Any) -> None:
    size = 10_007
    memory = np.random.default_rng(13).integers(0, 1 << 16, size + offset, dtype=np.uint16)
    base = memory[offset:]
    body = bytes(2 * offset) + (base + (np.arange(size) % 97 == 0).astype(np.uint16)).tobytes()
    new = np.frombuffer(body, dtype="<u2")[offset:]
    old = base.copy()
    layout = Layout([TensorSpec("t", "BF16", (size,))])
    encoder = ChunkEncoder(layout)
    assert encoder.add(0, Box.flat(0, size), base, new) is not None
    assert np.array_equal(base, new)
    identity = ChunkId(stream="s", attempt=1, base=0, version=1, group="g", rank=0, nonce="n", n=0)
    tensors = [old]
    apply(open_chunk(encoder.finish(identity).data, layout), tensors)
    assert np.array_equal(tensors[0], new)


def test_segments_beyond_32_bits_of_elements() -> None:
    """Positions are small whatever the tensor; the box carries the rest."""
    layout = Layout([TensorSpec("huge", "BF16", (1 << 20, 1 << 14))])
    box = Box((1 << 33) + 5, (32, 64), (1 << 14, 1))
    old = np.arange(2048, dtype=np.uint16)
    new = old.copy()
    new[[0, 700, 2047]] += 1
    encoder = ChunkEncoder(layout)
    encoder.add(0, box, old.copy(), new)
    identity = ChunkId(stream="s", attempt=1, base=0, version=1, group="g", rank=0, nonce="n", n=0)
    chunk = open_chunk(encoder.finish(identity).data, layout)
    assert chunk.segments[0].box == box
    elements = box.canonical(chunk.changes(0).positions)
    assert elements.tolist() == [box.dst, box.dst + 10 * (1 << 14) + 60, box.last]
