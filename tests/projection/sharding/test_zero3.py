"""Flat partitions: each canonical element in one of them, at its place, whatever the parameter is made of."""

from __future__ import annotations

from enum import Enum

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.ranks.readings import assembled, readings
from support.tensors.regions import pairs
from torch import nn

from dcr_daemon.canonical.coverage import exactly_once
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.canonical.region import whole
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.binding.bind import live
from dcr_daemon.projection.frameworks.torchtitan import grouped_experts, rotary_rows
from dcr_daemon.projection.sharding.zero3 import partition, persistent


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6), st.integers(1, 9))
def test_partitions_of_a_packed_parameter_cover_it_once(experts: int, rows: int, columns: int, world: int) -> None:
    names = [f"experts.{e}" for e in range(experts)]
    regions = grouped_experts(names, rows, columns=columns)
    elements = experts * rows * columns
    size = -(-elements // world)
    all_pieces = []
    for rank in range(world):
        pieces = partition(regions, elements, rank=rank, world=world)
        lo = rank * size
        assert pairs(pieces) == sorted((s - lo, d) for s, d in pairs(regions) if lo <= s < lo + size)
        all_pieces += pieces
    assert exactly_once(all_pieces, dict.fromkeys(names, (rows, columns))) == []


def test_partitions_of_a_permuted_parameter_are_few() -> None:
    regions = rotary_rows("q", heads=8, head_dim=16, columns=32)
    parts = [partition(regions, 8 * 16 * 32, rank=rank, world=3) for rank in range(3)]
    assert exactly_once([piece for part in parts for piece in part], {"q": (128, 32)}) == []
    assert max(map(len, parts)) <= 2 * 4


def test_aligned_partitions_leave_padding_out() -> None:
    assert [
        sum(p.elements for p in partition(whole("t", (10,)), 10, rank=rank, world=3, size=8)) for rank in range(3)
    ] == [
        8,
        2,
        0,
    ]
    with pytest.raises(Incompatible, match="cannot hold"):
        partition(whole("t", (10,)), 10, rank=0, world=3, size=2)


def test_what_every_rank_keeps_whole_has_one_owner() -> None:
    owners = [rank for rank in range(4) if persistent(whole("norm", (8,)), rank, 4)]
    assert len(owners) == 1


class Status(Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2


def partitioned(net: nn.Module, values: dict[str, torch.Tensor], rank: int, world: int) -> None:
    """What DeepSpeed leaves in a model: a padded partition beside each parameter, whose own data are gone."""
    for name, parameter in net.named_parameters():
        whole_value = values[name]
        size = -(-whole_value.numel() // world)
        padded = torch.zeros(size * world)
        padded[: whole_value.numel()] = whole_value.reshape(-1)
        parameter.ds_shape, parameter.ds_tensor = whole_value.shape, padded[rank * size :][:size].clone()
        parameter.ds_tensor.status = Status.AVAILABLE
        parameter.ds_zero_partition_rank, parameter.ds_zero_partition_world_size = rank, world
        parameter.data = torch.empty(0)


def test_a_models_partitions_are_read_as_the_whole_of_it() -> None:
    net = nn.ModuleDict({"first": nn.Linear(5, 7), "norm": nn.RMSNorm(4)})
    net.register_buffer("scale", torch.arange(3.0))
    values = {name: p.detach().clone() for name, p in net.named_parameters()}
    specs = [TensorSpec(name, "BF16", tuple(value.shape)) for name, value in values.items()]
    layout = Layout([*specs, TensorSpec("scale", "F32", (3,))])
    read = []
    for rank in range(3):
        partitioned(net, values, rank, 3)
        held = live(net, layout, rank=rank, world=3)
        assert held.map.residual == held.dropped == {}
        partitioned(net, values, rank, 3)  # the next step's, elsewhere in memory
        read += readings(held.rebind(net), layout)
    for spec, bits in zip(layout, assembled(layout, read), strict=True):
        if spec.name != "scale":
            wanted = values[spec.name].to(torch.bfloat16).reshape(-1).view(torch.int16).numpy().view("u2")
            assert (bits == wanted).all(), spec.name
    partitioned(net, values, 2, 4)
    with pytest.raises(Incompatible, match=r"first\.weight is"):
        held.rebind(net)


def test_a_partition_that_is_not_in_memory_is_residual() -> None:
    net = nn.ModuleDict({"first": nn.Linear(5, 7), "second": nn.Linear(3, 2, bias=False)})
    values = {name: p.detach().clone() for name, p in net.named_parameters()}
    layout = Layout(TensorSpec(name, "F32", tuple(value.shape)) for name, value in values.items())
    partitioned(net, values, 0, 2)
    net["first"].weight.ds_tensor.status = Status.NOT_AVAILABLE
    net["second"].weight.ds_tensor.ds_quant_scale = torch.ones(1)
    found = live(net, layout, rank=0, world=2).map
    assert "swapped out" in found.residual["first.weight"]
    assert "quantised" in found.residual["second.weight"]
    assert {region.name for region in found.regions} == {"first.bias"}
