"""Contents leave out no object that holds an element of a share, and most of those that hold none."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr_daemon.canonical.box import Box
from dcr_daemon.checkpoint.contents import Boxes, Contents, Outlines, join_tables, read_contents, split_tables
from dcr_daemon.errors import Corrupt

SHAPE = (6, 4, 10)
TENSORS = 3


@st.composite
def boxes(draw: Any) -> tuple[int, Box]:
    """A slab of a tensor of `SHAPE`, its axes in any order."""
    starts = [draw(st.integers(0, n - 1)) for n in SHAPE]
    shape = [draw(st.integers(1, n - a)) for n, a in zip(SHAPE, starts, strict=True)]
    order = draw(st.permutations(range(3)))
    dst = sum(a * s for a, s in zip(starts, (40, 10, 1), strict=True))
    box = Box(dst, tuple(shape[i] for i in order), tuple((40, 10, 1)[i] for i in order))
    return draw(st.integers(0, TENSORS - 1)), box


objects = st.lists(st.lists(boxes(), max_size=4), min_size=1, max_size=5)


def elements(held: list[tuple[int, Box]]) -> set[tuple[int, int]]:
    return {
        (tensor, int(place)) for tensor, box in held for place in box.canonical(np.arange(box.elements, dtype=np.int64))
    }


@settings(deadline=None, max_examples=150)
@given(objects, st.lists(boxes(), max_size=4))
def test_no_object_is_left_out_that_holds_an_element_of_the_share(held: Any, share: Any) -> None:
    packed = Contents.of(held).pack()
    assert packed is not None
    contents = read_contents(packed, TENSORS)
    touched = contents.touched(Boxes(share))
    assert touched.shape == (len(held),)
    mine = elements(share)
    for number, one in enumerate(held):
        assert touched[number] or not elements(one) & mine
        assert not contents.outside(number, one)


@settings(deadline=None)
@given(objects)
def test_a_table_reads_back_as_it_was_packed(held: Any) -> None:
    contents = Contents.of(held)
    found = read_contents(contents.pack() or b"", TENSORS)
    assert np.array_equal(found.counts, contents.counts)
    for name in Outlines.__slots__:
        assert np.array_equal(getattr(found.outlines, name), getattr(contents.outlines, name))


def columns(rank: int, world: int) -> list[tuple[int, Box]]:
    width = 64 // world
    return [(0, Box(at * 64 + rank * width, (16, width), (64, 1))) for at in range(0, 64, 16)]


def interleaved(rank: int, world: int) -> list[tuple[int, Box]]:
    """Gate and up rows of a packed [4, 32, 64], experts and halves cut alike."""
    rows = 16 // world
    return [
        (0, Box(half * 16 * 64 + rank * rows * 64, (4, rows, 64), (32 * 64, 64, 1)))
        for half in range(2)
    ]  # fmt: skip


def runs(rank: int, world: int) -> list[tuple[int, Box]]:
    size = 4096 // world
    return [(0, Box.flat(rank * size + at, size // 4)) for at in range(0, size, size // 4)]


@pytest.mark.parametrize("cut", [columns, interleaved, runs])
@pytest.mark.parametrize(("before", "after"), [(8, 8), (8, 4), (4, 8)])
def test_what_is_cut_alike_is_told_apart_exactly(cut: Any, before: int, after: int) -> None:
    contents = Contents.of([cut(rank, before) for rank in range(before)])
    for rank in range(after):
        share = cut(rank, after)
        want = [bool(elements(cut(other, before)) & elements(share)) for other in range(before)]
        assert contents.touched(Boxes(share)).tolist() == want
    assert len(contents.outlines) <= 2 * before  # blocks that adjoin are one outline


def test_many_pairs_are_compared_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcr_daemon.checkpoint.contents.PAIRS", 5)
    contents = Contents.of([[(t, Box.flat(10 * n, 10)) for t in range(7)] for n in range(9)])
    share = [(t, Box.flat(10 * n + 3, 1)) for n in (2, 5) for t in (1, 6)]
    assert np.flatnonzero(contents.touched(Boxes(share))).tolist() == [2, 5]
    assert not contents.touched(Boxes([])).any()


def table(objects: int, counts: list[int], rows: list[tuple[int, ...]]) -> bytes:
    columns = np.array(rows, dtype="<u8").reshape(-1, 6).T
    planes = [
        column.astype(dtype).view("u1").reshape(len(rows), -1).T.tobytes()
        for column, dtype in zip(columns, _TYPES, strict=True)
    ]
    return zstandard.compress(struct.pack(f"<{1 + len(counts)}I", objects, *counts) + b"".join(planes))


_TYPES = ("<u4", "<u8", "<u8", "<u8", "<u8", "<u8")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no frame",
        zstandard.compress(b"\1"),
        zstandard.compress(b"\xff" * 8),
        table(2, [1], [(0, 0, 0, 0, 0, 0)]),
        table(1, [2], [(0, 0, 0, 0, 0, 0)]),
        table(1, [1], [(3, 0, 0, 0, 0, 0)]),
        table(1, [1], [(0, (1 << 64) - 1, 1, 0, 0, 0)]),
        table(1, [1], [(0, 1 << 45, 1 << 45, 0, 0, 0)]),
        table(1, [1], [(0, 0, 0, 4, 2, 2)]),
        table(1, [1], [(0, 0, 0, 0, 0, 1)]),
        table(1, [1], [(0, 0, 0, 0, 0, 0)]) + b"x",
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100)),
        b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 29),
    ],
)  # fmt: skip
def test_bytes_that_are_no_table_are_corrupt(body: bytes) -> None:
    with pytest.raises(Corrupt, match="table of contents"):
        read_contents(body, TENSORS)


def test_tables_come_apart_as_they_were_joined() -> None:
    tables = [b"", b"one", bytes(1000)]
    joined = join_tables(tables)
    assert list(split_tables(joined)) == tables
    for cut in (joined[:-1], joined[:3], joined + b"\1"):
        with pytest.raises(Corrupt, match="cut off"):
            list(split_tables(cut))
    assert list(split_tables(b"")) == []


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(0, 1 << 30), st.integers(0, 255))
def test_any_bytes_are_a_table_or_corrupt(noise: bytes, place: int, value: int) -> None:
    good = bytearray(zstandard.decompress(table(2, [1, 1], [(0, 3, 5, 4, 1, 1), (2, 0, 9, 0, 0, 0)])))
    good[place % len(good)] = value
    for raw in (noise, bytes(good)):
        try:
            contents = read_contents(zstandard.compress(raw), TENSORS)
        except Corrupt:
            continue
        contents.touched(Boxes([(0, Box.flat(0, 4)), (2, Box(1, (3, 2), (4, 1)))]))
