"""Closed forms against what Megatron's own code did with index tensors (golden/*.json, by oracle_megatron.py)."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.ranks.launch import quiet

from dcr_daemon.canonical.region import Region, indices
from dcr_daemon.projection.frameworks.megatron import attention, feed
from dcr_daemon.projection.frameworks.megatron.grid import Grid
from dcr_daemon.projection.frameworks.megatron.live import shards_of
from dcr_daemon.projection.frameworks.megatron.parameter import LayerPosition, Parameter, Site
from dcr_daemon.projection.frameworks.megatron.shards import spots
from dcr_daemon.projection.frameworks.megatron.splits import Rows
from dcr_daemon.projection.frameworks.models.architecture import Attention, DeltaNet, Experts, Mamba, Names
from dcr_daemon.projection.frameworks.models.families import read_architecture

GOLDEN = {path.stem: path for path in sorted((Path(__file__).parent / "golden").glob("*.json"))}
Pairs = dict[tuple[int, str, str], set[tuple[int, int]]]


def document(case: str) -> Any:
    return json.loads(GOLDEN[case].read_text())


MODELS = [case for case in GOLDEN if "config" in document(case)]
FORMS = [case for case in GOLDEN if "form" in document(case)]


def pairs(region: Region) -> set[tuple[int, int]]:
    src, dst = indices(region)
    return set(zip(src.tolist(), dst.tolist(), strict=True))


def observed(found: Any) -> Pairs:
    """(rank, parameter, canonical tensor) → pairs, as the exports of the real code had them."""
    table: Pairs = defaultdict(set)
    for rank, parameter, name, shape, src, src_strides, dst, dst_strides in found["regions"]:
        region = Region(name, tuple(shape), src, tuple(src_strides), dst, tuple(dst_strides))
        table[rank, parameter, name] |= pairs(region)
    return table


def grid(found: Any) -> Grid:
    degrees = {"etp": 1} | found["degrees"]
    grid = Grid(**degrees)
    assert len(found["inventory"]) == grid.world
    return grid


@pytest.mark.parametrize("case", MODELS)
def test_every_rank_of_a_real_model_has_the_parameters_that_are_predicted(case: str) -> None:
    found = document(case)
    architecture, degrees = read_architecture(found["config"]), grid(found)
    for rank, inventory in enumerate(found["inventory"]):
        live = {row["name"]: tuple(row["shape"]) for row in inventory}
        answer = shards_of(stand_ins(inventory, degrees.vpp), architecture, degrees, rank)
        assert not answer.map.residual
        assert not answer.unknown
        tied = {"output_layer.weight"} if found["config"].get("tie_word_embeddings") else set()
        assert set(answer.tensors) == live.keys() - tied
        assert {s.parameter: s.shape for s in answer.map.shards} == {n: live[n] for n in answer.tensors}


@pytest.mark.parametrize("case", MODELS)
def test_index_tensors_exported_by_the_real_code_arrive_where_the_closed_forms_say(case: str) -> None:
    found = document(case)
    architecture, degrees = read_architecture(found["config"]), grid(found)
    seen = observed(found)
    assert {name for _, _, name in seen} == set(found["shapes"])
    for rank, inventory in enumerate(found["inventory"]):
        shapes = {row["name"]: tuple(row["shape"]) for row in inventory}
        for spot in spots(architecture, degrees, rank=rank):
            chunk = f"{spot.chunk}." if degrees.vpp > 1 else ""
            name = next(chunk + name for name in spot.names if chunk + name in shapes)
            parameter = spot.parameter
            if shapes[name] != parameter.held(spot.holder.share, spot.holder.shares).shape:
                assert shapes[name][0] * spot.holder.shares == parameter.split.held(0, 1).shape[0]
                parameter = _by_rows(parameter)
            predicted: dict[str, set[tuple[int, int]]] = defaultdict(set)
            for region in parameter.held(spot.holder.share, spot.holder.shares).regions:
                predicted[region.name] |= pairs(region)
            for target in parameter.targets:
                assert list(target.spec.shape) == found["shapes"][target.spec.name]
                exported = seen.pop((rank, name, target.spec.name), None)
                # Of replicas one is exported, so the others have nothing to be compared with.
                assert exported in (None, predicted[target.spec.name])
    assert not seen, "numbers that no closed form predicts"


@pytest.mark.parametrize("case", MODELS)
def test_the_real_exports_cover_every_element_once(case: str) -> None:
    found = document(case)
    elements: dict[str, list[int]] = defaultdict(list)
    for (_, _, name), both in observed(found).items():
        elements[name] += [dst for _, dst in both]
    for name, shape in found["shapes"].items():
        assert sorted(elements[name]) == list(range(math.prod(shape))), name


@pytest.mark.parametrize("case", FORMS)
def test_blocks_that_need_a_gpu_are_split_as_their_mappings_join_them(case: str) -> None:
    found = document(case)
    parameter, names, ranks = form(found["form"]), _names(found), found["form"]["ranks"]
    seen = observed(found)
    for rank in range(ranks):
        held = parameter.held(rank, ranks)
        assert list(held.shape) == found["shape"]
        predicted: dict[str, set[tuple[int, int]]] = defaultdict(set)
        for region in held.regions:
            predicted[region.name] |= pairs(region)
        for target, name in zip(parameter.targets, names, strict=True):
            assert predicted[target.spec.name] == seen.pop((rank, "m", name), set())
    assert not seen


def test_one_is_added_where_the_real_export_adds_one() -> None:
    found = document("zero-centred-tp1")
    (parameter,) = [p for p in delta([4, 8, 3, 6], 10) if p.add]
    assert found["added"] == parameter.add == 1


def installed() -> bool:
    """Whether megatron-core can be imported, or MEGATRON_LM names a checkout of it."""
    try:
        return "MEGATRON_LM" in os.environ or importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not installed(), reason="megatron-core is not installed, and MEGATRON_LM names no checkout")
def test_the_library_at_hand_does_what_the_tables_say(tmp_path: Path) -> None:
    cases = ["llama-tp4-g2", "qwen3_moe-tp2-ep2", "gate-tp2", "mamba-in-tp2"]
    exports = "MEGATRON_BRIDGE" in os.environ
    cases = cases if exports else [case for case in cases if case in MODELS]
    oracle = Path(__file__).with_name("oracle_megatron.py")
    line = [sys.executable, "-W", "ignore", str(oracle), "--out", str(tmp_path), *cases]
    subprocess.run(line, check=True, env={**os.environ, **quiet()})
    for case in cases:
        written, kept = json.loads((tmp_path / f"{case}.json").read_text()), document(case)
        assert written.get("inventory") == kept.get("inventory")
        if exports:
            assert observed(written) == observed(kept)


def form(fields: Any) -> Parameter:
    """The parameter that a form's mapping is about, with its base slice alone."""
    kind, tail = fields["class"], fields.get("tail", [])
    site = Site(("",), "", LayerPosition("decoder"), "BF16")
    if "mamba" in fields:
        heads, head, groups, state = fields["mamba"]
        wanted = "in_proj.weight" if "InProj" in kind else "conv1d.weight" if tail else "conv1d.bias"
        block = list(attention.mixer(site, Mamba(heads, head, groups, state, 4), 10, Names()))
    elif "delta" in fields:
        wanted = "in_proj.weight" if "Linear" in kind else "conv1d.weight"
        block = delta(fields["delta"], 10)
    elif "attention" in fields:
        heads, groups, head = fields["attention"]
        wanted = "linear_qkv.weight" if tail else "linear_qkv.bias"
        block = list(
            attention.mixer(site, Attention(heads, groups, head, bias=not tail, gate=fields["gate"]), 10, Names())
        )
    elif "expert" in fields:
        width, hidden = fields["expert"]
        wanted = f"linear_fc{1 if 'GateUp' in kind else 2}.{'bias' if hidden == 1 else 'weight'}"
        experts = feed.feed(site, Experts(1, width, stacked=True), 10, Names())
        block = [p for p in experts if p.expert == 0]
    else:
        return site.parameter("m", "norm", Rows((fields["norm"],)), ("c", (fields["norm"],)))
    return next(p for p in block if wanted in p.names[0])


