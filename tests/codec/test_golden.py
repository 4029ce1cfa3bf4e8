"""The format is frozen: objects written long ago read as they did, and today's writer writes the same format.

`DCR_REGENERATE_GOLDEN=1 pytest tests/codec/test_golden.py` rewrites the files, on purpose and never in passing: it
means that readers in the field no longer understand new chunks, so `FORMAT` must go up with it. zstd frames may
differ between releases of zstd, so writers are compared by what their streams hold, readers by the files as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.codec.chunk import ChunkId, Codec
from dcr_daemon.codec.decode import open_chunk, read_id

GOLDEN = Path(__file__).parent / "golden"
CASES = [(codec, rate) for codec in Codec for rate in (2, 40)] + [(Codec.ULP, 1), (Codec.ULP, 400)]
FORCED = [(codec, rate) for codec, rate in CASES if codec is not Codec.AUTO]  #: what AUTO chooses may improve
NAMES = [f"{codec.name.lower()}-{rate}" for codec, rate in CASES]


def description(data: bytes, layout: Layout) -> dict[str, Any]:
    """Everything a reader gets out of a chunk, as text."""
    chunk = open_chunk(data, layout)
    segments = []
    for i, segment in enumerate(chunk.segments):
        changes = chunk.changes(i)
        segments.append(
            {
                "tensor": segment.tensor,
                "box": [segment.box.dst, list(segment.box.shape), list(segment.box.strides)],
                "changed": segment.changed,
                "operation": segment.operation.name,
                "before": f"{segment.before:016x}",
                "after": f"{segment.after:016x}",
                "first": [int(changes.positions[0]), int(changes.operands[0])],
                "last": [int(changes.positions[-1]), int(changes.operands[-1])],
                "positions": hashlib.sha256(changes.positions.astype("<i8").tobytes()).hexdigest()[:16],
                "operands": hashlib.sha256(changes.operands.tobytes()).hexdigest()[:16],
            }
        )
    return {"layout": layout.digest, "segments": segments}


@pytest.mark.skipif("DCR_REGENERATE_GOLDEN" not in os.environ, reason="rewrites the golden files; on purpose only")
def test_regenerate(sample: Any, layout: Layout) -> None:
    for (codec, rate), name in zip(CASES, NAMES, strict=True):
        data = sample(codec, rate)[0].data
        (GOLDEN / f"{name}.dcr").write_bytes(data)
        (GOLDEN / f"{name}.json").write_text(json.dumps(description(data, layout), indent=1) + "\n")


@pytest.mark.parametrize("name", NAMES)
def test_old_chunks_read_as_they_did(name: str, layout: Layout, identity: ChunkId) -> None:
    data = (GOLDEN / f"{name}.dcr").read_bytes()
    assert read_id(data) == identity
    assert description(data, layout) == json.loads((GOLDEN / f"{name}.json").read_text())


@pytest.mark.parametrize(("codec", "rate"), CASES, ids=NAMES)
def test_old_chunks_hold_what_they_were_made_of(
    codec: Codec, rate: int, sample: Any, layout: Layout, apply: Any
) -> None:
    _, old, new = sample(codec, rate)
    apply(open_chunk((GOLDEN / f"{codec.name.lower()}-{rate}.dcr").read_bytes(), layout), old)
    assert all(np.array_equal(a, b) for a, b in zip(old, new, strict=True))


@pytest.mark.parametrize(("codec", "rate"), FORCED)
def test_a_forced_writer_still_writes_the_same_streams(codec: Codec, rate: int, sample: Any, forge: Any) -> None:
    golden = forge((GOLDEN / f"{codec.name.lower()}-{rate}.dcr").read_bytes())
    today = forge(sample(codec, rate)[0].data)
    assert today.streams == golden.streams
    assert {**today.header, "checksum": 0} == {**golden.header, "checksum": 0}


def test_the_files_reach_every_stream_and_codec(forge: Any) -> None:
    seen: set[int] = set()
    positions, operations, ranks = set(), set(), set()
    for name in NAMES:
        forged = forge((GOLDEN / f"{name}.dcr").read_bytes())
        seen |= forged.streams.keys()
        positions |= set(forged.table.positions.tolist())
        operations |= set(forged.table.operation.tolist())
        ranks |= set(forged.table.rank.tolist())
    assert seen == {*range(5), *range(8, 12), *range(16, 20), *range(24, 32)}
    assert (positions, operations, ranks) == ({0, 1, 2}, {0, 1, 2}, {1, 2, 4})
