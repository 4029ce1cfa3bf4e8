"""`dcr plan`: figures for people, a contract for programs, and errors that say what to do."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.cli.app import run

FIELDS = {
    "model", "family", "trainer", "rule", "world", "grid", "parameters", "tensors", "bytes", "direct_bytes",
    "direct_share", "classes", "residual", "exactly_once", "gaps", "baseline_bytes", "regions", "kinds", "notes",
}  # fmt: skip


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    capsys.readouterr()
    assert run(["plan", *arguments, "--json"]) == code
    out, err = capsys.readouterr()
    return json.loads(out if code == 0 else err)


def test_the_fields_are_a_contract(capsys: pytest.CaptureFixture[str]) -> None:
    plan = said(capsys, "qwen3-30b-a3b", "--tp", "4", "--ep", "8")
    assert set(plan) == FIELDS
    assert (plan["world"], plan["grid"]["dp"], plan["direct_share"], plan["exactly_once"]) == (8, 2, 1.0, True)
    assert plan["baseline_bytes"]["total"] == plan["bytes"] == sum(kind["bytes"] for kind in plan["kinds"])
    assert set(plan["kinds"][0]) == {"kind", "tensors", "bytes", "direct_bytes", "regions", "classes", "why"}


def test_people_see_the_share_and_what_stands_in_its_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "Qwen3-30B-A3B", "--tp", "4", "--ep", "8", "--rule", "paper"]) == 0
    text = capsys.readouterr().out
    for part in (
        "96.313%",
        "█",
        "░",
        "padded or tied",
        "query groups",
        "8 ranks: tp 4 · ep 8 · dp 2",
        "18,867 tensors",
    ):
        assert part in text
    assert run(["plan", "gpt-oss-120b", "--trainer", "fsdp2", "--dp", "16"]) == 0
    text = capsys.readouterr().out
    assert "100.000%" in text
    assert "cast" in text


def test_a_config_file_is_planned_and_prediction_layers_are_a_choice(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fields = {"model_type": "glm4_moe", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "n_routed_experts": 4,
              "moe_intermediate_size": 32, "num_nextn_predict_layers": 1,
              "quantization_config": {"quant_method": "fp8"}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with_it, without = (said(capsys, str(tmp_path), flag) for flag in ("--mtp", "--no-mtp"))
    assert with_it["parameters"] > without["parameters"]
    assert with_it["notes"]
    assert said(capsys, str(tmp_path), "--dtype", "fp32")["classes"].keys() == {"cast", "bits"}


@pytest.mark.parametrize(
    ("arguments", "code", "kind", "hint"),
    [
        (["nope"], 11, "NotFound", "qwen3-30b-a3b"),
        (["qwen3-30b-a3b", "--tp", "3"], 2, "Misuse", "tensor"),
        (["deepseek-v3", "--pp", "16"], 2, "Misuse", "--stage-layers 4,4"),
        (["qwen3-8b", "--pp", "2", "--stage-layers", "a,b"], 2, "Misuse", "16,15"),
        (["qwen3-30b-a3b", "--ep", "8", "--dp", "3"], 2, "Misuse", "--dp 8"),
        (["qwen3-30b-a3b", "--trainer", "zero3", "--ep", "2"], 2, "Misuse", "Megatron"),
        (["qwen3-8b", "--mtp"], 2, "Misuse", "--mtp"),
        (["qwen3-8b", "--tp", "0"], 2, "Misuse", "--help"),
    ],
)
def test_errors_say_what_to_do(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, kind: str, hint: str
) -> None:
    error = said(capsys, *arguments, code=code)["error"]
    assert error["kind"] == kind
    assert hint in error["hint"]
    assert error["message"]


def test_a_stream_tells_what_its_ranks_agreed_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import torch

    from dcr_daemon import Publisher, Trainer
    from dcr_daemon.canonical.region import whole
    from dcr_daemon.checkpoint.directory import write_checkpoint
    from dcr_daemon.projection.region_map import Map, Shard
    from dcr_daemon.projection.values import Bits

    names = {"a": (4, 6), "b": (5,)}
    layout = Layout([TensorSpec(name, "F32", shape) for name, shape in names.items()])
    tensors = {name: torch.ones(shape) for name, shape in names.items()}
    write_checkpoint(
        tmp_path / "base", layout, bits_of=lambda name: np.zeros(layout[layout.index(name)].elements, "<u4")
    )
    url = (tmp_path / "bucket").as_uri()
    held = [Map((Shard("a", (4, 6), "F32", Bits(), tuple(whole("a", (4, 6)))),), {"b": "it is merged"}), Map(())]

    def publish(rank: int) -> None:
        trainer = Trainer(mapped=held[rank], export=lambda asked: ((name, tensors[name]) for name in asked))
        with Publisher(
            url, base=tmp_path / "base", create=True, name="t", state=tmp_path, trainer=trainer, rank=rank, world=2,
            group="g",
        ) as publisher:  # fmt: skip
            publisher.publish({"a": tensors["a"]} if rank == 0 else {}, step=1).wait_sealed()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(publish, range(2)))
    found = said(capsys, url)
    assert (found["world"], found["direct_bytes"], found["residual_bytes"]) == (2, 96, 20)
    assert found["residual"]["b"]["why"] == "it is merged (rank 0)"
    assert run(["plan", url]) == 0
    assert "it is merged" in capsys.readouterr().out


def test_a_stream_of_one_process_has_nothing_agreed_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "there is no stream" in str(said(capsys, (tmp_path / "none").as_uri(), code=11))
