"""The decoder refuses, by name and in bounded memory, everything the format does not allow."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.codec import format as fmt
from dcr_daemon.codec.chunk import CHUNK_LIMIT, ChunkId, Codec, Operation
from dcr_daemon.codec.decode import open_chunk, read_id
from dcr_daemon.codec.encode import ChunkEncoder
from dcr_daemon.codec.format import Stream
from dcr_daemon.errors import CorruptChunk


@pytest.fixture(scope="module")
def chunk(sample: Any) -> bytes:
    return sample(Codec.AUTO, 5)[0].data


def refused(body: bytes, layout: Layout, read_all: Any, match: str) -> None:
    with pytest.raises(CorruptChunk, match=match):
        read_all(body, layout)


def test_identity_is_read_from_the_header_alone(chunk: bytes, identity: ChunkId, layout: Layout) -> None:
    assert read_id(chunk) == identity
    assert read_id(chunk[: fmt.HEADER.size]) == identity
    assert open_chunk(memoryview(bytearray(chunk)), layout, identity).id == identity


@pytest.mark.parametrize("field", ["stream", "attempt", "base", "version", "group", "rank", "nonce", "n"])
def test_a_chunk_in_anothers_place_is_refused(field: str, chunk: bytes, identity: ChunkId, layout: Layout) -> None:
    value = getattr(identity, field)
    other = msgspec.structs.replace(identity, **{field: value + 1 if isinstance(value, int) else "other"})
    with pytest.raises(CorruptChunk, match="expected"):
        open_chunk(chunk, layout, other)


def test_any_flipped_bit_is_found(chunk: bytes, layout: Layout, read_all: Any) -> None:
    for at in range(0, len(chunk), 7):
        body = bytearray(chunk)
        body[at] ^= 1 << at % 8
        with pytest.raises(CorruptChunk):
            read_all(bytes(body), layout)


def test_every_truncation_and_extension_is_found(
    chunk: bytes, layout: Layout, read_all: Any, sealed: Callable[[bytes], bytes]
) -> None:
    for size in range(len(chunk)):
        body = chunk[:size]
        with pytest.raises(CorruptChunk):
            read_all(sealed(body) if size > 16 else body, layout)
    for tail in (b"\0", b"\0" * 40, chunk):
        refused(sealed(chunk + tail), layout, read_all, "bytes follow")


def test_an_object_over_the_limit_is_refused_unread(layout: Layout) -> None:
    with pytest.raises(CorruptChunk, match="limit"):
        open_chunk(bytes(CHUNK_LIMIT + 1), layout)


HEADERS: list[tuple[dict[str, Any], str]] = [
    ({"magic": b"DCRX"}, "does not begin"),
    ({"format": 2}, "format 2"),
    ({"zero": 1}, "reserved"),
    ({"zero2": 1}, "reserved"),
    ({"segments": 0}, "out of range"),
    ({"segments": fmt.MAX_SEGMENTS + 1}, "out of range"),
    ({"segments": 10}, "wrong size"),
    ({"segments": 8}, "wrong size|too large"),
    ({"declare": 0}, "out of range"),
    ({"declare": 200}, "out of range"),
    ({"stream": b"UPPER"}, "not of"),
    ({"group": b""}, "not of"),
    ({"nonce": b"a\0b"}, "not of"),
    ({"nonce": b"a/../b"}, "not of"),
]


@pytest.mark.parametrize(("fields", "match"), HEADERS, ids=str)
def test_headers(fields: dict[str, Any], match: str, chunk: bytes, layout: Layout, forge: Any, read_all: Any) -> None:
    forged = forge(chunk)
    forged.header.update(fields)
    refused(forged.build(), layout, read_all, match)


ROWS: list[tuple[str, int, int]] = [
    ("rank", 0, 0),
    ("rank", 0, 5),
    ("tensor", 0, 6),
    ("tensor", 0, 2**32 - 1),
    ("positions", 0, 3),
    ("operation", 0, 3),
    ("operation", 5, Operation.ULP),  # 8-byte lanes are only overwritten
    ("operation", 5, Operation.XOR),
    ("shift", 0, 9),
    ("shift", 0, 255),
    ("changed", 0, 0),
    ("changed", 0, 2**32 - 1),
    ("carries", 0, 1),
    ("carries", 0, 2**32 - 1),
    ("escapes", 0, 2**32 - 1),
    ("escapes", 5, 1),
    ("dst", 0, 3072),
    ("dst", 0, 2**64 - 1),
]


@pytest.mark.parametrize(("column", "row", "value"), ROWS)
def test_rows_of_the_table(
    column: str, row: int, value: int, chunk: bytes, layout: Layout, forge: Any, read_all: Any
) -> None:
    forged = forge(chunk)
    values = getattr(forged.table, column).tolist()
    assert values[row] != value
    values[row] = value
    with pytest.raises(CorruptChunk):
        read_all(forged.with_table(**{column: values}).build(), layout)


@pytest.mark.parametrize(
    ("column", "value"),
    [("shape", 0), ("shape", 2**64 - 1), ("shape", 65), ("strides", 0), ("strides", 2**63), ("strides", 1)],
)
def test_boxes_outside_their_tensor_or_over_themselves(
    column: str, value: int, chunk: bytes, layout: Layout, forge: Any, read_all: Any
) -> None:
    forged = forge(chunk)
    values = getattr(forged.table, column).tolist()
    values[0] = value
    refused(forged.with_table(**{column: values}).build(), layout, read_all, "box")


def test_a_segment_larger_than_a_segment_may_be(forge: Any, flat: Any, read_all: Any) -> None:
    old = np.zeros(8, dtype=np.uint16)
    forged = forge(flat("BF16", old, old + 1)[0].data)
    layout = Layout([TensorSpec("t", "BF16", (1 << 24,))])
    refused(forged.with_table(shape=[(8 << 20) + 1]).build(), layout, read_all, "larger than")


def test_streams_must_be_known_ordered_and_of_the_size_the_segments_say(
    chunk: bytes, layout: Layout, forge: Any, read_all: Any
) -> None:
    for kind in (5, 12, 20, 40, 255):
        forged = forge(chunk)
        forged.streams[kind] = b"x"
        refused(forged.build(), layout, read_all, "unknown")
    for kind in forge(chunk).streams:
        forged = forge(chunk)
        del forged.streams[kind]
        refused(forged.build(), layout, read_all, "table is missing|not as long")
        for change in (lambda raw: raw + b"\0", lambda raw: raw[:-1]):
            forged = forge(chunk)
            forged.streams[kind] = change(forged.streams[kind])
            with pytest.raises(CorruptChunk):
                read_all(forged.build(), layout)
    forged = forge(chunk)
    forged.streams[Stream.MASK + 3] = b"unused"
    refused(forged.build(), layout, read_all, "not as long")
    body = bytearray(chunk)
    first, second = fmt.HEADER.size, fmt.HEADER.size + fmt.ENTRY.size
    body[first : second + fmt.ENTRY.size] = body[second : second + fmt.ENTRY.size] + body[first:second]
    refused(bytes(body), layout, read_all, "checksum")


def test_zstd_frames_that_lie(chunk: bytes, layout: Layout, forge: Any, read_all: Any) -> None:
    size = len(forge(chunk).streams[Stream.GAPS])
    good = zstandard.compress(bytes(size))
    frames = [
        zstandard.compress(bytes(size - 1)),
        zstandard.compress(bytes(2 << 20)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(size)),
        good[:-1],
        good + b"x",
        zstandard.compress(b"") + good,
        good + zstandard.compress(b""),
        b"",
        b"(\xb5/\xfd",
    ]
    for frame in frames:
        forged = forge(chunk)
        forged.stored[Stream.GAPS] = frame
        refused(forged.build(), layout, read_all, "zstd|decompress")


def test_lies_about_sizes_allocate_nothing(chunk: bytes, layout: Layout, forge: Any, read_all: Any) -> None:
    """Each forged chunk claims tens of megabytes; all are refused before they are allocated."""
    big = Layout([*layout, TensorSpec("z", "BF16", (1 << 23,))])
    claims = []
    for kind in forge(chunk).streams:
        forged = forge(chunk)
        forged.sizes[kind] = fmt.RAW_LIMIT - (1 << 20)
        forged.stored[kind] = zstandard.compress(b"x" * 100)
        claims.append(forged.build())
        frame = bytearray(zstandard.compress(b"x" * 300_000))
        struct.pack_into("<I", frame, 5, fmt.RAW_LIMIT - (1 << 20))  # the frame's own content size lies too
        forged.stored[kind] = bytes(frame)
        claims.append(forged.build())
    encoder = ChunkEncoder(big)
    encoder.add(6, Box.flat(0, 8), np.zeros(8, "<u2"), np.ones(8, "<u2"))
    forged = forge(encoder.finish(read_id(chunk)).data)
    claims.append(forged.with_table(shape=[1 << 23], changed=[1 << 23]).build())
    claims.append(forged.with_table(shape=[1 << 23], changed=[1 << 22], positions=[0], carries=[1 << 14]).build())
    tracemalloc.start()
    try:
        for body in claims:
            with pytest.raises(CorruptChunk):
                read_all(body, big)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20


def positions_chunk(layout: Layout, identity: ChunkId, share: float) -> bytes:
    old = np.zeros(1000, dtype="u1")
    new = (np.random.default_rng(1).random(1000) < share).astype("u1")
    encoder = ChunkEncoder(layout)
    encoder.add(layout.index("b"), Box.flat(0, 1000), old, new)
    return encoder.finish(identity).data


def test_positions_must_ascend_inside_the_box(layout: Layout, identity: ChunkId, forge: Any, read_all: Any) -> None:
    body = positions_chunk(layout, identity, 0.1)
    gaps = forge(body).streams[Stream.GAPS]
    for forged_gaps in (
        bytes([254]) * len(gaps),  # beyond the box
        bytes([255]) + gaps[1:],  # a carry where a position was
        gaps[:-1] + bytes([255]),  # a carry that nothing follows
        bytes([255]) * len(gaps),
    ):
        forged = forge(body)
        forged.streams[Stream.GAPS] = forged_gaps
        refused(forged.build(), layout, read_all, "positions")
    body = positions_chunk(layout, identity, 0.5)
    mask = bytearray(forge(body).streams[Stream.BITMASK])
    mask[0] ^= 1
    forged = forge(body)
    forged.streams[Stream.BITMASK] = bytes(mask)
    refused(forged.build(), layout, read_all, "positions")


def test_bits_outside_a_bitmask_and_behind_the_last_low_bits(identity: ChunkId, forge: Any, read_all: Any) -> None:
    layout = Layout([TensorSpec("b", "U8", (20_003,))])
    for share, stream in ((0.5, Stream.BITMASK), (0.002, Stream.LOW)):
        new = (np.random.default_rng(2).random(20_003) < share).astype("u1")
        while stream is Stream.LOW and new.sum() % 4 == 0:
            new[np.flatnonzero(new == 0)[0]] = 1
        encoder = ChunkEncoder(layout)
        encoder.add(0, Box.flat(0, 20_003), np.zeros(20_003, "u1"), new)
        forged = forge(encoder.finish(identity).data)
        body = bytearray(forged.streams[stream])
        if stream is Stream.BITMASK:
            taken = next(i for i, byte in enumerate(body) if byte)
            body[taken] &= body[taken] - 1  # the count stays right
        body[-1] |= 0x80
        forged.streams[stream] = bytes(body)
        refused(forged.build(), layout, read_all, "positions")


def test_values_that_no_writer_writes(identity: ChunkId, forge: Any, flat: Any, read_all: Any) -> None:
    old = np.arange(1, 1002, dtype=np.uint16) * 17
    new = old + np.where(np.arange(old.size) % 3 == 0, 9, 1).astype(np.uint16)
    stepped, layout = flat("BF16", old, new, Codec.ULP)
    codes = forge(stepped.data).streams[Stream.CODES]
    for forged_codes in (
        b"\xff" + codes[1:],  # code 3
        b"\x00" + codes[1:],  # fewer escapes than stored
        b"\xaa" * len(codes),  # more, and stray bits
        codes[:-1] + bytes([codes[-1] | 0xC0]),  # stray bits behind the last code
    ):
        forged = forge(stepped.data)
        forged.streams[Stream.CODES] = forged_codes
        refused(forged.build(), layout, read_all, "values")
    forged = forge(stepped.data)
    for byte in range(2):  # an escape of 2^16 - 3 would be a difference of zero
        plane = bytearray(forged.streams[Stream.ESCAPE + byte])
        plane[0] = 0xFD if byte == 0 else 0xFF
        forged.streams[Stream.ESCAPE + byte] = bytes(plane)
    refused(forged.build(), layout, read_all, "values")
    masked, layout = flat("BF16", old, new, Codec.XOR)
    forged = forge(masked.data)
    for byte in range(2):
        forged.streams[Stream.MASK + byte] = b"\0" + forged.streams[Stream.MASK + byte][1:]
    refused(forged.build(), layout, read_all, "mask")


def test_a_chunk_of_another_layout_is_refused_or_at_least_never_read_outside(
    chunk: bytes, layout: Layout, read_all: Any
) -> None:
    smaller = Layout([TensorSpec(s.name, s.dtype, (1,)) for s in layout])
    refused(chunk, smaller, read_all, "box")
    refused(chunk, Layout([]), read_all, "names tensor")


def test_the_untouched_chunk_is_accepted(chunk: bytes, layout: Layout, forge: Any, read_all: Any) -> None:
    """The forge itself adds no defect."""
    assert len(read_all(chunk, layout).segments) == 9
    assert len(read_all(forge(chunk).build(), layout).segments) == 9
