"""The worker half against models that vLLM loaded in this process, on CPU: placement, deltas, repair, refusals."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from support.vllm import inprocess
from support.vllm.worker_rig import (
    Driver,
    Lanes,
    Version,
    Worker,
    halves,
    segment_totals,
    step,
    unpack,
    vector,
    write_version,
)

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.directory import Checkpoint, write_checkpoint
from dcr_daemon.codec.chunk import Codec
from dcr_daemon.vllm_plugin import calls
from dcr_daemon.vllm_plugin.calls import Code, JobState, Op, TensorHandling, TxnState
from dcr_daemon.vllm_plugin.loader import eligibility, place_model
from dcr_daemon.vllm_plugin.weights import faults
from dcr_demo.models import copy_side_files, write_tiny

pytestmark = pytest.mark.vllm

KINDS = ("dense", "tied", "moe")


@dataclass
class Served:
    """A model under a worker, restored between tests by reloading its first state."""

    path: Path
    layout: Layout
    lanes: Lanes
    model: torch.nn.Module
    config: Any
    first: dict[str, torch.Tensor]

    def driver(self) -> Driver:
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            tensor.data.copy_(self.first[name])
        driver = Driver(Worker(self.model, self.config))
        driver.ok(Op.HELLO)
        return driver

    def versions(self, out: Path, count: int, *, share: float = 0.01, **how: Any) -> tuple[list[Version], list[Lanes]]:
        states = [self.lanes]
        hops = []
        for number in range(1, count + 1):
            states.append(step(states[-1], share, seed=number))
            hops.append(write_version(out, self.layout, states[-2], states[-1], version=number, **how))
        return hops, states

    def fresh(self, out: Path, lanes: Lanes) -> dict[str, torch.Tensor]:
        """What vLLM makes of a checkpoint with these values."""
        tensors = {spec.name: bits for spec, bits in zip(self.layout, lanes, strict=True)}
        write_checkpoint(out, self.layout, bits_of=tensors.__getitem__)
        copy_side_files(self.path, out)
        return inprocess.state(inprocess.load(out)[0])


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    path = write_tiny(tmp_path_factory.mktemp("models") / request.param, kind=request.param)
    with Checkpoint(path) as checkpoint:
        lanes = [checkpoint.bits(spec.name).reshape(-1).copy() for spec in checkpoint.layout]
        layout = checkpoint.layout
    model, config = inprocess.load(path)
    return Served(path, layout, lanes, model, config, inprocess.state(model))


def live(served: Served) -> dict[str, torch.Tensor]:
    return inprocess.state(served.model)


def test_the_live_fingerprint_is_the_checkpoints_tensor_by_tensor(served: Served, tmp_path: Path) -> None:
    driver = served.driver()
    before = live(served)
    attached = driver.attach(served.layout, tmp_path)
    assert attached.refusals == {}
    assert set(attached.held) == {TensorHandling.PLACED}
    assert not inprocess.differing(before, live(served)), "recording touches no weight"
    assert (driver.fingerprint(served.layout, attached) == vector(served.layout, served.lanes)).all()


def test_boxes_tile_every_tensor(served: Served, tmp_path: Path) -> None:
    attached = served.driver().attach(served.layout, tmp_path)
    held = dict.fromkeys(range(len(served.layout)), 0)
    for box in attached.boxes:
        held[box.tensor] += int(np.prod(box.shape))
    assert held == {i: spec.elements for i, spec in enumerate(served.layout)}


@pytest.mark.parametrize("codec", [Codec.ULP, Codec.XOR, Codec.OVERWRITE])
def test_a_refit_equals_a_fresh_load_bit_for_bit(served: Served, codec: Codec, tmp_path: Path) -> None:
    hops, states = served.versions(tmp_path / "chunks", 1, codec=codec, boxes=halves, target=1 << 14)
    driver = served.driver()
    attached = driver.attach(served.layout, tmp_path)
    prepared = driver.prepare("t1", hops)
    assert not inprocess.differing(served.first, live(served)), "prepare writes nothing"
    totals = segment_totals(prepared.hops[0])
    for number, segment in enumerate(hops[0].segments):
        assert totals[number] == (segment.changed, segment.before, segment.after)
    assert driver.swap("t1") == prepared.after
    assert driver.ok(Op.COMMIT, calls.Status, txn="t1").state == TxnState.NONE
    assert (driver.fingerprint(served.layout, attached) == vector(served.layout, states[-1])).all()
    assert inprocess.differing(served.fresh(tmp_path / "fresh", states[-1]), live(served)) == []


def test_several_versions_compose_into_one_change(served: Served, tmp_path: Path) -> None:
    hops, states = served.versions(tmp_path / "chunks", 4, share=0.3)
    driver = served.driver()
    attached = driver.attach(served.layout, tmp_path, cap=1 << 25)
    prepared = driver.prepare("t", hops)
    assert prepared.fits == 4
    for version, hop in zip(hops, prepared.hops, strict=True):
        totals = segment_totals(hop)
        for number, segment in enumerate(version.segments):
            assert totals[number] == (segment.changed, segment.before, segment.after)
    assert driver.swap("t") == prepared.after
    driver.ok(Op.COMMIT, txn="t")
    assert (driver.fingerprint(served.layout, attached) == vector(served.layout, states[-1])).all()


def test_a_rollback_restores_every_bit(served: Served, tmp_path: Path) -> None:
    hops, _ = served.versions(tmp_path / "chunks", 3, share=0.2)
    driver = served.driver()
    driver.attach(served.layout, tmp_path, cap=1 << 25)
    prepared = driver.prepare("t", hops)
    driver.swap("t")
    assert driver.ok(Op.ROLLBACK, calls.Sums, txn="t") == prepared.before
    assert driver.ok(Op.CLOSE, calls.Status, txn="t").outcomes == {"t": "rolled back"}
    assert not inprocess.differing(served.first, live(served))


def test_a_torn_apply_is_repaired_by_repeating_it(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "ENABLED", True)
    hops, states = served.versions(tmp_path / "chunks", 1, share=0.05)
    driver = served.driver()
    attached = driver.attach(served.layout, tmp_path)
    prepared = driver.prepare("t", hops)
    driver.ok(Op.FAULT, name="apply")
    for op in (Op.APPROVE, Op.CHECK, Op.BEGIN):
        driver.ok(op, txn="t")
    failed = driver.reply(Op.APPLY, txn="t")
    assert (failed.ok, failed.code, failed.dirty) == (False, Code.FAILED, True)
    assert inprocess.differing(served.first, live(served)), "half of it was written"
    assert driver.ok(Op.APPLY, calls.Sums, txn="t") == prepared.after
    driver.ok(Op.COMMIT, txn="t")
    assert (driver.fingerprint(served.layout, attached) == vector(served.layout, states[-1])).all()


def test_a_value_corrupted_in_memory_shows_in_the_sums(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "ENABLED", True)
    hops, _ = served.versions(tmp_path / "chunks", 1)
    driver = served.driver()
    driver.attach(served.layout, tmp_path)
    prepared = driver.prepare("t", hops)
    driver.ok(Op.FAULT, name="flip")
    assert driver.swap("t") != prepared.after
    assert driver.ok(Op.APPLY, calls.Sums, txn="t") == prepared.after


def test_a_delta_for_other_weights_shows_in_the_before_sums(served: Served, tmp_path: Path) -> None:
    other = step(served.lanes, 0.5, seed=99)
    hop = write_version(tmp_path / "chunks", served.layout, other, step(other, 0.01, seed=1), version=1)
    driver = served.driver()
    driver.attach(served.layout, tmp_path)
    totals = segment_totals(driver.prepare("t", [hop]).hops[0])
    assert any(totals[n][1] != segment.before for n, segment in enumerate(hop.segments))
    assert not inprocess.differing(served.first, live(served))


def test_a_dense_load_repairs_arbitrary_weights(served: Served, tmp_path: Path) -> None:
    driver = served.driver()
    attached = driver.attach(served.layout, tmp_path)
    for name, tensor in served.model.named_parameters():
        if tensor.dtype == torch.bfloat16:
            tensor.data.view(torch.int16).add_(len(name))
    driver.ok(Op.BEGIN, txn="load", kind="load")
    driver.ok(Op.START, id="j", kind="load", files=[str(path) for path in served.path.glob("*.safetensors")])
    assert driver.finish("j").state == JobState.DONE
    driver.ok(Op.JOIN, id="j")
    assert (driver.fingerprint(served.layout, attached) == vector(served.layout, served.lanes)).all()
    assert not driver.ok(Op.COMMIT, calls.Status, txn="load").dirty


def test_a_loader_used_since_is_not_recorded_twice(served: Served, tmp_path: Path) -> None:
    driver = served.driver()
    first = driver.attach(served.layout, tmp_path)
    again = driver.attach(served.layout, tmp_path)
    assert again.boxes == first.boxes
    driver.worker.reload_weights()
    assert driver.reply(Op.START, id="f", kind="fingerprint").code == Code.UNPROVED
    assert driver.attach(served.layout, tmp_path).boxes == first.boxes


def test_a_checksum_names_every_parameter_and_buffer(served: Served) -> None:
    driver = served.driver()
    sums = driver.ok(Op.CHECKSUMS, calls.Checksums)
    assert sums.parameters.keys() == dict(served.model.named_parameters(remove_duplicate=False)).keys()
    assert sums.buffers.keys() == dict(served.model.named_buffers(remove_duplicate=False)).keys()
    parameter = next(iter(served.model.parameters()))
    parameter.data.view(torch.int16).reshape(-1)[0] ^= 1
    assert driver.ok(Op.CHECKSUMS, calls.Checksums) != sums


def test_a_wrong_permutation_of_experts_shows_in_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "ENABLED", True)
    path = write_tiny(tmp_path / "moe", kind="moe", seed=3)
    with Checkpoint(path) as checkpoint:
        layout, lanes = checkpoint.layout, [checkpoint.bits(spec.name).reshape(-1) for spec in checkpoint.layout]
    model, config = inprocess.load(path)
    driver = Driver(Worker(model, config))
    driver.ok(Op.FAULT, name="placement")
    attached = driver.attach(layout, tmp_path)
    wrong = driver.fingerprint(layout, attached) != vector(layout, lanes)
    assert {layout[i].name.split(".experts.")[-1].split(".")[1] for i in np.flatnonzero(wrong)}, "experts differ"
    assert all(".experts." in layout[i].name for i in np.flatnonzero(wrong))


def test_weights_that_a_cpu_packs_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stock CPU vLLM: linear weights are gone, and `lm_head` has a hidden copy that no fingerprint could see."""
    from vllm.model_executor.layers import utils

    from dcr_daemon.vllm_plugin import cpu_rig

    path = write_tiny(tmp_path / "dense", kind="dense")
    monkeypatch.setattr(cpu_rig, "install", lambda: False)
    packing = getattr(utils.dispatch_cpu_unquantized_gemm, "__wrapped__", utils.dispatch_cpu_unquantized_gemm)
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", packing)
    model, config = inprocess.load(path)
    with Checkpoint(path) as checkpoint:
        attached = Driver(Worker(model, config)).attach(checkpoint.layout, tmp_path)
        names = {spec.name for spec in checkpoint.layout}
    packed_names = {name for name in names if name.endswith("_proj.weight") or "lm_head" in name or "embed" in name}
    assert attached.refusals.keys() == packed_names
    assert "hidden packed copy" in attached.refusals["lm_head.weight"]


