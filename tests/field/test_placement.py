"""Loaders that put weights where nobody looked: every destination byte is that of a fresh load, or attach refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from support.streams.trainer import Trainer, until
from support.vllm.unusual_loaders import EXPERTS, Deaf, FieldEngine, LaidOut, Model, Wrapped, attach_model

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.safetensors import pack_safetensors
from dcr_daemon.engine import messages
from dcr_daemon.engine.port import Swapped, Verdict
from dcr_daemon.errors import DcrError, EngineRefused
from dcr_daemon.events import Waiting
from dcr_daemon.vllm_plugin.loader import place_model


@pytest.fixture
def field_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers attach to the models of this room without vLLM, whose own loader other tests have."""
    monkeypatch.setattr(place_model, "attach_model", attach_model)


@pytest.mark.usefixtures("field_loader")
def test_the_first_and_the_last_of_stacked_experts_arrive_on_their_own_ranks(tmp_path: Path) -> None:
    """The delta's checksum passed, and grouped experts held NaN after the apply (256 experts, split over ranks)."""
    engine = FieldEngine(tmp_path / "e").ready()
    lanes = [bits.copy() for bits in engine.lanes[0]]
    experts = lanes[Model.layout.index("experts.down")].reshape(EXPERTS, -1)
    for expert in (0, EXPERTS // 2 - 1, EXPERTS // 2, EXPERTS - 1):
        experts[expert, ::5] ^= np.uint16(0x8001)
    assert engine.refit(engine.put(lanes)).verdict is Verdict.COMMITTED
    assert engine.holds(1)
    assert engine.workers[0].toy.state() != engine.workers[1].toy.state()


@pytest.mark.usefixtures("field_loader")
def test_weights_laid_out_anew_after_loading_follow_every_version(tmp_path: Path) -> None:
    """Weights were laid out in blocks after the load; the second update crashed or went to the old places."""
    engine = FieldEngine(tmp_path / "e", LaidOut).ready()
    for name in ("one", "two", "three"):
        assert engine.refit(engine.step(), name=name).verdict is Verdict.COMMITTED
        assert engine.holds(len(engine.lanes) - 1)


@pytest.mark.usefixtures("field_loader")
@pytest.mark.parametrize("when", ["before prepare", "before swap"])
def test_storage_that_was_replaced_after_an_update_is_never_written_unseen(tmp_path: Path, when: str) -> None:
    """From the second update on experts were corrupt: after the first, the loader had bound the layer to new memory."""
    engine = FieldEngine(tmp_path / "e").ready()
    assert engine.refit(engine.step(), name="one").verdict is Verdict.COMMITTED
    version = engine.step()
    if when == "before swap":
        engine.prepare(version, name="two")
    for one in engine.workers:
        one.toy.down = torch.nn.Parameter(one.toy.down.data.clone(), requires_grad=False)
    if when == "before prepare":
        engine.prepare(version, name="two")  # reads the memory it knows, and writes nothing
    with pytest.raises(EngineRefused, match="down"):
        engine.swap("two")
    assert engine.holds(1)
    assert engine.status().version in (1, None)
    engine.attach()
    engine.ask(messages.Prove, version=1, vector=engine.vector_file(1), label="v1")
    assert engine.refit(version, name="three").verdict is Verdict.COMMITTED
    assert engine.holds(2)


@pytest.mark.usefixtures("field_loader")
def test_what_the_checkpoint_does_not_hold_stays_as_it_was_calibrated(tmp_path: Path) -> None:
    """Calibrated cache scales were back at 1.0 after every synchronisation."""
    engine = FieldEngine(tmp_path / "e").ready()
    scales = [one.toy.kv_scale.clone().fill_(0.11 + one.rank) for one in engine.workers]
    for one, scale in zip(engine.workers, scales, strict=True):
        one.toy.kv_scale.copy_(scale)
    engine.refit(engine.step())
    version = engine.step()
    ended = engine.ask(
        messages.Load, Swapped, version=version, files=[engine.anchor(version)], label="v2",
        vector=engine.vector_file(version),
    )  # fmt: skip
    assert ended.verdict is Verdict.COMMITTED
    for one, scale in zip(engine.workers, scales, strict=True):
        assert torch.equal(one.toy.kv_scale, scale)


@pytest.mark.usefixtures("field_loader")
def test_a_tied_head_follows_its_embeddings_and_nobody_misses_it(tmp_path: Path) -> None:
    """The head did not follow, or an update without it was reported as nothing loaded."""
    engine = FieldEngine(tmp_path / "e").ready()
    assert engine.refit(engine.step(0.9)).verdict is Verdict.COMMITTED
    wanted = engine.lanes[1][Model.layout.index("embed")]
    for one in engine.workers:
        assert one.toy.head.detach().view(torch.int16).numpy().view(np.uint16).reshape(-1).tolist() == wanted.tolist()


@pytest.mark.usefixtures("field_loader")
def test_a_parameter_that_lost_its_loader_is_named_at_attach(tmp_path: Path) -> None:
    """Experts lost the function that loads them, and an update failed half-way or wrote elsewhere."""
    engine = FieldEngine(tmp_path / "e", Deaf)
    before = [one.toy.state() for one in engine.workers]
    with pytest.raises(EngineRefused, match=r"fills down"):
        engine.attach()
    assert [one.toy.state() for one in engine.workers] == before
    assert not engine.host.running


@pytest.mark.usefixtures("field_loader")
@pytest.mark.parametrize("kind", [Model, Wrapped])
def test_names_that_the_model_does_not_know_are_refused_at_attach(tmp_path: Path, kind: type[Model]) -> None:
    """A wrapper had another prefix; the in-place patch ended at the first tensor that had changed."""
    prefix = "language_model." if kind is Model else ""
    layout = Layout([TensorSpec(prefix + spec.name, spec.dtype, spec.shape) for spec in Model.layout])

    class Started(kind):  # type: ignore[valid-type, misc]
        """Its weights were there before anybody asked for names."""

        def load_one(self, name: str, tensor: torch.Tensor) -> None:
            if tensor.device.type == "meta":
                super().load_one(name, tensor)

    with pytest.raises(EngineRefused, match=r"language_model|no tensor of this layout fills"):
        FieldEngine(tmp_path / "e", Started, layout=layout).attach()


def vllm_config(**changes: Any) -> Any:
    """As much of vLLM's configuration as decides whether it can be updated; `part_field` names a change."""
    made = SimpleNamespace(
        model_config=SimpleNamespace(quantization=None, use_mla=False, enable_sleep_mode=False, is_moe=False),
        parallel_config=SimpleNamespace(enable_eplb=False, enable_elastic_ep=False, data_parallel_size=1),
        lora_config=None,
        speculative_config=None,
        kv_transfer_config=None,
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=0), prefetch=SimpleNamespace(offload_group_size=0)
        ),
    )
    for path, value in changes.items():
        *parts, last = path.split("__")
        target = made
        for part in parts:
            target = getattr(target, part)
        setattr(target, last, value)
    return made


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"model_config__quantization": "fp8"}, "quantised", id="weights and scales in two calls"),
        pytest.param({"model_config__quantization": "modelopt_fp4"}, "quantised", id="block scales"),
        pytest.param({"speculative_config": SimpleNamespace(method="eagle3")}, "draft", id="draft model"),
        pytest.param({"lora_config": object()}, "enable-lora", id="adapters"),
        pytest.param({"parallel_config__enable_eplb": True}, "load balancing", id="experts that move"),
        pytest.param({"model_config__enable_sleep_mode": True}, "sleep", id="weights that are unmapped"),
        pytest.param({"offload_config__uva__cpu_offload_gb": 4}, "offloaded", id="weights that are elsewhere"),
    ],
)
def test_what_cannot_be_kept_right_is_refused_by_name_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    """A weight and its scale came apart; scales were laid out wrongly; a draft was never updated, or spoiled."""
    engine = FieldEngine(tmp_path / "e", vllm=vllm_config(**changes))
    before = [one.toy.state() for one in engine.workers]
    with pytest.raises(EngineRefused, match=reason):
        engine.attach()
    assert engine.core.state.why_not_resume()
    assert not engine.host.running
    assert [one.toy.state() for one in engine.workers] == before


