"""What vLLM's own loaders compute with: classed as loaded, fed through them, bit for bit what a fresh load makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from support.vllm.model_families import write_family
from support.vllm.refits import Refitted
from support.vllm.wider_model import redrawn, written_wider
from support.vllm.worker_rig import step

from dcr_demo.models import write_tiny

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_norms_and_routers_of_a_wider_checkpoint_are_cast_as_a_fresh_load_does(kind: Any, tmp_path: Path) -> None:
    case = Refitted.served(written_wider(write_tiny(tmp_path / "narrow", kind=kind), tmp_path / "wide"), tmp_path)
    assert case.computed_names == {spec.name for spec in case.layout if spec.dtype == "F32"}
    assert case.differing(0) == []
    for number in (1, 2):
        case.refit(redrawn(case.layout, case.states[-1], number))
        assert case.differing(number) == []
    assert case.differing(0)
    assert case.against_a_fresh_load() == []


@pytest.mark.usefixtures("inspect_here")
@pytest.mark.parametrize(
    ("family", "computed"),
    [
        ("glm4_moe", {"gate.weight", "gate.e_score_correction_bias"}),
        ("deepseek_v3", {"gate.e_score_correction_bias"}),
        ("mamba2", {"mixer.A_log"}),
        ("nemotron_h", {"mixer.A_log"}),
        ("qwen3_next", {"linear_attn.A_log"}),
    ],
)
def test_routers_in_fp32_and_mamba_decays_follow_every_version(family: str, computed: set[str], tmp_path: Path) -> None:
    case = Refitted.served(write_family(tmp_path / "v0", family), tmp_path, skip_tokenizer_init=True, max_model_len=128)
    assert {".".join(name.rsplit(".", 2)[1:]) for name in case.computed_names} == computed
    assert case.differing(0) == []
    for number in (1, 2):
        case.refit(step(case.states[-1], 0.1, number))
    assert case.against_a_fresh_load() == []