def delta(sizes: list[int], hidden: int) -> list[Parameter]:
    site = Site(("",), "", LayerPosition("decoder"), "BF16")
    keys, values, key, value = sizes
    return list(attention.mixer(site, DeltaNet(keys, values, key, value, 4), hidden, Names()))


def _names(found: Any) -> list[str]:
    order = {"q": 0, "k": 1, "v": 2, "qkvz": 0, "ba": 1}
    return sorted(found["shapes"], key=lambda name: order.get(name, 0))


def _by_rows(parameter: Parameter) -> Parameter:
    return replace(parameter, split=Rows(parameter.targets[0].spec.shape))


def stand_ins(inventory: list[dict[str, Any]], chunks: int) -> list[StandIn]:
    if chunks == 1:
        return [StandIn(inventory)]
    rows = [[r | {"name": r["name"][2:]} for r in inventory if r["name"].startswith(f"{i}.")] for i in range(chunks)]
    return [StandIn(part) for part in rows]


class StandIn:
    """A module with the names, shapes and marks of an inventory."""

    def __init__(self, inventory: list[dict[str, Any]]) -> None:
        import torch

        self.rows = {}
        for row in inventory:
            tensor = torch.empty(row["shape"], dtype=torch.bfloat16, device="meta")
            tensor = tensor.float() if row["name"].endswith("expert_bias") else tensor
            for mark in ("tensor_model_parallel", "partition_dim"):
                setattr(tensor, mark, row[mark])
            self.rows[row["name"]] = tensor

    def named_parameters(self) -> list[tuple[str, Any]]:
        return [(name, tensor) for name, tensor in self.rows.items() if not name.endswith("expert_bias")]

    def named_buffers(self) -> list[tuple[str, Any]]:
        return [(name, tensor) for name, tensor in self.rows.items() if name.endswith("expert_bias")]
