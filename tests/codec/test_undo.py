"""Undo brings back exactly what was there, or says that it cannot and leaves the segment alone (must P7)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.chunks.whole_tensors import in_whole

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.codec.chunk import Codec, Operation
from dcr_daemon.codec.decode import open_chunk
from dcr_daemon.codec.undo import undo_chunk
from dcr_daemon.errors import Corrupt


@pytest.mark.parametrize("codec", [Codec.ULP, Codec.XOR])
def test_only_overwrites_need_old_bits(codec: Codec, sample: Any) -> None:
    encoded, old, new = sample(codec, 3)
    overwritten = [s for s in encoded.segments if s.operation is Operation.OVERWRITE]
    assert [s.tensor for s in overwritten] == [3]  # the tensor of 8-byte elements
    assert len(encoded.undo) == 8 * overwritten[0].changed
    assert encoded.undo == old[3][old[3] != new[3]].tobytes()


def test_only_the_tensors_of_its_segments_are_asked_for(sample: Any, layout: Layout) -> None:
    encoded, old, new = sample(Codec.AUTO, 3)
    baseline = {segment.tensor: new[segment.tensor] for segment in encoded.segments}
    undo_chunk(open_chunk(encoded.data, layout), memoryview(encoded.undo), locate=in_whole(baseline))
    assert all(np.array_equal(bits, old[tensor]) for tensor, bits in baseline.items())


@pytest.mark.parametrize("codec", list(Codec))
def test_a_baseline_that_is_not_what_the_chunk_left_is_not_touched(codec: Codec, sample: Any, layout: Layout) -> None:
    encoded, old, new = sample(codec, 3)
    chunk = open_chunk(encoded.data, layout)
    first = encoded.segments[0]
    where = first.box.canonical(chunk.changes(0).positions)
    new[first.tensor][where[0]] ^= 1
    kept = [bits.copy() for bits in new]
    with pytest.raises(Corrupt, match="baseline of a is not what the chunk left"):
        undo_chunk(chunk, encoded.undo, locate=in_whole(new))
    assert all(np.array_equal(a, b) for a, b in zip(new, kept, strict=True))
    assert not np.array_equal(new[0], old[0])


def test_undo_twice_is_refused(sample: Any, layout: Layout) -> None:
    encoded, old, new = sample(Codec.AUTO, 3)
    chunk = open_chunk(encoded.data, layout)
    undo_chunk(chunk, encoded.undo, locate=in_whole(new))
    with pytest.raises(Corrupt):
        undo_chunk(chunk, encoded.undo, locate=in_whole(new))
    assert all(np.array_equal(a, b) for a, b in zip(new, old, strict=True))


@pytest.mark.parametrize(("cut", "match"), [(slice(None, -1), "shorter"), (slice(0), "shorter")])
def test_lost_old_bits_are_noticed(cut: slice, match: str, sample: Any, layout: Layout) -> None:
    encoded, _, new = sample(Codec.OVERWRITE, 3)
    with pytest.raises(Corrupt, match=match):
        undo_chunk(open_chunk(encoded.data, layout), encoded.undo[cut], locate=in_whole(new))


def test_old_bits_of_another_chunk_are_noticed(sample: Any, layout: Layout) -> None:
    encoded, _, new = sample(Codec.OVERWRITE, 3)
    with pytest.raises(Corrupt, match="baseline of a"):
        undo_chunk(open_chunk(encoded.data, layout), bytes(len(encoded.undo)), locate=in_whole(new))
    encoded, _, new = sample(Codec.OVERWRITE, 3)
    with pytest.raises(Corrupt, match="belong to no segment"):
        undo_chunk(open_chunk(encoded.data, layout), encoded.undo + b"\0", locate=in_whole(new))