def test_a_layout_of_another_model_is_refused_with_every_name(served: Served, tmp_path: Path) -> None:
    from dcr_daemon.canonical.layout import TensorSpec

    # Cast, and fused with what is copied as it is: neither copied bit by bit nor fed whole.
    specs = [TensorSpec(s.name, "F32" if "q_proj" in s.name else s.dtype, s.shape) for s in served.layout]
    attached = served.driver().attach(Layout(specs), tmp_path)
    assert {spec.name for spec in specs if spec.dtype == "F32"} == attached.refusals.keys()
    assert all("casts" in reason for reason in attached.refusals.values())


def test_configurations_that_cannot_be_updated_are_refused(served: Served) -> None:
    def config(**model: Any) -> Any:
        parallel = {"enable_eplb": False, "enable_elastic_ep": False, "data_parallel_size": 1}
        fields = {"quantization": None, "use_mla": False, "enable_sleep_mode": False, "is_moe": False}
        over = {key: model.pop(key) for key in list(model) if key in parallel}
        lora, speculative, transfer = (model.pop(name, None) for name in ("lora", "speculative", "transfer"))
        return SimpleNamespace(
            model_config=SimpleNamespace(**(fields | model)),
            parallel_config=SimpleNamespace(**(parallel | over)),
            lora_config=lora,
            speculative_config=speculative,
            kv_transfer_config=transfer,
            offload_config=SimpleNamespace(
                uva=SimpleNamespace(cpu_offload_gb=0), prefetch=SimpleNamespace(offload_group_size=0)
            ),
        )

    assert eligibility.model_refusals(served.config) == [], "the real thing passes, so every name exists"
    assert eligibility.model_refusals(config()) == []
    for options, word, instead in (
        ({"quantization": "fp8"}, "quantised", "serve the unquantised"),
        ({"enable_eplb": True}, "--enable-eplb", "use --enable-expert-parallel alone"),
        ({"enable_elastic_ep": True}, "elastic", "use --enable-expert-parallel alone"),
        ({"enable_sleep_mode": True}, "--enable-sleep-mode", "stop the server"),
        ({"lora": object()}, "--enable-lora", "merged"),
        ({"is_moe": True, "data_parallel_size": 2}, "E9", "use --tensor-parallel-size"),
        ({"speculative": SimpleNamespace(method="eagle3")}, "--speculative-config", "use the method ngram or suffix"),
    ):
        (reason,) = eligibility.model_refusals(config(**options))
        assert word in reason
        assert instead in reason
    for method in ("ngram", "suffix"):  # vLLM gives them the target's configuration as the draft's
        weightless = SimpleNamespace(method=method, draft_model_config=object())
        assert eligibility.model_refusals(config(speculative=weightless)) == []


