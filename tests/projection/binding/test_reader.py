"""Every box that a rank holds is read bit for bit, whatever lies how in memory; blocks are everything, once, and small.

Judged by index tensors: element i of a canonical tensor is the number i, so that a wrong place is a wrong value.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.measure.torch_allocations import Allocations
from support.tensors.regions import dense_regions

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.coverage import exactly_once
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.canonical.region import Region, box, indices, row_major, wire_pieces
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.binding.bind import Live
from dcr_daemon.projection.binding.reader import Reader, blocks
from dcr_daemon.projection.region_map import Map, Shard, shards_of
from dcr_daemon.projection.sharding.intervals import Cut, local_shape, shard
from dcr_daemon.projection.values import Add, torch_dtype
from dcr_daemon.projection.values import Bits as Same


def elements(piece: Box) -> np.ndarray[Any, Any]:
    return piece.canonical(np.arange(piece.elements))


def region_of(piece: Box, name: str) -> Region:
    return Region(name, piece.shape, 0, row_major(piece.shape), piece.dst, piece.strides)


def numbered(count: int, dtype: str = "F32") -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32).to(torch_dtype(dtype))


def scattered(region: Region, size: int, given: str) -> torch.Tensor:
    """A local tensor of `size` elements with the region's canonical indices where the region says, and -1 elsewhere."""
    local = torch.full((size,), -1.0)
    src, dst = indices(region)
    local[torch.from_numpy(src)] = torch.from_numpy(dst).to(torch.float32)
    return local.to(torch_dtype(given))


def one(name: str, local: torch.Tensor, regions: list[Region], layout: Layout) -> Reader:
    dtype = "F32" if local.dtype == torch.float32 else "BF16"
    made = Map(tuple(shards_of(name, tuple(local.shape), dtype, regions, layout)))
    return Reader(Live(made, {name: local}), layout)


