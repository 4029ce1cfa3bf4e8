"""One rank's weights, however they are given: which tensors are published, which are not and why, and what binds
the next step's tensors to the same map."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.megatron.chunks import FAMILIES, architecture
from support.megatron.chunks import live as chunks_of
from support.ranks.readings import assembled, readings
from torch import nn

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.canonical.region import Region, whole
from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.errors import Incompatible, UsageError
from dcr_daemon.projection.binding.bind import Live, live
from dcr_daemon.projection.frameworks import torchtitan
from dcr_daemon.projection.frameworks.megatron.grid import Grid
from dcr_daemon.projection.frameworks.megatron.live import Megatron, shards_of
from dcr_daemon.projection.frameworks.megatron.model import layout as megatron_layout
from dcr_daemon.projection.region_map import Map, Shard, gaps
from dcr_daemon.projection.tracing import Conversion
from dcr_daemon.projection.values import Bits


class Net(nn.Module):
    """Tied, with buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.RMSNorm(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("cache", torch.ones(5), persistent=False)


SPECS = [TensorSpec("embed.weight", "BF16", (6, 4)), TensorSpec("norm.weight", "BF16", (4,)),
         TensorSpec("scale", "F32", (3,))]  # fmt: skip
LAYOUT = Layout(SPECS)


def one(weights: Any, layout: Layout = LAYOUT, **more: Any) -> Live:
    return live(weights, layout, rank=0, world=1, **more)


def check(held: Live, weights: nn.Module, layout: Layout = LAYOUT) -> None:
    """All of the module is read, as it is."""
    table = {name.replace("_orig_mod.", ""): tensor for name, tensor in weights.state_dict().items()}
    for spec, bits in zip(layout, assembled(layout, readings(held, layout)), strict=True):
        kind = torch.bfloat16 if spec.dtype == "BF16" else torch.float32
        wanted = next(tensor for name, tensor in table.items() if name.endswith(spec.name))
        assert bits.tobytes() == wanted.to(kind).contiguous().view(torch.uint8).numpy().tobytes(), spec.name


class Outer(nn.Module):
    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda net: net,
        lambda net: net.state_dict(),
        torch.compile,
        nn.DataParallel,
        lambda net: torch.compile(nn.DataParallel(net)),
        Outer,
        lambda net: {f"actor.module.{name}": tensor for name, tensor in net.state_dict().items()},
    ],
    ids=["module", "state dict", "compiled", "parallel", "both", "wrapper", "prefix"],
)
def test_wrappers_are_looked_through(wrapped: Callable[[nn.Module], Any]) -> None:
    net = Net()
    held = one(wrapped(net))
    check(held, net)
    assert held.dropped == {"head.weight": "the memory of embed.weight"}
    assert {shard.parameter for shard in held.map.shards} == set(LAYOUT_NAMES)


LAYOUT_NAMES = [spec.name for spec in SPECS]


def test_a_rank_without_some_tensors_is_a_stage_of_a_pipeline() -> None:
    stage = {name: tensor for name, tensor in Net().state_dict().items() if name != "norm.weight"}
    held = one(stage)
    assert sorted(gap.name for gap in gaps([held.map], LAYOUT)) == ["norm.weight"]


def test_plain_tensors_have_one_owner_among_the_ranks() -> None:
    net = Net()
    ranks = [live(net, LAYOUT, rank=rank, world=3) for rank in range(3)]
    read = [reading for held in ranks for reading in readings(held, LAYOUT)]
    assembled(LAYOUT, read)
    stage = [live(net, LAYOUT, rank=4 + rank, world=8, replica=(rank, 2)) for rank in range(2)]
    assembled(LAYOUT, (reading for held in stage for reading in readings(held, LAYOUT)))