def test_a_kv_connector_that_cannot_drop_a_cache_is_refused_unless_caches_are_kept(served: Served) -> None:
    from vllm.config import KVTransferConfig

    def refusals(name: str, caches: str = "reset", **more: Any) -> list[str]:
        transfer = KVTransferConfig(kv_connector=name, kv_role="kv_both", **more)
        with mock.patch.object(served.config, "kv_transfer_config", transfer):
            return eligibility.model_refusals(served.config, caches=caches)

    assert refusals("OffloadingConnector") == []
    (reason,) = refusals("NixlConnector")
    assert "NixlConnector cannot drop" in reason
    assert "DCR_CACHES=keep" in reason
    assert refusals("NixlConnector", caches="keep") == []
    children = [{"kv_connector": name, "kv_role": "kv_both"} for name in ("OffloadingConnector", "NixlConnector")]
    (reason,) = refusals("MultiConnector", kv_connector_extra_config={"connectors": children})
    assert "NixlConnector" in reason


def test_a_hidden_value_made_from_a_weight_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a backend that keeps scaled weights: the parameter would be right, and the answers wrong."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    process = UnquantizedLinearMethod.process_weights_after_loading

    def keeping(method: Any, layer: torch.nn.Module) -> None:
        process(method, layer)
        if "o_proj" in getattr(layer, "prefix", ""):
            method.wide = layer.weight.float() * 3

    monkeypatch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", keeping)
    path = write_tiny(tmp_path / "dense", kind="dense")
    model, config = inprocess.load(path)
    with Checkpoint(path) as checkpoint:
        attached = Driver(Worker(model, config)).attach(checkpoint.layout, tmp_path)
        names = {spec.name for spec in checkpoint.layout if "o_proj" in spec.name}
    assert attached.refusals.keys() == names
    for name, reason in attached.refusals.items():
        assert f"quant_method.wide, which vLLM made from {name}" in reason


def test_a_refused_model_takes_no_job(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_model.eligibility, "model_refusals", lambda config, **_: ["it is quantised"])
    driver = served.driver()
    attached = driver.attach(served.layout, tmp_path)
    assert attached.refusals == {"": "it is quantised"}
    assert set(attached.held) == {TensorHandling.REFUSED}
    assert driver.reply(Op.START, id="f", kind="fingerprint").code == Code.REFUSED


def test_changed_counts_are_what_the_rows_hold(served: Served, tmp_path: Path) -> None:
    hops, states = served.versions(tmp_path / "chunks", 1, share=0.1)
    driver = served.driver()
    driver.attach(served.layout, tmp_path)
    prepared = driver.prepare("t", hops)
    changed = sum(int((old != new).sum()) for old, new in zip(states[0], states[1], strict=True))
    assert prepared.changed == changed == sum(count for count, _ in unpack(prepared.after).values())