async def test_experts_that_are_not_all_there_are_held_until_they_are(make_trainer: Callable[..., Trainer]) -> None:
    """The engine wanted all experts of a layer; a rank of the trainer had sent its own."""
    trainer = make_trainer(1)
    versions, place = trainer.versions, trainer.out / "checkpoint-1"
    place.mkdir()
    parts = [[spec for spec in versions.layout if ("experts" in spec.name) is late] for late in (False, True)]
    bodies = [pack_safetensors([(spec, versions.values[1][spec.name]) for spec in part]) for part in parts]
    (place / "model-00001-of-00002.safetensors").write_bytes(bodies[0])
    async with trainer.publishing() as task:
        await until(lambda: any("incomplete" in event.what for event in trainer.events.of(Waiting)), task)
        assert not trainer.sealed
        (place / "model-00002-of-00002.safetensors").write_bytes(bodies[1])
        await until(lambda: trainer.sealed, task)
    replica = trainer.replica(at=0)
    await replica.once()
    assert versions.version_of(replica.directory) == 1


@pytest.mark.parametrize("lacks", [True, False])
async def test_a_tensor_that_only_one_side_has_is_an_error_with_its_name(
    make_trainer: Callable[..., Trainer], lacks: bool
) -> None:
    """Tensors that the base did not have were skipped with a warning, on both sides."""
    trainer = make_trainer(1)
    place, values = trainer.out / "checkpoint-1", dict(trainer.versions.values[1])
    place.mkdir()
    specs = [spec for spec in trainer.versions.layout if not (lacks and spec.name == "layers.0.mlp")]
    if not lacks:
        specs.append(TensorSpec("layers.9.mlp", "BF16", (3,)))
        values["layers.9.mlp"] = np.zeros(3, np.uint16)
    (place / "model.safetensors").write_bytes(pack_safetensors([(spec, values[spec.name]) for spec in specs]))
    name = r"layers\.0\.mlp" if lacks else r"layers\.9\.mlp"
    with pytest.raises(DcrError, match=name):
        await trainer.once()
    assert not trainer.sealed