@settings(max_examples=150, deadline=None)
@given(region=dense_regions(), given=st.sampled_from(["F32", "BF16"]), limit=st.sampled_from([1, 2, 6, 16, 64, 4096]))
def test_every_block_of_any_piece_is_what_the_canonical_tensor_has_there(
    region: Region, given: str, limit: int
) -> None:
    total = region.dst_last + 1
    layout = Layout([TensorSpec("t", "BF16", (total,))])
    reader = one("p", scattered(region, region.src_last + 3, given), [region], layout)
    made = blocks(Map(tuple(shards_of("p", (region.src_last + 3,), given, [region], layout))), layout, limit)
    expected = numbered(total, "BF16").view(torch.int16).numpy().view("u2")
    reader.plan(made)
    for index, piece in made:
        assert piece.elements <= max(1, limit // 2)
        assert (reader.read(index, piece) == expected[elements(piece)]).all()
    covered = np.concatenate([elements(piece) for _, piece in made])
    assert sorted(covered) == sorted(indices(region)[1])


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[Cut]]]:
    """A shape, and the cuts of every rank of a mesh of one or two dimensions."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    ways = draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=2))
    axes = [draw(st.integers(0, len(shape) - 1)) for _ in ways]
    groups = [draw(st.sampled_from([1, 1, 2])) if shape[axis] % 2 == 0 else 1 for axis in axes]
    places = np.ndindex(*ways)
    return shape, [
        [Cut(a, w, at, g) for a, w, at, g in zip(axes, ways, place, groups, strict=True)] for place in places
    ]


@settings(max_examples=150, deadline=None)
@given(case=cuts(), limit=st.sampled_from([4, 8, 32, 4096]), data=st.data())
def test_ranks_of_any_mesh_read_all_of_a_tensor_once_through_any_strides(
    case: tuple[tuple[int, ...], list[list[Cut]]], limit: int, data: st.DataObject
) -> None:
    shape, ranks = case
    layout = Layout([TensorSpec("t", "F32", shape)])
    whole, seen = numbered(math.prod(shape)).view(torch.int32).numpy().view("u4"), []
    for rank in ranks:
        regions, held = shard("t", shape, rank), local_shape(shape, rank)
        local = torch.empty(held)
        for region in regions:
            src, dst = (torch.from_numpy(side) for side in indices(region))
            local.view(-1)[src] = dst.to(torch.float32)
        order = data.draw(st.permutations(range(len(shape))))
        back = [order.index(axis) for axis in range(len(shape))]
        local = local.permute(order).contiguous().permute(back)  # the same tensor over other memory strides
        reader = one("p", local, regions, layout)
        made = Map(tuple(shards_of("p", held, "F32", regions, layout)))
        for index, piece in blocks(made, layout, limit):
            assert (reader.read(index, piece) == whole[elements(piece)]).all()
            seen.append(region_of(piece, "t"))
    assert exactly_once(seen, layout) == []


@settings(deadline=None)
@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=4), most=st.integers(1, 40))
def test_parts_are_in_order_small_and_side_by_side(shape: list[int], most: int) -> None:
    whole = Box(5, tuple(shape), row_major(shape))
    made = list(whole.split(most))
    assert (np.concatenate([elements(part) for part in made]) == elements(whole)).all()
    assert all(part.elements <= most for part in made)


def test_a_flat_region_is_cut_at_multiples_of_the_limit() -> None:
    layout = Layout([TensorSpec("t", "BF16", (1000,))])
    made = Map((Shard("p", (990,), "BF16", Same(), (Region("t", (990,), 0, (1,), 10, (1,)),)),))
    found = [piece for _, piece in blocks(made, layout, 512)]
    assert [piece.dst for piece in found] == [10, 266, 522, 778]
    assert all(b.dst - a.dst == 256 for a, b in pairwise(found))


def test_blocks_follow_the_local_tensors_in_order() -> None:
    layout = Layout([TensorSpec(name, "F32", (8,)) for name in "abc"])
    first = Shard("z", (16,), "F32", Same(), (Region("c", (8,), 8, (1,), 0, (1,)), Region("a", (8,), 0, (1,), 0, (1,))))
    second = Shard("y", (8,), "F32", Same(), (Region("b", (8,), 0, (1,), 0, (1,)),))
    assert [layout[i].name for i, _ in blocks(Map((first, second)), layout, 64)] == ["a", "c", "b"]


def test_bits_of_one_run_are_the_tensors_own_memory() -> None:
    layout = Layout([TensorSpec("t", "F32", (6, 4))])
    local = numbered(12).reshape(3, 4)
    reader = one("p", local, [Region("t", (12,), 0, (1,), 12, (1,))], layout)
    got = reader.read(0, Box.flat(16, 4))
    assert got.ctypes.data == local.data_ptr() + 16
    assert got.tolist() == local.view(torch.int32)[1].tolist()


NANS = [0x7FA12345, 0x7FC00000, -1, 0x7F800001, 0x7F800000, 1, 0x3F808000, 0x3F818000]


@pytest.mark.parametrize("strided", [False, True])
def test_values_are_cast_as_an_export_casts_them_nan_included(strided: bool) -> None:
    """torch casts a NaN to other bits where memory is strided; an export casts whole tensors."""
    layout = Layout([TensorSpec("t", "BF16", (512, 8))])
    whole = torch.tensor(NANS, dtype=torch.int32).repeat(512, 1).view(torch.float32)
    exported = whole.to(torch.bfloat16).view(torch.int16).numpy().view("u2")
    local = whole.t().contiguous() if strided else whole
    region = Region("t", (512, 8), 0, (1, 512), 0, (8, 1)) if strided else Region("t", (4096,), 0, (1,), 0, (1,))
    reader = one("p", local, [region], layout)
    assert (reader.read(0, Box.flat(0, 4096)) == exported.reshape(-1)).all()
    columns = Box(3, (512,), (8,))
    assert (reader.read(0, columns) == exported[:, 3]).all()
    assert (reader.read(0, Box(1, (4, 3), (8, 2))) == exported[:4, [1, 3, 5]].reshape(-1)).all()


def test_a_constant_is_added_in_the_local_dtype() -> None:
    layout = Layout([TensorSpec("norm", "BF16", (64,))])
    local = torch.randn(64, dtype=torch.bfloat16)
    made = Map((Shard("p", (64,), "BF16", Add(1.0, "BF16"), (Region("norm", (64,), 0, (1,), 0, (1,)),)),))
    got = Reader(Live(made, {"p": local}), layout).read(0, Box.flat(0, 64))
    assert (got == (local + 1).view(torch.int16).numpy().view("u2")).all()


def test_a_tensor_in_pieces_of_several_parameters_is_put_together() -> None:
    layout = Layout([TensorSpec("t", "BF16", (8, 6))])
    whole = numbered(48).reshape(8, 6)
    left, right = whole[:, :2].contiguous(), whole[:, 2:].to(torch.bfloat16)
    shards = [
        *shards_of("left", (8, 2), "F32", [Region("t", (8, 2), 0, (2, 1), 0, (6, 1))], layout),
        *shards_of("right", (8, 4), "BF16", [Region("t", (8, 4), 0, (4, 1), 2, (6, 1))], layout),
    ]
    reader = Reader(Live(Map(tuple(shards)), {"left": left, "right": right}), layout)
    got = reader.read(0, Box.flat(6, 36))
    assert (got == whole[1:7].to(torch.bfloat16).reshape(-1).view(torch.int16).numpy().view("u2")).all()


def test_what_a_rank_does_not_hold_is_refused_by_name() -> None:
    layout = Layout([TensorSpec("mine", "F32", (8, 4)), TensorSpec("theirs", "F32", (4,))])
    region = Region("mine", (16,), 0, (1,), 8, (1,))
    reader = one("p", torch.zeros(16), [region], layout)
    for piece in (Box.flat(0, 9), Box.flat(20, 8), Box(0, (8,), (4,))):
        with pytest.raises(Incompatible, match="mine: this rank is not the source"):
            reader.read(0, piece)
    with pytest.raises(Incompatible, match="theirs"):
        reader.plan([(1, Box.flat(0, 4))])
    twice = one("p", torch.zeros(16), [region, Region("mine", (4,), 0, (1,), 24, (1,)), region], layout)
    with pytest.raises(Incompatible, match="once"):
        twice.read(0, Box.flat(8, 16))
    hidden = one(
        "p", torch.zeros(16), [Region("mine", (4,), 0, (1,), 0, (1,)), Region("mine", (4,), 4, (1,), 0, (1,))], layout
    )
    with pytest.raises(Incompatible, match="once"):  # as many as wanted, and half of them twice
        hidden.read(0, Box.flat(0, 8))


@pytest.mark.parametrize("given", ["F32", "BF16"])
def test_a_transposition_is_read_by_tiles(given: str) -> None:
    """Expert slices that are interleaved and transposed, larger than a tile on every side and no multiple of one."""
    hidden, inner, rows = 300, 270, 540
    layout = Layout([TensorSpec("t", "BF16", (hidden, rows))])
    region = Region("t", (hidden, inner, 2), 0, (1, hidden, inner * hidden), 0, (rows, 2, 1))
    canonical = torch.randint(-128, 128, (hidden * rows,)).to(torch.float32)
    local = torch.empty(rows * hidden)
    src, dst = (torch.from_numpy(side) for side in indices(region))
    local[src] = canonical[dst]
    reader = one("p", local.to(torch_dtype(given)), [region], layout)
    wanted = canonical.to(torch.bfloat16).view(torch.int16).numpy().view("u2")
    assert (reader.read(0, Box.flat(0, hidden * rows)) == wanted).all()
    assert (reader.read(0, Box.flat(1001, 140_003)) == wanted[1001:141_004]).all()


def test_memory_that_overlaps_is_read_through_a_copy() -> None:
    layout = Layout([TensorSpec("t", "F32", (5, 3))])
    local = torch.arange(3.0).expand(5, 3)
    reader = one("p", local, [Region("t", (15,), 0, (1,), 0, (1,))], layout)
    assert (reader.read(0, Box.flat(3, 9)).view("f4") == [0, 1, 2] * 3).all()


LIMIT = 1 << 20


@pytest.mark.parametrize(
    ("given", "region"),
    [
        ("BF16", Region("t", (2048, 1024), 0, (1024, 1), 0, (2048, 1))),
        ("F32", Region("t", (2048, 1024), 0, (1024, 1), 0, (2048, 1))),
        ("F32", Region("t", (2048, 1024), 0, (1, 2048), 0, (1024, 1))),
        ("BF16", Region("t", (2048, 1024), 0, (1, 2048), 0, (1024, 1))),
        ("F32", Region("t", (1 << 21,), 0, (1,), 0, (1,))),
    ],
)
def test_reading_never_needs_more_than_twice_the_box(given: str, region: Region) -> None:
    layout = Layout([TensorSpec("t", "BF16", (2048, 2048))])
    reader = one("p", torch.zeros(1 << 21, dtype=torch_dtype(given)), [region], layout)
    for index, piece in blocks(Map(tuple(shards_of("p", (1 << 21,), given, [region], layout))), layout, LIMIT):
        with Allocations() as seen:
            reader.read(index, piece)
        assert seen.largest <= LIMIT
        assert seen.most <= 2 * LIMIT


def test_the_next_steps_tensors_are_read_after_binding_whatever_their_strides() -> None:
    layout = Layout([TensorSpec("t", "F32", (4, 6))])
    region = Region("t", (24,), 0, (1,), 0, (1,))
    made = Map(tuple(shards_of("p", (4, 6), "F32", [region], layout)))
    reader = Reader(Live(made, {"p": numbered(24).reshape(4, 6)}), layout)
    assert reader.read(0, Box.flat(5, 2)).view("f4").tolist() == [5, 6]
    reader.bind(Live(made, {"p": (numbered(24) + 100).reshape(4, 6).t().contiguous().t()}))
    assert reader.read(0, Box.flat(5, 2)).view("f4").tolist() == [105, 106]


def test_threads_may_read_at_once() -> None:
    layout = Layout([TensorSpec("t", "BF16", (512, 96))])
    region = Region("t", (512, 96), 0, (1, 512), 0, (96, 1))
    reader = one("p", scattered(region, 512 * 96, "F32"), [region], layout)
    expected = numbered(512 * 96, "BF16").view(torch.int16).numpy().view("u2")
    made = [piece for part in wire_pieces(region) for piece in box(part).split(1000)]

    def right(piece: Box) -> bool:
        return bool((reader.read(0, piece) == expected[elements(piece)]).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, made * 3))
