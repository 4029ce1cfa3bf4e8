"""Models of four real processes, sharded in every way that a trainer may: what the ranks read is the checkpoint.

The ranks (tests/support/ranks/programs/binding.py) map what they hold and read it; here their readings are put together
and compared with what `save_pretrained` wrote of the very model, rounded to the stream's dtype.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks.programs import binding
from support.ranks.readings import assembled
from support.ranks.run import run_ranks

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.errors import DcrError

CONFIG: dict[str, Any] = {
    "vocab_size": 72, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "num_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
Told = list[dict[str, Any]]  #: of a scene, by rank


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    out = tmp_path_factory.mktemp("ranks")
    config = AutoConfig.for_model("qwen3_moe", **CONFIG)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(out / "base")
    run_ranks(binding.__name__, binding.WORLD, out)
    return out / "base", [_read(out / f"rank{rank}.pickle") for rank in range(binding.WORLD)]


def _read(path: Path) -> dict[str, Any]:
    return dict(pickle.loads(path.read_bytes()))  # noqa: S301 - our own process wrote it


def expected(base: Path, factor: float) -> list[Any]:
    """Bits of the checkpoint in bf16, all values times `factor`."""
    with Checkpoint(base) as checkpoint:
        whole = [torch.from_numpy(checkpoint.bits(spec.name).copy().view("f4")) for spec in checkpoint.layout]
    return [(tensor * factor).to(torch.bfloat16).view(torch.int16).numpy().view("u2") for tensor in whole]


@pytest.mark.parametrize("scene", binding.SCENES)
def test_ranks_read_together_what_the_framework_saves(scene: str, told: tuple[Path, list[dict[str, Any]]]) -> None:
    base, ranks = told
    layout = binding.published(base)
    for when, factor in (("before", 1.0), ("after", 2.0)):
        got = assembled(layout, (reading for rank in ranks for reading in rank[scene][when]))
        for spec, bits, wanted in zip(layout, got, expected(base, factor), strict=True):
            assert (bits == wanted).all(), spec.name
    assert all(rank[scene]["residual"] == rank[scene]["dropped"] == {} for rank in ranks)


@pytest.mark.parametrize("scene", binding.SCENES)
def test_no_rank_allocates_a_full_tensor(scene: str, told: tuple[Path, list[dict[str, Any]]]) -> None:
    """Neither a local shard: a block is 1 KiB, what is gathered to be cast is twice that, and there is one more."""
    _, ranks = told
    full = 6 * 48 * 32 * 4
    assert max(rank[scene]["largest"] for rank in ranks) <= 2 * binding.LIMIT < full


def test_the_scenes_are_what_they_are_called(told: tuple[Path, list[dict[str, Any]]]) -> None:
    _, ranks = told
    placements = {scene: ranks[0][scene]["placements"] for scene in binding.SCENES}
    assert any("_StridedShard(dim=1, sf=2)" in placement for placement in placements["tp"])  # packed gate and up
    assert any(
        "_StridedShard" in placement for placement in placements["fsdp over tp"] & placements["fsdp over experts"]
    )
    assert "Shard(dim=1)" in placements["columns"]
    assert "Replicate()" in placements["hybrid"]


def test_partitions_of_zero3_are_gathered_for_what_is_residual(told: tuple[Path, list[dict[str, Any]]]) -> None:
    base, ranks = told
    sums = {name: whole.double().sum().item() * 2 for name, whole in model_of(base).state_dict().items()}
    for rank in ranks:
        assert rank["zero3"]["gathered"] == pytest.approx(sums)


def model_of(base: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def test_ranks_beside_a_smaller_mesh_count_as_its_copies(told: tuple[Path, list[dict[str, Any]]]) -> None:
    layout = Layout(TensorSpec(name, "F32", shape) for name, shape in binding.PLAIN.items())
    got = assembled(layout, (reading for rank in told[1] for reading in rank["replicated tp"]["before"]))
    for spec, bits in zip(layout, got, strict=True):
        assert bits.view("f4").tolist() == list(range(spec.elements)), spec.name


def test_partial_sums_are_residual_by_name(told: tuple[Path, list[dict[str, Any]]]) -> None:
    layout = Layout([TensorSpec("sum", "F32", (6,)), TensorSpec("rows", "F32", (8, 3))])
    ranks = [rank["partial"] for rank in told[1]]
    assembled(layout, (reading for rank in ranks for reading in rank["before"]), residual=["sum"])
    assert all("no part of a finished tensor" in rank["residual"]["sum"] for rank in ranks)


def test_a_changed_mesh_is_noticed(told: tuple[Path, list[dict[str, Any]]]) -> None:
    """The same names, local shapes and dtypes; only who holds what is another."""
    for rank in told[1]:
        error = rank["moved"]
        assert isinstance(error, DcrError)
        assert "not laid out as when publishing began" in str(error)
        assert "rows is" in str(error)
