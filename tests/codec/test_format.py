"""docs/FORMAT.md is enough to read a chunk: a second reader, written from that page alone, finds the same."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import xxhash
import zstandard

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.codec import format as fmt
from dcr_daemon.codec.decode import open_chunk

GOLDEN = Path(__file__).parent / "golden"
COLUMNS = [("rank", 1), ("positions", 1), ("operation", 1), ("shift", 1), ("tensor", 4), ("changed", 4)]
COLUMNS += [("carries", 4), ("escapes", 4), ("dst", 8), ("before", 8), ("after", 8)]


def take(raw: bytes, at: int, count: int, width: int) -> list[int]:
    """A column in byte planes."""
    return [sum(raw[at + plane * count + i] << 8 * plane for plane in range(width)) for i in range(count)]


def bits(raw: bytes, first: int, count: int) -> int:
    return int.from_bytes(raw, "little") >> first & (1 << count) - 1


class PlainReader:
    """No numpy, no kernels, no checks: the format and nothing else."""

    def __init__(self, data: bytes) -> None:
        assert data[:4] == b"DCRC"
        assert struct.unpack_from("<HH", data, 4) == (1, 0)
        assert struct.unpack_from("<Q", data, 8)[0] == xxhash.xxh3_64_intdigest(data[16:])
        self.places = struct.unpack_from("<QQQII", data, 16)
        self.ids = [data[at : at + 32].rstrip(b"\0").decode() for at in (48, 80, 112)]
        streams, zero, self.rows = struct.unpack_from("<HHI", data, 144)
        assert zero == 0
        self.raw: dict[int, bytes] = {}
        at = 152 + 10 * streams
        for i in range(streams):
            kind, packing, size, stored = struct.unpack_from("<BBII", data, 152 + 10 * i)
            body = data[at : at + stored]
            self.raw[kind] = zstandard.decompress(body) if packing else body
            assert len(self.raw[kind]) == size
            at += stored
        assert at == len(data)
        self.cursor = dict.fromkeys(range(32), 0)
        self.table: dict[str, list[int]] = {}
        at = 0
        for name, width in COLUMNS:
            self.table[name] = take(self.raw[0], at, self.rows, width)
            at += self.rows * width
        axes = sum(self.table["rank"])
        self.table["shape"], self.table["strides"] = (
            take(self.raw[0], at, axes, 8),
            take(self.raw[0], at + 8 * axes, axes, 8),
        )
        assert at + 16 * axes == len(self.raw[0])

    def piece(self, kind: int, size: int) -> bytes:
        start = self.cursor[kind]
        self.cursor[kind] += size
        return self.raw.get(kind, b"")[start : start + size]

    def lanes(self, kind: int, count: int, width: int) -> list[int]:
        planes = [self.piece(kind + plane, count) for plane in range(width)]
        return [sum(planes[plane][i] << 8 * plane for plane in range(width)) for i in range(count)]

    def segment(self, i: int, width: int, elements: int) -> tuple[list[int], list[int]]:
        """Positions and operands of segment `i`; segments are read in order."""
        row = {name: column[i] for name, column in self.table.items() if name not in ("shape", "strides")}
        return self.positions(row, elements), self.operands(row, width)

    def positions(self, row: dict[str, int], elements: int) -> list[int]:
        k, shift = row["changed"], row["shift"]
        if row["positions"] == 2:
            return list(range(k))
        if row["positions"] == 1:
            mask = self.piece(3, (elements + 7) // 8)
            return [e for e in range(elements) if mask[e // 8] >> e % 8 & 1]
        low = self.piece(2, (k * shift + 7) // 8)
        found, position, units = [], -1, 0
        for byte in self.piece(1, k + row["carries"]):
            units += byte
            if byte < 255:
                position += 1 + (units << shift | bits(low, len(found) * shift, shift))
                found.append(position)
                units = 0
        return found

    def operands(self, row: dict[str, int], width: int) -> list[int]:
        k = row["changed"]
        if row["operation"] == 1:
            return self.lanes(16, k, width)
        if row["operation"] == 2:
            return self.lanes(24, k, width)
        codes, escapes = self.piece(4, (k + 3) // 4), iter(self.lanes(8, row["escapes"], width))
        z = [code + 1 if code < 2 else next(escapes) + 3 for code in (bits(codes, 2 * j, 2) for j in range(k))]
        return [(v // 2 if v % 2 == 0 else -(v + 1) // 2) % (1 << 8 * width) for v in z]


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.dcr")), ids=lambda path: path.stem)
def test_a_reader_written_from_the_page_finds_the_same(path: Path, layout: Layout) -> None:
    data = path.read_bytes()
    plain, chunk = PlainReader(data), open_chunk(data, layout)
    found: Any = (chunk.id.attempt, chunk.id.base, chunk.id.version, chunk.id.rank, chunk.id.n)
    assert plain.places == found
    assert plain.ids == [chunk.id.stream, chunk.id.group, chunk.id.nonce]
    axis = 0
    for i, segment in enumerate(chunk.segments):
        changes = chunk.changes(i)
        positions, operands = plain.segment(i, layout[segment.tensor].width, segment.box.elements)
        assert positions == changes.positions.tolist()
        assert operands == changes.operands.tolist()
        rank = plain.table["rank"][i]
        box = (
            plain.table["dst"][i],
            plain.table["shape"][axis : axis + rank],
            plain.table["strides"][axis : axis + rank],
        )
        assert box == (segment.box.dst, list(segment.box.shape), list(segment.box.strides))
        assert (plain.table["before"][i], plain.table["after"][i]) == (segment.before, segment.after)
        axis += rank
    assert all(plain.cursor[kind] == len(raw) for kind, raw in plain.raw.items() if kind)


def test_the_header_is_as_wide_as_the_page_says() -> None:
    assert (fmt.HEADER.size, fmt.ENTRY.size, fmt.ROW_BYTES, fmt.AXIS_BYTES) == (152, 10, 44, 16)
