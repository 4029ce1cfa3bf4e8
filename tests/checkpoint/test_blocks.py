"""Every element is in one block of a set, and whatever has canonical coordinates finds it there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.measure.running_tasks import running_tasks

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.blocks import (
    AT_ONCE,
    BATCH_BLOCKS,
    Block,
    BlockSet,
    block_bytes,
    split_tensor,
    sum_blocks,
    transfer,
)
from dcr_daemon.codec.chunk import SEGMENT_BYTES
from dcr_daemon.runtime import Workers

SHAPE = (6, 4, 10)
SPEC = TensorSpec("x", "BF16", SHAPE)


def test_split_tensors_cover_a_tensor_once_within_the_limit() -> None:
    spec = TensorSpec("x", "BF16", (3, 7, 11))
    for limit in (2, 3, 100, 461, 462, 1 << 20):
        boxes = [block.box for block in split_tensor(5, spec, limit=limit)]
        assert [box.dst for box in boxes] == list(np.cumsum([0, *(box.elements for box in boxes)])[:-1])
        assert sum(box.elements for box in boxes) == spec.elements
        assert all(box.elements * 2 <= max(limit, 2) for box in boxes)
    assert not split_tensor(0, TensorSpec("none", "BF16", (0, 4)), limit=1 << 20)


@pytest.mark.parametrize("chunk", [1, 1000, 4 << 20, 64 << 20])
def test_blocks_are_a_power_of_two_and_fit_a_segment(chunk: int) -> None:
    size = block_bytes(chunk)
    assert size & (size - 1) == 0
    assert size <= 16 << 20


@st.composite
def boxes(draw: Any) -> Box:
    """A slab of a tensor of `SHAPE`, its axes in any order."""
    starts = [draw(st.integers(0, n - 1)) for n in SHAPE]
    shape = [draw(st.integers(1, n - a)) for n, a in zip(SHAPE, starts, strict=True)]
    strides = [40, 10, 1]
    order = draw(st.permutations(range(3)))
    dst = sum(a * s for a, s in zip(starts, strides, strict=True))
    return Box(dst, tuple(shape[i] for i in order), tuple(strides[i] for i in order))


def places(box: Box) -> Any:
    return box.canonical(np.arange(box.elements, dtype=np.int64))


@settings(deadline=None)
@given(boxes())
def test_ordinals_invert_canonical(box: Box) -> None:
    inside, ordinals = box.ordinals(np.arange(240, dtype=np.int64))
    assert np.array_equal(np.flatnonzero(inside), np.sort(places(box)))
    assert np.array_equal(box.canonical(ordinals), np.flatnonzero(inside))


@settings(deadline=None)
@given(boxes(), boxes())
def test_a_transfer_moves_what_two_boxes_share_and_nothing_else(source: Box, target: Box) -> None:
    tensor = np.arange(240, dtype=np.uint16)
    into = np.full(target.elements, 999, dtype=np.uint16)
    moved = transfer(tensor[places(source)], source, into=into, target=target)
    shared = np.isin(places(target), places(source))
    assert moved == shared.sum()
    assert np.array_equal(into, np.where(shared, tensor[places(target)], 999))


def test_two_sets_have_one_digest_exactly_if_their_blocks_are_equal() -> None:
    layout = Layout([SPEC])
    whole = BlockSet.whole(layout)
    assert whole.digest == BlockSet(layout, [Block(0, Box.flat(0, 240))]).digest
    assert whole.digest != BlockSet.whole(layout, 64).digest
    assert whole.elements(0) == BlockSet.whole(layout, 64).elements(0) == 240


def test_batches_hold_every_block_once_within_bytes_and_number() -> None:
    sizes = [1, 9 << 20, 9 << 20, 0, *[8] * (2 * BATCH_BLOCKS), 16 << 20, 16 << 20, 1]
    layout = Layout([TensorSpec(f"t{n:05}", "U8", (size,)) for n, size in enumerate(sizes)])
    blocks = BlockSet.whole(layout)
    batches = list(blocks.batches())
    assert [number for batch in batches for number in batch] == list(range(len(blocks)))
    assert max(map(len, batches)) == BATCH_BLOCKS
    assert all(len(batch) == 1 or sum(map(blocks.nbytes, batch)) <= SEGMENT_BYTES for batch in batches)
    assert not list(BlockSet(layout, []).batches())


async def test_a_sum_of_many_small_tensors_is_few_tasks() -> None:
    layout = Layout([TensorSpec(f"t{n:06}", "U8", (1,)) for n in range(100 * BATCH_BLOCKS)])
    workers = Workers(2)
    with running_tasks() as tasks:
        sums = await sum_blocks(BlockSet.whole(layout), lambda number: number, workers.run)
    workers.close()
    assert sums == list(range(len(layout)))
    assert 2 < tasks.most <= AT_ONCE
    assert tasks.started == 100
