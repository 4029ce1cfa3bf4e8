"""A stream of only the language model of a model that vLLM serves with images: refits are exact, the rest watched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from architectures.check import _stand_in_for_torchvision
from architectures.configs import LINEAR, SIZES
from support.vllm import inprocess
from support.vllm.refits import Refitted, different
from support.vllm.worker_rig import step

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.directory import Checkpoint, write_checkpoint
from dcr_daemon.vllm_plugin import calls
from dcr_daemon.vllm_plugin.calls import JobState, Op
from dcr_demo.models import copy_side_files

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("inspect_here")]

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 128}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
          "num_position_embeddings": 16, "patch_size": 4}  # fmt: skip


def write_model(out: Path) -> Path:
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = SIZES | LINEAR | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0],
                                                 "partial_rotary_factor": 0.25}}  # fmt: skip
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=VISION)
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    model.to(torch.bfloat16).save_pretrained(out)
    return out


class TextStream(Refitted):
    """The stream has what is not of the vision tower, without `missing`."""

    def __init__(self, path: Path, home: Path, *missing: str) -> None:
        super().__init__(path, home, **OPTIONS)
        self.whole, bits = self.layout, self.states[0]
        kept = [i for i, spec in enumerate(self.layout) if "visual" not in spec.name and spec.name not in missing]
        assert 0 < len(kept) < len(self.layout)
        self.layout = Layout([self.whole[i] for i in kept])
        self.states = [[bits[i] for i in kept]]

    def against_a_fresh_load(self) -> list[str]:
        out = self.home / f"fresh-{len(self.states) - 1}"
        with Checkpoint(self.path) as found:
            bits = {spec.name: found.bits(spec.name).reshape(-1).copy() for spec in self.whole}
        bits |= {spec.name: lanes for spec, lanes in zip(self.layout, self.states[-1], strict=True)}
        write_checkpoint(out, self.whole, bits_of=bits.__getitem__)
        copy_side_files(self.path, out)
        return different(self.model, inprocess.load(out, **OPTIONS)[0])


def changed(case: Refitted) -> list[str]:
    case.driver.ok(Op.START, id="s", kind="scrub", tensors=(0, len(case.layout)))
    assert case.driver.finish("s").state is JobState.DONE
    return case.driver.ok(Op.JOIN, calls.FingerprintRank, id="s").changed


def test_a_text_stream_updates_the_language_model_and_the_tower_is_watched(tmp_path: Path) -> None:
    _stand_in_for_torchvision()
    case = TextStream(write_model(tmp_path / "v0"), tmp_path)
    case.attach()
    assert case.attached.refusals == {}
    placement = case.driver.worker._dcr_session._attachment.placement
    assert placement.unnamed
    assert all(name.startswith("visual.") for name in placement.unnamed)
    case.refit(step(case.states[-1], 0.2, seed=1))
    assert case.wrong_sums() == []
    assert case.against_a_fresh_load() == []
    assert changed(case) == []
    name = placement.unnamed[-1]
    dict(case.model.named_parameters())[name].data.reshape(-1)[0] += 1
    assert changed(case) == [name]
    (reason,) = case.driver.attach(case.layout, tmp_path).refusals.values()
    assert f"{name} changed since the first attach" in reason


@pytest.mark.parametrize("missing", ["model.language_model.norm.weight", "lm_head.weight"])
def test_a_text_stream_that_misses_a_tensor_of_the_text_is_refused(missing: str, tmp_path: Path) -> None:
    _stand_in_for_torchvision()
    case = TextStream(write_model(tmp_path / "v0"), tmp_path, missing)
    assert missing in {spec.name for spec in case.whole}
    case.attach()
    assert "no tensor of this layout fills" in case.attached.refusals[""]


def test_a_stream_with_a_part_of_the_tower_is_refused(tmp_path: Path) -> None:
    _stand_in_for_torchvision()
    case = TextStream(write_model(tmp_path / "v0"), tmp_path)
    part = next(spec for spec in case.whole if "visual" in spec.name and spec.name.endswith("bias"))
    case.layout = Layout([*case.layout, part])
    case.attach()
    assert "no tensor of this layout fills" in case.attached.refusals[""]