def test_everything_that_does_not_fit_is_one_error() -> None:
    table = Net().state_dict()
    table |= {
        "adapter.weight": torch.ones(2, 2),
        "head.weight": table["head.weight"].clone(),  # untied: no copy by memory
        "norm.weight": torch.ones(4, dtype=torch.float16),
        "scale": torch.ones(4),
        "step": 3,
    }
    with pytest.raises(Incompatible) as caught:
        live(table, LAYOUT, rank=2, world=4)
    message = caught.value.message
    assert message.startswith("what rank 2 of 4 holds does not fit the stream's layout: ")
    assert "added: adapter.weight, head.weight" in message
    assert "not tensors: step (a int)" in message
    assert "reshaped: scale (is [4], should be [3])" in message
    assert "retyped: norm.weight (is F16, should be BF16)" in message
    assert "--ignore" in caught.value.hint


def test_adapters_beside_the_weights_are_refused_with_what_to_do() -> None:
    table = {f"base_model.model.{name}": tensor for name, tensor in Net().state_dict().items()}
    table["base_model.model.scale.lora_A.default.weight"] = torch.ones(2, 3)
    with pytest.raises(Incompatible, match="lora_A") as caught:
        one(table)
    assert "merge_adapter()" in caught.value.hint


def test_what_is_no_tensor_and_new_at_a_later_step_is_refused_by_name() -> None:
    held = one(Net().state_dict())
    with pytest.raises(Incompatible, match="step is new"):
        held.rebind(Net().state_dict() | {"step": 3})


def test_what_is_ignored_is_dropped_and_layout_tensors_never_are() -> None:
    table = Net().state_dict() | {"adapter.weight": torch.ones(2, 2), "note": "text", "blocks._extra_state": None}
    table["norm._extra_state"] = torch.ones(3, dtype=torch.uint8)
    held = one(table, ignore=["adapter*", "no*"])
    assert held.dropped == {
        "adapter.weight": "ignored",
        "note": "a str, not a tensor",
        "blocks._extra_state": "a NoneType, not a tensor",
        "norm._extra_state": "kept beside the weights",
        "head.weight": "the memory of embed.weight",
    }
    assert gaps([held.map], LAYOUT) == []
    table["note"], table["adapter.weight"] = "another", torch.ones(7)
    table["norm._extra_state"] = torch.ones(5, dtype=torch.uint8)
    assert held.same(table)


def test_tensors_without_plain_values_are_refused_or_residual() -> None:
    sparse, meta = torch.eye(4).to_sparse(), torch.empty(4, device="meta")
    with warnings.catch_warnings():  # torch means to remove them; until then they come
        warnings.simplefilter("ignore")
        quantised = torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.qint8)
    names = ["sparse", "meta", "quantised"]
    layout = Layout([TensorSpec("sparse", "F32", (4, 4)), *(TensorSpec(name, "F32", (4,)) for name in names[1:])])
    with pytest.raises(Incompatible) as caught:
        one(dict(zip(names, (sparse, meta, quantised), strict=True)), layout)
    for said in ("sparse (is sparse_coo)", "meta (is on the meta device)", "quantised (is quantised)"):
        assert said in caught.value.message
    held = one({"packed": TwoHalves(torch.ones(4))}, Layout([TensorSpec("packed", "F32", (4,))]))
    assert held.map.residual == {"packed": "it is a TwoHalves, which keeps its values in another form"}
    assert list(held.map.regions) == []
    assert list(held.inputs) == ["packed"]


