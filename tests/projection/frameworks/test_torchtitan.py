"""Grouped experts and rotary rows: closed forms against an adapter's own code, and under expert parallelism."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from dcr_daemon.canonical.compose import chain
from dcr_daemon.canonical.coverage import exactly_once
from dcr_daemon.canonical.region import Region
from dcr_daemon.projection.frameworks.torchtitan import adapter_conversion, grouped_experts, rotary_rows
from dcr_daemon.projection.sharding.intervals import Cut, shard

EXPERTS, INNER, MODEL, HEADS, HEAD = 6, 10, 8, 3, 4
GATES = [f"model.layers.0.mlp.experts.{e}.gate_proj.weight" for e in range(EXPERTS)]


class Adapter:
    """Does what torchtitan's adapters do: unstacks experts, takes rotary pairs apart, renames."""

    def to_hf(self, table: dict[str, Any]) -> dict[str, Any]:
        experts = torch.split(table["layers.0.moe.experts.w1_EFD"], 1, dim=0)
        out = {name: expert.squeeze() for name, expert in zip(GATES, experts, strict=True)}
        q = table["layers.0.attention.wq.weight"]
        out["q"] = q.view(HEADS, HEAD // 2, 2, MODEL).transpose(1, 2).reshape(HEADS * HEAD, MODEL).clone()
        out["model.norm.weight"] = table["norm.weight"]
        return out


def test_closed_forms_are_what_an_adapter_does() -> None:
    tensors = {
        "layers.0.moe.experts.w1_EFD": torch.empty(EXPERTS, INNER, MODEL, device="meta"),
        "layers.0.attention.wq.weight": torch.empty(HEADS * HEAD, MODEL, device="meta"),
        "norm.weight": torch.empty(MODEL, device="meta"),
    }
    traced = adapter_conversion(Adapter(), tensors)
    assert traced.opaque == {}
    assert traced.regions["layers.0.moe.experts.w1_EFD"] == grouped_experts(GATES, INNER, columns=MODEL)
    assert traced.regions["layers.0.attention.wq.weight"] == rotary_rows("q", HEADS, head_dim=HEAD, columns=MODEL)
    assert [region.name for region in traced.regions["norm.weight"]] == ["model.norm.weight"]


@pytest.mark.parametrize(
    ("mesh", "cuts"),
    [
        ((3,), lambda at: [Cut(0, 3, at[0])]),
        ((4,), lambda at: [Cut(0, 4, at[0])]),
        ((2, 3), lambda at: [Cut(0, 2, at[0], groups=3), Cut(0, 3, at[1])]),
        ((2, 2), lambda at: [Cut(1, 2, at[0]), Cut(0, 2, at[1])]),
        ((3, 2), lambda at: [Cut(2, 3, at[0]), Cut(0, 2, at[1])]),
    ],
    ids=["ep", "uneven ep", "fsdp over ep", "fsdp on rows", "fsdp on columns, uneven"],
)
def test_experts_under_every_mesh_are_covered_once_by_one_region_each(mesh: tuple[int, ...], cuts: Any) -> None:
    whole = {"w": grouped_experts(GATES, INNER, columns=MODEL)}
    found: list[Region] = []
    for at in itertools.product(*map(range, mesh)):
        mine = chain(shard("w", (EXPERTS, INNER, MODEL), cuts(at)), whole)
        assert len({region.name for region in mine}) == len(mine)
        found += mine
    assert exactly_once(found, dict.fromkeys(GATES, (INNER, MODEL))) == []
