"""A model that vLLM loads in this process, taken from version to version, and compared with fresh loads of them."""

from __future__ import annotations

from pathlib import Path
from types import FunctionType
from typing import Any

import msgspec
import torch

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.directory import Checkpoint, write_checkpoint
from dcr_daemon.checkpoint.safetensors import write_safetensors
from dcr_daemon.vllm_plugin import calls
from dcr_daemon.vllm_plugin.calls import Op, TensorHandling
from dcr_demo.models import copy_side_files
from support.vllm import inprocess
from support.vllm.worker_rig import Driver, Lanes, Version, Worker, vector, write_version


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
        """What differs in a fresh load of the newest version, hidden tensors included."""
        out = self.home / "fresh"
        write_checkpoint(out, self.layout, bits_of=dict(zip(self._names(), self.states[-1], strict=True)).__getitem__)
        copy_side_files(self.path, out)
        return differing(self.model, inprocess.load(out, **self.options)[0])

    def _names(self) -> list[str]:
        return [spec.name for spec in self.layout]


def beside(model: torch.nn.Module) -> dict[str, torch.Tensor | float]:
    """Tensors and numbers that modules keep beside parameters and buffers: what was derived once would go stale."""
    found: dict[str, torch.Tensor | float] = {}
    known = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    seen: set[int] = set()

    def walk(value: Any, path: str) -> None:
        if isinstance(value, float):
            found[path] = value
        elif id(value) in seen or path.count(".") > 12:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.untyped_storage()._cdata not in known and not value.is_meta:
                found[path] = value.clone()
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{path}.{key}")
        elif isinstance(value, FunctionType):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                walk(cell.cell_contents, f"{path}.{name}")
        elif hasattr(value, "__dict__") and type(value).__module__.startswith(("vllm.model_executor", "torch.nn")):
            walk(vars(value), path)

    walk(model, "")
    return found


def differing(one: torch.nn.Module, other: torch.nn.Module) -> list[str]:
    """Names of parameters, buffers and hidden tensors whose bits differ in two models."""
    kept, wanted = beside(one), beside(other)
    assert kept.keys() == wanted.keys()
    stale = [name for name, value in kept.items() if not torch.equal(*map(torch.as_tensor, (value, wanted[name])))]
    return inprocess.differing(inprocess.state(one), inprocess.state(other)) + stale


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    assert differing(one, other) == []