class TwoHalves(torch.Tensor):
    """A tensor of a library that quantises: its values are not in memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> TwoHalves:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(args[0].inner) if func is torch.ops.aten.detach.default else NotImplemented


def test_the_next_step_binds_other_memory_to_the_same_map() -> None:
    net = Net()
    held = one(net)
    later = Net().to(torch.float32)
    assert held.same(later)
    bound = held.rebind(later)
    assert bound.map is held.map
    check(bound, later)
    assert hash(bound.signature) == hash(held.signature)


def test_a_step_that_is_laid_out_otherwise_is_refused_by_what_changed() -> None:
    net = Net()
    held, table = one(net), net.state_dict()
    changed: dict[str, dict[str, Any]] = {
        "norm.weight is gone": {n: t for n, t in table.items() if n != "norm.weight"},
        "bias is new": table | {"bias": torch.ones(2)},
        r"scale is \(4,\) here, and was \(3,\)": table | {"scale": torch.ones(4)},
        "norm.weight is bfloat16, and was float32": table | {"norm.weight": torch.ones(4, dtype=torch.bfloat16)},
        "head.weight is no longer the memory of embed.weight": table | {"head.weight": table["head.weight"].clone()},
    }
    for said, weights in changed.items():
        assert not held.same(weights)
        with pytest.raises(Incompatible, match=said):
            held.rebind(weights)
    assert held.same(table)


def test_the_gates_verdict_outlives_a_step() -> None:
    net = Net()
    held = one(net).without({"embed.weight": "it was not what it was predicted to be"})
    assert {region.name for region in held.map.regions} == {"norm.weight", "scale"}
    bound = held.rebind(net)
    assert bound.map.residual.keys() == {"embed.weight"}
    assembled(LAYOUT, readings(bound, LAYOUT), residual=["embed.weight"])


PLAIN: dict[str, Any] = {
    "vocab_size": 70, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize(("family", "fields"), [("qwen3_moe", {}), ("llama", {"tie_word_embeddings": True})])
def test_a_transformers_model_is_read_as_it_would_be_saved(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **PLAIN, **fields), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        layout = checkpoint.layout
        for weights in (model, Outer(model), torch.compile(model)):
            held = one(weights, layout)
            assert held.map.residual == {}
            for spec, bits in zip(layout, assembled(layout, readings(held, layout)), strict=True):
                assert (bits == checkpoint.bits(spec.name)).all(), spec.name
        assert held.convert is not None
        name = next(iter(held.conversion.regions))  # type: ignore[union-attr]
        assert held.convert({name: held.inputs[name]})


def test_fused_experts_of_a_bare_state_dict_say_what_to_give() -> None:
    specs = [TensorSpec(f"mlp.experts.{e}.up_proj.weight", "F32", (2, 2)) for e in range(2)]
    with pytest.raises(Incompatible) as caught:
        one({"mlp.experts.up_proj": torch.ones(2, 2, 2)}, Layout(specs))
    assert "one by one: give the transformers model itself" in caught.value.hint


class Adapter:
    """Does what torchtitan's adapters do: unstacks experts, renames."""

    def to_hf(self, table: dict[str, Any]) -> dict[str, Any]:
        experts = torch.split(table["layers.0.moe.experts.w1_EFD"], 1, dim=0)
        return {f"experts.{e}.gate_proj.weight": expert.squeeze(0) for e, expert in enumerate(experts)} | {
            "scaled": table["scaled.weight"] * 2
        }


