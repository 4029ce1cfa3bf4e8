"""A plan is what the ranks really are the source of, and the published figures come out of the published rule."""

from __future__ import annotations

import pytest

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.errors import UsageError
from dcr_daemon.projection.frameworks.megatron.grid import Grid
from dcr_daemon.projection.frameworks.megatron.model import layout
from dcr_daemon.projection.frameworks.megatron.shards import of_rank
from dcr_daemon.projection.frameworks.models.families import read_architecture, shipped
from dcr_daemon.projection.preview import Trainer, preview

TINY = {"vocab_size": 301, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}  # fmt: skip
SMALL = [
    TINY | {"model_type": "qwen3", "tie_word_embeddings": True},
    TINY | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 16},
    TINY | {"model_type": "gpt_oss", "num_local_experts": 8},
]
GRIDS = [Grid(tp=4), Grid(tp=2, pp=2, dp=3), Grid(tp=2, ep=4, dp=4, etp=2, pp=2, vpp=2), Grid(tp=4, cp=2, ep=8)]

#: Percent that the published rule projects directly (without prediction layers, but for the last).
PAPER = {
    "llama-3.1-8b": 76.89, "qwen3-30b-a3b": 96.31, "qwen3-235b-a22b": 97.96, "deepseek-v3": 99.72,
    "glm-4.5-air": 96.31, "gpt-oss-120b": 0.38, "nemotron-3-nano-30b-a3b": 95.51, "nemotron-3-super-120b-a12b": 96.46,
    "nemotron-3-ultra-550b-a55b": 96.94,
}  # fmt: skip


@pytest.mark.parametrize("fields", SMALL, ids=lambda fields: fields["model_type"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_plan_counts_what_every_rank_really_owns(fields: dict[str, object], grid: Grid) -> None:
    architecture = read_architecture(fields)
    plan, tensors = preview(architecture, "megatron", grid=grid), layout(architecture)
    maps = [of_rank(architecture, grid, rank) for rank in range(grid.world)]
    assert plan.baseline == tuple(one.baseline_bytes(tensors) for one in maps)
    assert plan.regions == tuple(len(list(one.regions)) for one in maps)
    assert (plan.tensors, plan.nbytes, plan.direct) == (len(tensors), tensors.nbytes, tensors.nbytes)
    assert sum(row.regions for row in plan.rows) == sum(plan.regions)
    assert sum(row.tensors for row in plan.rows) == plan.tensors


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_model_is_direct_to_the_last_byte(name: str) -> None:
    plan = preview(read_architecture(name), "megatron", grid=Grid(tp=4, ep=8, dp=2))
    assert plan.direct == plan.nbytes == sum(plan.baseline)
    assert plan.gaps == ()
    assert plan.reasons == {}


@pytest.mark.parametrize("name", PAPER)
def test_the_published_rule_gives_the_published_shares(name: str) -> None:
    plan = preview(read_architecture(name, prediction=False), "megatron", grid=Grid(tp=4, ep=8, dp=2), rule="paper")
    assert round(100 * plan.direct / plan.nbytes, 2) == PAPER[name]
    assert sum(plan.reasons.values()) == plan.nbytes - plan.direct == plan.classes["residual"]


def test_the_published_figures_themselves() -> None:
    """96.3 % for Qwen3-30B-A3B, 97.0 % for the 550B hybrid with its prediction layers."""
    grid = Grid(tp=8, ep=8)
    shares = [
        preview(read_architecture(name), "megatron", grid=grid, rule="paper")
        for name in ("qwen3-30b-a3b", "nemotron-3-ultra-550b-a55b")
    ]
    assert [round(100 * plan.direct / plan.nbytes, 1) for plan in shares] == [96.3, 97.0]


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-120b", "nemotron-3-nano-30b-a3b", "deepseek-v3"])
@pytest.mark.parametrize(
    ("trainer", "grid"),
    [("fsdp2", Grid(dp=6)), ("fsdp2", Grid(dp=4, tp=4)), ("zero3", Grid(dp=48)), ("transformers", Grid(dp=3, tp=4))],
)
def test_other_trainers_are_direct_to_the_last_byte(name: str, trainer: Trainer, grid: Grid) -> None:
    plan = preview(read_architecture(name), trainer, grid=grid)
    assert plan.gaps == ()
    assert plan.direct == plan.nbytes == sum(plan.baseline)
    assert set(plan.classes) <= ({"cast", "bits"} if trainer == "fsdp2" else {"bits"})


def test_a_changed_head_count_changes_the_plan() -> None:
    fields = SMALL[0]
    plans = [
        preview(read_architecture(fields | {"num_key_value_heads": groups}), "megatron", grid=Grid(tp=4))
        for groups in (2, 8)
    ]
    assert plans[0].regions != plans[1].regions
    assert plans[0].nbytes < plans[1].nbytes


def test_degrees_that_a_trainer_does_not_have_are_refused() -> None:
    architecture = read_architecture(SMALL[1])
    for trainer, grid in (("fsdp2", Grid(ep=2, dp=2)), ("transformers", Grid(pp=2)), ("zero3", Grid(tp=2))):
        with pytest.raises(UsageError, match="planned with"):
            preview(architecture, trainer, grid=grid)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="published rule"):
        preview(architecture, "fsdp2", grid=Grid(dp=2), rule="paper")


def test_layouts_are_what_plans_count() -> None:
    for fields in SMALL:
        tensors = layout(read_architecture(fields))
        assert isinstance(tensors, Layout)
        assert all(isinstance(spec, TensorSpec) for spec in tensors)
