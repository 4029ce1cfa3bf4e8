"""Sample chunks with every kind of segment, and chunks that no writer would make: edited, with matching checksums."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.codec import format as fmt
from dcr_daemon.codec.chunk import ChunkId, Codec
from dcr_daemon.codec.encode import ChunkEncoder, EncodedChunk

Bits = npt.NDArray[Any]
ID = ChunkId(stream="0123456789abcdef", attempt=7, base=3, version=4, group="g1", rank=2, nonce="n0nce", n=5)


@dataclass
class EditableChunk:
    """A chunk taken apart; `build` puts it together with sizes and checksum that fit, so deeper checks are reached."""

    header: dict[str, Any]
    streams: dict[int, bytes]
    stored: dict[int, bytes] = field(default_factory=dict)  #: kind -> exact stored bytes, as zstd
    sizes: dict[int, int] = field(default_factory=dict)  #: kind -> raw size to declare
    tail: bytes = b""

    @classmethod
    def of(cls, data: bytes) -> EditableChunk:
        header = fmt.HEADER.unpack_from(data)
        names = "magic format zero checksum attempt base version rank n stream group nonce streams zero2 segments"
        fields = dict(zip(names.split(), header, strict=True))
        streams, at = {}, fmt.HEADER.size + fields["streams"] * fmt.ENTRY.size
        for i in range(fields["streams"]):
            kind, packing, _, size = fmt.ENTRY.unpack_from(data, fmt.HEADER.size + i * fmt.ENTRY.size)
            body = data[at : at + size]
            streams[kind] = zstandard.decompress(body) if packing else body
            at += size
        return cls(fields, streams)

    @property
    def table(self) -> fmt.Table:
        table = fmt.unpack_table(self.streams[0], self.header["segments"])
        assert table is not None
        return table

    def with_table(self, **columns: list[int]) -> EditableChunk:
        """Replace columns of the segment table."""
        table = self.table
        for name, values in columns.items():
            setattr(table, name, np.array(values, dtype=getattr(table, name).dtype))
        return EditableChunk(dict(self.header), {**self.streams, 0: fmt.pack_table(table)}, self.stored, self.sizes)

    def build(self) -> bytes:
        entries, bodies = [], []
        for kind, raw in sorted(self.streams.items()):
            packed = self.stored.get(kind, zstandard.compress(raw, 1))
            small = kind in self.stored or len(packed) < len(raw)
            size = self.sizes.get(kind, len(raw))
            bodies.append(packed if small else raw)
            entries.append(fmt.ENTRY.pack(kind, int(small), size, len(bodies[-1])))
        fields = {**self.header, "streams": self.header.get("declare", len(entries))}
        fields.pop("declare", None)
        rest = b"".join([*entries, *bodies, self.tail])
        body = fmt.HEADER.pack(*fields.values())[fmt.HASHED_FROM :] + rest
        fields["checksum"] = xxhash.xxh3_64_intdigest(body)
        return fmt.HEADER.pack(*fields.values())[: fmt.HASHED_FROM] + body


def reseal(data: bytes) -> bytes:
    """The same bytes under a checksum that fits."""
    return data[:8] + xxhash.xxh3_64_intdigest(data[fmt.HASHED_FROM :]).to_bytes(8, "little") + data[16:]


def sample_layout() -> Layout:
    return Layout(
        [
            TensorSpec("a", "BF16", (64, 48)),
            TensorSpec("b", "U8", (1000,)),
            TensorSpec("c", "F32", (30, 10)),
            TensorSpec("d", "I64", (40,)),
            TensorSpec("e", "BF16", ()),
            TensorSpec("f", "BF16", (8, 6, 4, 5)),
        ]
    )


def scramble(index: npt.NDArray[np.uint64] | int, salt: int) -> npt.NDArray[np.uint64]:
    """Reproducible bits from plain arithmetic: golden files must not depend on a library's generator."""
    x = np.asarray(index, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(
        salt * 0xD1B54A32D192ED03 % 2**64
    )
    x ^= x >> np.uint64(29)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    return x ^ (x >> np.uint64(32))


def sample_chunk(codec: Codec, rate: int) -> tuple[EncodedChunk, list[Bits], list[Bits]]:
    """All widths and box ranks of `sample_layout`, one element in `rate` changed; (chunk, old, new) tensors."""
    layout = sample_layout()
    old = [
        scramble(np.arange(spec.elements, dtype=np.uint64), t).astype(f"<u{spec.width}")
        for t, spec in enumerate(layout)
    ]
    new = [bits.copy() for bits in old]
    for t, bits in enumerate(new):
        draw = scramble(np.arange(bits.size, dtype=np.uint64), t + 100)
        hit = draw % np.uint64(rate) == 0
        hit[0] = True
        step = np.array([1, -1, 1, -1, 1, 2, -3, 700], dtype=np.int64)[(draw >> np.uint64(40)) % np.uint64(8)]
        bits[hit] += step.astype(bits.dtype)[hit]
    boxes = [
        (0, Box(0, (64, 24), (48, 1))),  # two column shards
        (0, Box(24, (64, 24), (48, 1))),
        (1, Box.flat(0, 600)),
        (1, Box.flat(600, 400)),
        (2, Box(0, (10, 30), (1, 10))),  # transposed
        (3, Box.flat(0, 40)),
        (4, Box.flat(0, 1)),
        (5, Box(0, (4, 8, 5, 3), (5, 120, 1, 40))),  # permuted, every other of the second axis' pairs
        (5, Box(20, (4, 8, 5, 3), (5, 120, 1, 40))),
    ]
    encoder = ChunkEncoder(layout, codec=codec)
    for tensor, box in boxes:
        where = box.canonical(np.arange(box.elements, dtype=np.int64))
        encoder.add(tensor, box, old[tensor][where], new[tensor][where])
    return encoder.finish(ID), old, new
