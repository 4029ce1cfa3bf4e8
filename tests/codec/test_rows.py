"""Segments are judged in columns: with the verdict, and the pieces, that each of them has by itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.codec import format as fmt
from dcr_daemon.codec.chunk import SEGMENT_BYTES, Operation, Positions
from dcr_daemon.codec.rows import PLANES, read_rows
from dcr_daemon.errors import CorruptChunk

LAYOUT = Layout(
    [
        TensorSpec("a", "BF16", (40, 30)),
        TensorSpec("b", "U8", (7,)),
        TensorSpec("c", "F64", (2, 3, 4)),
        TensorSpec("d", "F32", (0,)),
        TensorSpec("e", "BF16", (1 << 14, 1 << 14)),
    ]
)
Segment = dict[str, Any]

extents = st.one_of(
    st.integers(0, 6), st.sampled_from([30, 40, 1 << 12, 1 << 24, (1 << 24) + 1, 1 << 63, (1 << 64) - 1])
)
strides = st.one_of(
    st.integers(0, 9), st.sampled_from([30, 1200, 1 << 14, 1 << 30, (1 << 62) - 1, 1 << 63, (1 << 64) - 1])
)
axes = st.lists(st.tuples(extents, strides), max_size=5)
nested = st.sampled_from(
    [[(40, 30), (5, 1)], [(6, 2)], [(1, 900), (5, 1)], [(2, 12), (4, 1), (3, 4)], [(5, 1), (40, 30)]]
)


BOXES = [
    (0, 0, [(40, 30), (5, 1)]), (0, 7, [(6, 2)]), (0, 299, [(1, 900), (5, 1)]), (0, 0, [(2, 12), (4, 1), (3, 4)]),
    (0, 0, [(5, 1), (40, 30)]), (0, 1199, [(1, 1)]), (1, 0, [(7, 1)]), (1, 3, [(2, 3)]),
    (2, 0, [(2, 12), (3, 4), (4, 1)]),
    (4, 5, [(1 << 14, 1 << 14), (9, 1)]), (4, 0, [(1 << 23, 32)]), (4, 0, [(1 << 9, 1 << 19), (1 << 14, 1)]),
]  # fmt: skip


@st.composite
def sound_segments(draw: st.DrawFn) -> Segment:
    tensor, dst, box = draw(st.sampled_from(BOXES))
    elements = math.prod(n for n, _ in box)
    changed = draw(st.integers(1, elements))
    positions = draw(st.sampled_from(Positions))
    row = {"tensor": tensor, "dst": dst, "axes": box, "positions": positions, "changed": changed}
    if positions is Positions.GAPS:
        row["shift"] = draw(st.sampled_from([0, 2, 8]))
        row["carries"] = draw(st.integers(0, (elements >> row["shift"]) // 255))
    elif positions is Positions.ALL:
        row["changed"] = elements
    row["operation"] = Operation.OVERWRITE if tensor == 2 else draw(st.sampled_from(Operation))
    row["escapes"] = draw(st.integers(0, row["changed"])) if row["operation"] is Operation.ULP else 0
    return {"shift": 0, "carries": 0} | row


WILD = {
    "axes": axes,
    "tensor": st.integers(0, 5),
    "positions": st.integers(0, 3),
    "operation": st.integers(0, 3),
    "shift": st.sampled_from([0, 2, 8, 9, 255]),
    "changed": st.one_of(st.integers(0, 9), st.sampled_from([200, (1 << 32) - 1])),
    "carries": st.sampled_from([0, 1, (1 << 32) - 1]),
    "escapes": st.sampled_from([0, 1, 2, (1 << 32) - 1]),
    "dst": st.one_of(st.integers(0, 9), st.sampled_from([1199, 1 << 28, (1 << 64) - 1])),
}


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    """A sound one, in which one field or two are anything."""
    wild = draw(st.lists(st.sampled_from(sorted(WILD)), max_size=2))
    return draw(sound_segments()) | {field: draw(WILD[field]) for field in wild}


def as_table(rows: list[Segment]) -> fmt.Table:
    columns = {name: np.array([row.get(name, 0) for row in rows], dtype) for name, dtype in fmt.ROW_COLUMNS}
    columns["rank"] = np.array([len(row["axes"]) for row in rows], "u1")
    flat = [axis for row in rows for axis in row["axes"]]
    return fmt.Table(
        **columns, shape=np.array([n for n, _ in flat], "<u8"), strides=np.array([s for _, s in flat], "<u8")
    )


def sizes_of(row: Segment) -> dict[int, int] | None:
    """Bytes in each stream, or None if it is not sound: one segment, in Python's own integers."""
    if not 1 <= len(row["axes"]) <= 4 or row["tensor"] >= len(LAYOUT) or max(row["positions"], row["operation"]) > 2:
        return None
    spec = LAYOUT[row["tensor"]]
    if any(n < 1 or not 1 <= stride < 1 << 62 for n, stride in row["axes"]):
        return None
    shape, steps = zip(*row["axes"], strict=True)
    box = Box(row["dst"], shape, steps)
    k, carries, escapes, shift = (row[name] for name in ("changed", "carries", "escapes", "shift"))
    if not box.fits(spec.elements) or box.elements * spec.width > SEGMENT_BYTES or not 1 <= k <= box.elements:
        return None
    sizes = {}
    if row["positions"] == Positions.GAPS:
        sound = shift <= 8 and carries <= (box.elements >> shift) // 255
        sizes = {1: k + carries, 2: (k * shift + 7) // 8}
    else:
        sound = shift == carries == 0 and (row["positions"] == Positions.BITMASK or k == box.elements)
        if row["positions"] == Positions.BITMASK:
            sizes[3] = (box.elements + 7) // 8
    if row["operation"] == Operation.ULP:
        sound &= escapes <= k and spec.width <= 4
        sizes |= {4: (k + 3) // 4, **{8 + byte: escapes for byte in range(spec.width)}}
    else:
        sound &= escapes == 0 and (row["operation"] == Operation.OVERWRITE or spec.width <= 4)
        sizes |= {PLANES[Operation(row["operation"])] + byte: k for byte in range(spec.width)}
    return {kind: size for kind, size in sizes.items() if size} if sound else None


@settings(max_examples=600)
@given(st.lists(segments(), min_size=1, max_size=4))
def test_the_verdict_on_a_table_is_that_on_its_segments(rows: list[Segment]) -> None:
    wanted = [sizes_of(row) for row in rows]
    if None in wanted:
        with pytest.raises(CorruptChunk):
            read_rows(as_table(rows), LAYOUT)
    else:
        assert len(read_rows(as_table(rows), LAYOUT)) == len(rows)


@settings(max_examples=300)
@given(st.lists(sound_segments(), min_size=1, max_size=4))
def test_sound_segments_lie_one_behind_the_other(rows: list[Segment]) -> None:
    read = read_rows(as_table(rows), LAYOUT)
    ends: dict[int, int] = {}
    for i, row in enumerate(rows):
        sizes = sizes_of(row)
        assert sizes is not None
        found = read.row(i)
        assert found.pieces == {kind: (ends.get(kind, 0), size) for kind, size in sizes.items()}
        ends |= {kind: ends.get(kind, 0) + size for kind, size in sizes.items()}
        shape, steps = zip(*row["axes"], strict=True)
        assert found.segment.box == Box(row["dst"], shape, steps)
        assert (found.segment.tensor, found.segment.changed) == (row["tensor"], row["changed"])
        assert (found.width, found.shift, found.escapes) == (LAYOUT[row["tensor"]].width, row["shift"], row["escapes"])
    assert read.totals == ends


def test_a_stride_that_no_64_bits_hold_is_refused_before_it_is_multiplied() -> None:
    """An axis of one place may have any stride, and the places of its box are computed with it all the same."""
    row = {"axes": [(1, 1 << 63), (3, 1)], "tensor": 0, "changed": 2}
    with pytest.raises(CorruptChunk, match="of a has a box that is no piece"):
        read_rows(as_table([row]), LAYOUT)
