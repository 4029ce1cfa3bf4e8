"""What all ranks of a Megatron run are the source of: everything once, whatever the degrees; live models likewise."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.megatron.chunks import FAMILIES, architecture, live

from dcr_daemon.errors import UsageError
from dcr_daemon.projection.frameworks.megatron.grid import Grid
from dcr_daemon.projection.frameworks.megatron.live import grid_of_process, shards_of
from dcr_daemon.projection.frameworks.megatron.model import layout, parameters
from dcr_daemon.projection.frameworks.megatron.shards import of_rank
from dcr_daemon.projection.region_map import Map, gaps
from dcr_daemon.projection.values import Add, Bits, Cast

powers = st.sampled_from([1, 2, 4])


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    tp, cp, ep, etp, pp, vpp = draw(powers), draw(st.sampled_from([1, 2])), draw(powers), draw(powers), draw(powers), 1
    if pp == 2:
        vpp = draw(st.sampled_from([1, 2]))
    fewest = max(1, ep * etp // (tp * cp))
    stage_layers = None
    if draw(st.booleans()) and pp * vpp > 1:
        cuts = sorted(draw(st.lists(st.integers(0, 4), min_size=pp * vpp - 1, max_size=pp * vpp - 1)))
        stage_layers = tuple(b - a for a, b in zip([0, *cuts], [*cuts, 4], strict=True))
    return Grid(tp=tp, pp=pp, vpp=vpp, cp=cp, dp=fewest * draw(st.sampled_from([1, 3])), ep=ep, etp=etp,
                stage_layers=stage_layers)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, deadline=None)
@given(grid=grids())
def test_every_element_has_one_source_among_the_ranks(family: str, grid: Grid) -> None:
    model = architecture(family)
    maps = [of_rank(model, grid, rank) for rank in range(grid.world)]
    assert gaps(maps, layout(model)) == []
    for one in maps:
        for shard in one.shards:
            held = torch.Size(shard.shape).numel()
            assert all(region.src_last < held for region in shard.regions), shard.parameter


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6, deadline=None)
@given(grid=grids())
def test_a_live_model_gives_the_map_that_its_configuration_promised(family: str, grid: Grid) -> None:
    model = architecture(family)
    for rank in range(0, grid.world, max(1, grid.world // 4)):
        found = shards_of(live(model, grid, rank), model, grid, rank)
        assert found.unknown == {}
        assert found.map.residual == {}
        promised = of_rank(model, grid, rank)
        assert [(s.parameter, s.shape, s.regions) for s in found.map.shards] == [
            (s.parameter, s.shape, s.regions) for s in promised.shards
        ]


def test_names_of_either_layer_spec_are_understood() -> None:
    model, grid = architecture("deepseek_v3"), Grid(tp=2, ep=4, dp=2)
    for spelling in range(4):
        found = shards_of(live(model, grid, 3, spelling=spelling, wrapper=""), model, grid, 3)
        assert found.unknown == {}
        assert found.map.residual == {}


def test_latent_projections_are_taken_as_the_model_has_them() -> None:
    model, grid = architecture("deepseek_v3", num_nextn_predict_layers=0), Grid(tp=2, dp=2)
    maps = []
    for rank in range(grid.world):
        (chunk,) = live(model, grid, rank)
        for name, tensor in chunk.tensors.items():
            if "down_proj" in name and "linear" in name:
                chunk.tensors[name] = tensor[: tensor.shape[0] // 2]
        found = shards_of(chunk, model, grid, rank)
        assert found.map.residual == {}
        maps.append(found.map)
    assert gaps(maps, layout(model)) == []


def test_what_is_not_as_predicted_is_residual_by_name() -> None:
    model, grid = architecture("qwen3_moe"), Grid(tp=2, ep=2)
    (chunk,) = live(model, grid, 0)
    tensors = chunk.tensors
    missing = "module.decoder.layers.1.mlp.router.weight"
    wrong = "module.decoder.layers.0.self_attention.linear_qkv.weight"
    across = "module.decoder.layers.2.self_attention.linear_proj.weight"
    retyped = "module.decoder.layers.3.mlp.router.weight"
    del tensors[missing]
    tensors[wrong] = tensors[wrong][1:]
    tensors[across].tensor_model_parallel, tensors[across].partition_dim = True, 0  # type: ignore[attr-defined]
    tensors[retyped] = tensors[retyped].to(torch.float16)
    tensors["module.decoder.layers.0.mlp.adapter.weight"] = torch.empty(3, 2, device="meta")
    found = shards_of([chunk], model, grid, 0)
    assert found.unknown == {"decoder.layers.0.mlp.adapter.weight": (3, 2)}
    reasons = dict(found.map.residual)
    assert "the model has no" in reasons.pop("model.layers.1.mlp.gate.weight")
    for letter in "qkv":
        assert "was expected" in reasons.pop(f"model.layers.0.self_attn.{letter}_proj.weight")
    assert "along dimension 0" in reasons.pop("model.layers.2.self_attn.o_proj.weight")
    assert "F16 in the trainer" in reasons.pop("model.layers.3.mlp.gate.weight")
    assert reasons == {}
    assert not {region.name for region in found.map.regions} & found.map.residual.keys()


def test_a_changed_head_count_changes_the_map_and_a_stale_one_is_noticed() -> None:
    grid = Grid(tp=4)
    before, after = architecture("llama"), architecture("llama", num_key_value_heads=4)
    assert of_rank(before, grid, 1).digest != of_rank(after, grid, 1).digest
    found = shards_of(live(after, grid, 1), before, grid, 1)
    assert any("linear_qkv" in reason for reason in found.map.residual.values())


def test_tied_embeddings_belong_to_the_first_stage() -> None:
    model, grid = architecture("qwen3"), Grid(pp=2, tp=2)
    chunks = live(model, grid, 3)
    chunks[0].tensors["module.output_layer.weight"] = torch.empty(256, 32, dtype=torch.bfloat16, device="meta")
    found = shards_of(chunks, model, grid, 3)
    assert found.unknown == {}
    assert "model.embed_tokens.weight" not in {region.name for region in found.map.regions}


def test_values_follow_the_dtypes_in_memory() -> None:
    model = architecture("qwen3_next")
    by_name = {s.parameter: s.value for s in of_rank(model, Grid(), 0, dtype="F32").shards}
    assert by_name["decoder.layers.0.self_attention.out_norm.weight"] == Add(1.0, "BF16")
    assert by_name["decoder.layers.0.self_attention.A_log"] == Cast("BF16")
    assert Bits() in {s.value for s in of_rank(model, Grid(), 0).shards}


def test_degrees_that_do_not_divide_the_model_are_refused_by_what_they_would_split() -> None:
    model = architecture("qwen3_moe")
    for grid, said in (
        (Grid(tp=3), "tensor"),
        (Grid(etp=3, dp=3), "experts.0.gate_proj.weight"),
        (Grid(ep=3, dp=3), "experts do not divide"),
        (Grid(pp=3), "pipeline chunks"),
        (Grid(pp=2, stage_layers=(1, 2)), "pipeline chunks"),
    ):
        with pytest.raises(UsageError, match=said):
            of_rank(model, grid, 0)
    with pytest.raises(UsageError, match="shares of"):
        Grid(ep=4, dp=3)
    with pytest.raises(UsageError, match="at least 1"):
        Grid(tp=0)
    with pytest.raises(UsageError, match="virtual stages"):
        shards_of(live(model, Grid(), 0), model, Grid(pp=2, vpp=2), 0)


def test_names_are_unique_on_each_rank() -> None:
    grid = Grid(tp=2, pp=2, vpp=2, ep=2, dp=2)
    for family in FAMILIES:
        model = architecture(family, num_nextn_predict_layers=0)
        for rank in range(grid.world):
            names = Counter(s.parameter for s in of_rank(model, grid, rank).shards)
            assert max(names.values()) == 1, family


def test_the_model_has_no_parameter_twice() -> None:
    for family in FAMILIES:
        model = architecture(family, num_nextn_predict_layers=0)
        kept = Counter((p.names[0], p.place, p.expert) for p in parameters(model))
        assert max(kept.values()) == 1, family


def test_a_process_without_megatron_says_so() -> None:
    with pytest.raises(UsageError, match="egatron"):
        grid_of_process()


def test_a_map_of_one_rank_holds_the_whole_model() -> None:
    for family in FAMILIES:
        model = architecture(family)
        one: Map = of_rank(model, Grid(), 0)
        assert one.elements == sum(spec.elements for spec in layout(model))
        assert one.baseline_bytes(layout(model)) == layout(model).nbytes
