"""Hostile bytes: the decoder answers with sound values or `CorruptChunk`, in bounded memory, and never crashes.

Mutations work on whole objects (the checksum gate), on objects sealed again (everything behind the gate), and on
unpacked tables and streams put together again (the deepest checks). Seeds are fixed, so a failure repeats.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.codec.chunk import Codec
from dcr_daemon.codec.decode import open_chunk, read_id
from dcr_daemon.errors import CorruptChunk

PEAK = 4 << 20  #: bytes; the sample's tensors have a few thousand elements, so nothing sound needs more
ROUNDS = 1500
EDGES = (0, 1, 2, 3, 0x7F, 0x80, 0xFE, 0xFF)


def mangled(body: bytes, dice: random.Random, other: bytes) -> bytes:
    """One to four small or large defects."""
    out = bytearray(body)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(out)) if out else 0
        size = dice.choice((1, 1, 1, 2, 4, 8, 40))
        match dice.randrange(7):
            case 0:
                out[at : at + 1] = bytes([dice.choice(EDGES)])
            case 1:
                out[at : at + 1] = bytes([dice.randrange(256)])
            case 2:
                out[at : at + size] = dice.randbytes(size)
            case 3:
                del out[at : at + size]
            case 4:
                out[at:at] = dice.randbytes(size)
            case 5:
                out[at : at + size] = other[at : at + size]
            case 6:
                del out[at:]
    return bytes(out)


def judge(body: bytes, layout: Layout) -> bool:
    """Whether the body was accepted; if so, everything it says must be sound."""
    try:
        read_id(body)
        chunk = open_chunk(body, layout)
    except CorruptChunk:
        return False
    sound = True
    for i, segment in enumerate(chunk.segments):
        spec = layout[segment.tensor]
        try:
            changes = chunk.changes(i)
        except CorruptChunk:
            sound = False
            continue
        assert changes.positions.dtype == np.int64
        assert changes.operands.dtype == np.dtype(f"<u{spec.width}")
        assert len(changes.positions) == len(changes.operands) == segment.changed >= 1
        assert (np.diff(changes.positions) > 0).all()
        assert changes.positions[0] >= 0
        assert changes.positions[-1] < segment.box.elements
        assert segment.box.last < spec.elements
    return sound


@pytest.fixture(scope="module")
def bodies(sample: Any) -> list[bytes]:
    return [sample(codec, rate)[0].data for codec in Codec for rate in (1, 3, 50)]


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < PEAK


def test_noise(layout: Layout, sealed: Callable[[bytes], bytes], bodies: list[bytes]) -> None:
    dice = random.Random(1)
    for _ in range(ROUNDS):
        head = dice.choice(bodies)[: dice.choice((0, 4, 8, 16, 152))]
        body = head + dice.randbytes(dice.randrange(600))
        assert not judge(body, layout)
        assert len(body) <= 16 or not judge(sealed(body), layout)


@pytest.mark.parametrize("again", [False, True], ids=["as they are", "sealed again"])
def test_mangled_objects(again: bool, layout: Layout, sealed: Callable[[bytes], bytes], bodies: list[bytes]) -> None:
    dice = random.Random(2 + again)
    for _ in range(ROUNDS):
        body = dice.choice(bodies)
        broken = mangled(body, dice, dice.choice(bodies))
        if again and len(broken) > 16:
            judge(sealed(broken), layout)
        else:
            assert broken in bodies or not judge(broken, layout)


def test_mangled_streams(layout: Layout, forge: Any, bodies: list[bytes]) -> None:
    dice = random.Random(4)
    for _ in range(ROUNDS):
        forged, other = forge(dice.choice(bodies)), forge(dice.choice(bodies))
        for kind in dice.sample(sorted(forged.streams), k=min(2, len(forged.streams))):
            raw = forged.streams[kind]
            broken = mangled(raw, dice, other.streams.get(kind, raw))
            if dice.random() < 0.7:  # the same length gets past the size checks
                broken = (broken + raw)[: len(raw)]
            forged.streams[kind] = broken
        judge(forged.build(), layout)


def test_mangled_tables(layout: Layout, forge: Any, bodies: list[bytes]) -> None:
    dice = random.Random(5)
    columns = ("tensor", "changed", "carries", "escapes", "positions", "operation", "shift", "dst", "shape", "strides")
    for _ in range(ROUNDS):
        forged = forge(dice.choice(bodies))
        edits = {}
        for name in dice.sample(columns, k=dice.randint(1, 2)):
            column = getattr(forged.table, name)
            limit = int(np.iinfo(column.dtype).max)
            values = column.tolist()
            row = dice.randrange(len(values))
            values[row] = dice.choice((0, 1, limit, limit - 1, limit // 2 + 1, values[row] + 1, dice.randint(0, limit)))
            values[row] &= limit
            edits[name] = values
        judge(forged.with_table(**edits).build(), layout)


def test_spliced_streams(layout: Layout, forge: Any, bodies: list[bytes]) -> None:
    dice = random.Random(6)
    for _ in range(ROUNDS):
        forged, other = forge(dice.choice(bodies)), forge(dice.choice(bodies))
        kind = dice.choice(sorted(other.streams))
        forged.streams[kind] = other.streams[kind]
        judge(forged.build(), layout)