def test_an_adapter_or_a_conversion_of_ones_own_names_the_tensors() -> None:
    table = {"layers.0.moe.experts.w1_EFD": torch.arange(24.0).reshape(3, 4, 2), "scaled.weight": torch.ones(2),
             "freqs_cis": torch.ones(5)}  # fmt: skip
    names = [f"experts.{e}.gate_proj.weight" for e in range(3)]
    layout = Layout([*(TensorSpec(name, "BF16", (4, 2)) for name in names), TensorSpec("scaled", "BF16", (2,))])
    held = one(table, layout, adapter=Adapter())
    assert held.dropped == {"freqs_cis": "the export leaves it out"}
    assert "mul" in held.map.residual["scaled"]
    assert "scaled.weight" in held.inputs
    assembled(layout, readings(held, layout), residual=["scaled"])
    own = Conversion({"layers.0.moe.experts.w1_EFD": torchtitan.grouped_experts(names, 4, columns=2)}, {})
    del table["scaled.weight"], table["freqs_cis"]
    experts = Layout(spec for spec in layout if spec.name != "scaled")
    got = assembled(experts, readings(one(table, experts, conversion=own), experts))
    assert [bits.view("u2").tolist() for bits in got] == [
        torch.arange(8.0 * e, 8.0 * e + 8).to(torch.bfloat16).view(torch.int16).tolist() for e in range(3)
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("grid", [Grid(tp=2, ep=2, dp=2), Grid(tp=2, pp=2, vpp=2, dp=2, ep=4)], ids=["flat", "stages"])
def test_megatron_ranks_read_together_the_whole_checkpoint(family: str, grid: Grid) -> None:
    model = architecture(family)
    layout = megatron_layout(model)
    canonical = {spec.name: torch.randint(-100, 100, (spec.elements,)).to(torch.float32) for spec in layout}
    for name in canonical:  # what checkpoints repeat in a prediction module is one parameter
        for repeated, first in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            if name.endswith(f"{repeated}.weight"):
                canonical[name] = canonical.get(f"{first}.weight", canonical[name])
    read = []
    for rank in range(grid.world):
        chunks = chunks_of(model, grid, rank, canonical=canonical)
        run = Megatron(model, grid, rank)
        held = live(chunks, layout, rank=rank, world=grid.world, megatron=run)
        assert held.map.residual == held.dropped == {}
        assert held.same(chunks)
        read += readings(held.rebind(chunks), layout)
    for spec, bits in zip(layout, assembled(layout, read), strict=True):
        kind = torch.bfloat16 if spec.dtype == "BF16" else torch.float32
        wanted = canonical[spec.name].to(kind).view(torch.uint8).numpy()
        assert bits.tobytes() == wanted.tobytes(), spec.name


def test_megatron_follows_the_streams_dtypes_and_says_what_it_does_not_know() -> None:
    model, grid = architecture("qwen3_next"), Grid()
    specs = megatron_layout(model).specs
    chunks = chunks_of(model, grid, 0, canonical={s.name: torch.ones(s.elements) for s in specs}, dtype=torch.float32)
    wide = Layout(TensorSpec(spec.name, "F32", spec.shape) for spec in specs)
    held = one(chunks, wide, megatron=Megatron(model, grid, 0))
    assert {str(shard.value) for shard in held.map.shards} == {"bits", "add(1, F32)"}
    chunks[0].tensors["module.decoder.layers.0.adapter.weight"] = torch.ones(2, 3)
    with pytest.raises(Incompatible, match=r"added: decoder.layers.0.adapter.weight \[2, 3\]"):
        one(chunks, wide, megatron=Megatron(model, grid, 0))
    assert one(chunks, wide, megatron=Megatron(model, grid, 0), ignore=["*adapter*"]).dropped
    gone = chunks[0].tensors.pop("module.decoder.layers.3.mlp.router.weight")
    held = one(chunks, wide, megatron=Megatron(model, grid, 0))
    assert "the model has no" in held.map.residual["model.layers.3.mlp.gate.weight"]
    assert "residual" in held.dropped["decoder.layers.0.adapter.weight"]
    chunks[0].tensors["module.decoder.layers.3.mlp.router.weight"] = gone
    renamed = Layout(TensorSpec(s.name.replace("norm", "scale"), "F32", (*s.shape, 1)) for s in specs)
    with pytest.raises(Incompatible, match=r"added: .*norm.weight.*reshaped: lm_head.weight"):
        one(chunks, renamed, megatron=Megatron(model, grid, 0), ignore=["*adapter*"])


def test_a_finished_map_is_taken_and_checked() -> None:
    layout = Layout([TensorSpec("t", "F32", (4, 2))])
    made = Map((Shard("flat", (8,), "F32", Bits(), tuple(whole("t", (4, 2)))),), {})
    held = one({"flat": torch.arange(8.0), "other": torch.ones(3)}, layout, mapped=made)
    assert held.dropped == {"other": "the map does not name it"}
    assert assembled(layout, readings(held, layout))[0].view("f4").tolist() == list(range(8))
    beyond = Map((Shard("flat", (8,), "F32", Bits(), (Region("t", (9,), 0, (1,), 0, (1,)),)),), {})
    for weights, mapped, said in (
        ({}, made, "missing: flat"),
        ({"flat": torch.ones(7)}, made, r"flat \(is F32 \[7\], should be F32 \[8\]\)"),
        ({"flat": torch.ones(8)}, beyond, "reaches beyond it"),
        ({"flat": torch.ones(8)}, Map((Shard("flat", (8,), "F32", Bits(), tuple(whole("u", (8,)))),)), "added: u"),
    ):
        with pytest.raises(Incompatible, match=said):
            one(weights, layout, mapped=mapped)


def test_misuse_is_told() -> None:
    run = Megatron(architecture("llama"), Grid(), 0)
    with pytest.raises(UsageError, match="adapter and megatron exclude each other"):
        one({}, adapter=Adapter(), megatron=run)
    with pytest.raises(UsageError, match="a list was given"):
        one([("embed.weight", torch.ones(6, 4))])
    with pytest.raises(UsageError, match="egatron"):
        Megatron.of_process(architecture("llama"))


def test_a_correction_bias_is_fp32_before_the_first_forward_pass_too() -> None:
    """Float16Module makes it bf16 like everything; Megatron's router makes it fp32 when it is first used."""
    model = architecture("glm4_moe", num_nextn_predict_layers=0)
    layout = megatron_layout(model)
    canonical = {spec.name: torch.randint(-100, 100, (spec.elements,)).float() for spec in layout}
    chunks = chunks_of(model, Grid(), 0, canonical=canonical)
    later = dict(chunks[0].tensors)
    chunks[0].tensors |= {name: bias.bfloat16() for name, bias in later.items() if name.endswith("expert_bias")}
    early = one(chunks, layout, megatron=Megatron(model, Grid(), 0))
    before = assembled(layout, readings(early, layout))
    chunks[0].tensors = later
    after = assembled(layout, readings(early.rebind(chunks), layout))
    assert [bits.tobytes() for bits in before] == [bits.tobytes() for bits in after]


@pytest.mark.parametrize(
    ("family", "built", "wrong"),
    [
        ("llama", {"num_attention_heads": 4, "num_query_groups": 1, "kv_channels": 8}, "kv_channels is 8 in the model"),
        ("deepseek_v3", {"num_attention_heads": 16}, "num_attention_heads is 16 in the model and 8 in the arch"),
        ("nemotron_h", {"mamba_num_groups": 2, "mamba_state_dim": 6}, "mamba_state_dim is 6 in the model and 3"),
        ("qwen3_next", {"linear_num_key_heads": 3, "linear_key_head_dim": 4}, "linear_key_head_dim is 4"),
    ],
)
def test_an_architecture_of_equal_shapes_and_other_heads_is_refused(
    family: str, built: dict[str, int], wrong: str
) -> None:
    """Nothing else would tell: the rows are as many, in another order."""
    model = architecture(family)
    layout = megatron_layout(model)
    chunks = chunks_of(model, Grid(), 0)
    chunks[0].config = SimpleNamespace(hidden_size=32, num_moe_experts=None, **built)
    with pytest.raises(Incompatible, match=f"another model's: .*{wrong}"):
        one(chunks, layout, megatron=Megatron(model, Grid(), 0))


@pytest.mark.parametrize("rows", [76, 128, 301, 512])
def test_a_vocabulary_may_be_padded_as_far_as_a_run_likes(rows: int) -> None:
    model, grid = architecture("llama"), Grid(tp=4)
    layout = megatron_layout(model)
    canonical = {spec.name: torch.randint(-100, 100, (spec.elements,)).float() for spec in layout}
    whole = torch.full((rows * 4, 32), -1.0)
    read = []
    for rank in range(4):
        chunks = chunks_of(model, grid, rank, canonical=canonical)
        for name, first in (
            ("module.embedding.word_embeddings", "model.embed_tokens"),
            ("module.output_layer", "lm_head"),
        ):
            whole[:301] = canonical[f"{first}.weight"].view(301, 32)
            chunks[0].tensors[f"{name}.weight"] = whole[rank * rows : (rank + 1) * rows].bfloat16()
        held = live(chunks, layout, rank=rank, world=4, megatron=Megatron(model, grid, rank))
        assert not held.map.residual
        read += readings(held, layout)
    for spec, bits in zip(layout, assembled(layout, read), strict=True):
        assert bits.tobytes() == canonical[spec.name].bfloat16().view(torch.uint8).numpy().tobytes(), spec.name


def test_a_vocabulary_that_is_too_short_is_refused_by_name() -> None:
    model = architecture("llama")
    chunks = chunks_of(model, Grid(), 0)
    chunks[0].tensors["module.output_layer.weight"] = torch.empty(300, 32, device="meta", dtype=torch.bfloat16)
    found = shards_of(chunks, model, Grid(), 0)
    assert found.map.residual == {"lm_head.weight": "output_layer.weight is (300, 32) where (384, 32) was expected"}
