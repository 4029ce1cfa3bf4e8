"""What vLLM's own loaders compute with: classed as loaded, fed through them, bit for bit what a fresh load makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from support.vllm import inprocess
from support.vllm.model_families import write_family
from support.vllm.wider_model import redrawn, written_wider
from support.vllm.worker_rig import Driver, Lanes, Version, Worker, step, vector, write_version

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.directory import Checkpoint, write_checkpoint
from dcr_daemon.checkpoint.safetensors import write_safetensors
from dcr_daemon.vllm_plugin import calls
from dcr_daemon.vllm_plugin.calls import Op, TensorHandling
from dcr_daemon.vllm_plugin.loader import place_model
from dcr_daemon.vllm_plugin.loader.computed import ComputedLoader, write_computed
from dcr_daemon.vllm_plugin.weights.memory import ValueSet
from dcr_demo.models import copy_side_files, write_tiny

pytestmark = pytest.mark.vllm


class Case:
    """A model that vLLM loaded in this process, under a worker, and its versions."""

    def __init__(self, path: Path, home: Path, **options: Any) -> None:
        self.path, self.home, self.options = path, home, options
        with Checkpoint(path) as found:
            self.layout: Layout = found.layout
            self.states: list[Lanes] = [[found.bits(spec.name).reshape(-1).copy() for spec in found.layout]]
        self.model, config = inprocess.load(path, **options)
        self.driver = Driver(Worker(self.model, config))
        attached = self.driver.attach(self.layout, home)
        assert attached.refusals == {}
        self.loaded = [tensor for tensor, held in enumerate(attached.held) if held is TensorHandling.LOADER_COMPUTED]
        self.names = {self.layout[tensor].name for tensor in self.loaded}

    def beside(self, version: int) -> dict[str, str]:
        """The loaded tensors and the vector of a version, as files."""
        path, sums = self.home / f"loaded-{version}.safetensors", self.home / f"vector-{version}.bin"
        if not path.exists():
            write_safetensors(path, [(self.layout[t], self.states[version][t]) for t in self.loaded])
            sums.write_bytes(vector(self.layout, self.states[version]).astype("<u8").tobytes())
        return {"loaded": str(path), "vector": str(sums)}

    def refit(self, lanes: Lanes) -> None:
        """To a next version, back, and to it again."""
        self.states.append(lanes)
        version, files = len(self.states) - 1, self.beside(len(self.states) - 1)
        made = write_version(self.home / "chunks", self.layout, self.states[-2], lanes, version=version)
        hop = msgspec.structs.replace(made.hop, loaded=files["loaded"], after=files["vector"])
        first = inprocess.state(self.model)
        for txn in (f"back-{version}", f"on-{version}"):
            self.driver.prepare(txn, [Version(hop, made.segments)])
            assert not inprocess.differing(first, inprocess.state(self.model))
            self.driver.swap(txn)
            if txn.startswith("back"):
                self.driver.ok(Op.ROLLBACK, calls.Sums, txn=txn)
                self.driver.ok(Op.CLOSE, txn=txn)
        self.driver.ok(Op.COMMIT, txn=txn)

    def differing(self, version: int) -> list[str]:
        """What a comparison with the bytes of a version finds."""
        job = f"compare-{version}"
        self.driver.ok(Op.START, id=job, kind="compare", **self.beside(version))
        self.driver.finish(job)
        return self.driver.ok(Op.JOIN, calls.ComparedRank, id=job).differ

    def against_a_fresh_load(self) -> list[str]:
        """Parameters and buffers in which a fresh load of the newest version differs."""
        out = self.home / "fresh"
        write_checkpoint(out, self.layout, bits_of=dict(zip(self._names(), self.states[-1], strict=True)).__getitem__)
        copy_side_files(self.path, out)
        fresh, _ = inprocess.load(out, **self.options)
        return inprocess.differing(inprocess.state(fresh), inprocess.state(self.model))

    def _names(self) -> list[str]:
        return [spec.name for spec in self.layout]


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_norms_and_routers_of_a_wider_checkpoint_are_cast_as_a_fresh_load_does(kind: Any, tmp_path: Path) -> None:
    case = Case(written_wider(write_tiny(tmp_path / "narrow", kind=kind), tmp_path / "wide"), tmp_path)
    assert case.names == {spec.name for spec in case.layout if spec.dtype == "F32"}
    assert case.differing(0) == []
    for number in (1, 2):
        case.refit(redrawn(case.layout, case.states[-1], number))
        assert case.differing(number) == []
    assert case.differing(0)
    assert case.against_a_fresh_load() == []


@pytest.fixture
def inspect_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM looks at a model's class in a process of its own; nothing here minds a GPU."""
    monkeypatch.setattr("vllm.model_executor.models.registry._run_in_subprocess", lambda look: look())


@pytest.mark.usefixtures("inspect_here")
@pytest.mark.parametrize(
    ("family", "computed"),
    [("glm4_moe", {"weight", "e_score_correction_bias"}), ("deepseek_v3", {"e_score_correction_bias"})],
)
def test_a_router_that_vllm_keeps_in_fp32_follows_every_version(
    family: str, computed: set[str], tmp_path: Path
) -> None:
    case = Case(write_family(tmp_path / "v0", family), tmp_path, skip_tokenizer_init=True, max_model_len=128)
    assert {name.split("gate.")[1] for name in case.names} == computed
    assert case.differing(0) == []
    for number in (1, 2):
        case.refit(step(case.states[-1], 0.1, number))
    assert case.against_a_fresh_load() == []


@pytest.mark.usefixtures("inspect_here")
@pytest.mark.parametrize("family", ["mamba2", "nemotron_h"])
def test_a_composed_loader_makes_of_new_bytes_what_a_fresh_load_does(family: str, tmp_path: Path) -> None:
    """`A_log` alone: on a CPU vLLM derives a copy of Mamba's convolution, so that the model as a whole is refused."""
    options = {"skip_tokenizer_init": True, "max_model_len": 128}
    path = write_family(tmp_path / "v0", family)
    with Checkpoint(path) as found:
        layout, values = found.layout, {s.name: found.bits(s.name).reshape(-1).copy() for s in found.layout}
    model, config = inprocess.load(path, **options)
    placement, live = place_model.attach_model(model, config, layout, "cpu")
    assert all("conv1d" in name for name in placement.refusals)
    assert {layout[tensor].name.rpartition(".")[2] for tensor in placement.computed} == {"A_log"}
    for tensor in placement.computed:
        values[layout[tensor].name] = step([values[layout[tensor].name]], 0.5, seed=tensor)[0]
    computed_loader = ComputedLoader(model, placement, live=live, layout=layout, dtype=config.model_config.dtype)
    fed = computed_loader.compute({tensor: values[layout[tensor].name] for tensor in placement.computed})
    assert len(fed) == len(placement.computed)
    write_computed(fed, ValueSet.NEW)
    write_checkpoint(tmp_path / "fresh", layout, bits_of=values.__getitem__)
    copy_side_files(path, tmp_path / "fresh")
    fresh, _ = inprocess.load(tmp_path / "fresh", **options)
    assert inprocess.differing(inprocess.state(fresh), inprocess.state(model)) == []
