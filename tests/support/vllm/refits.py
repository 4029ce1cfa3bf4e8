"""A model that vLLM loaded in this process, refitted version after version, and compared with fresh loads."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import msgspec
import numpy as np
import torch

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.directory import Checkpoint, write_checkpoint
from dcr_daemon.checkpoint.safetensors import write_safetensors
from dcr_daemon.vllm_plugin import calls
from dcr_daemon.vllm_plugin.calls import Op, TensorHandling
from dcr_daemon.vllm_plugin.core.verify_sums import join_placement
from dcr_demo.models import copy_side_files
from support.vllm import inprocess
from support.vllm.worker_rig import Driver, Lanes, Version, Worker, join_boxes, vector, write_version

CAP = 1 << 26  #: bytes reserved for a transaction

#: Objects of these packages are looked into for what a model keeps beside its parameters and buffers.
HOLDERS = ("vllm.model_executor", "vllm.models", "vllm.v1.attention", "torch.nn", "flashinfer")


class Refitted:
    """The model of a checkpoint directory under a worker, and the versions that it was brought to.

    `states[0]` is the checkpoint. After `attach`: `computed`, the numbers of the tensors that vLLM's loader computes
    with.
    """

    def __init__(self, path: Path, home: Path, **options: Any) -> None:
        self.path, self.home, self.options = path, home, options
        with Checkpoint(path) as found:
            self.layout: Layout = found.layout
            self.states: list[Lanes] = [[found.bits(spec.name).reshape(-1).copy() for spec in found.layout]]
        self.model, config = inprocess.load(path, **options)
        self.driver = Driver(Worker(self.model, config))

    def attach(self) -> None:
        self.attached = self.driver.attach(self.layout, self.home, cap=CAP)
        held = self.attached.held
        self.computed = [tensor for tensor, how in enumerate(held) if how is TensorHandling.LOADER_COMPUTED]

    @classmethod
    def served(cls, path: Path, home: Path, **options: Any) -> Refitted:
        """Attached, with nothing refused."""
        model = cls(path, home, **options)
        model.attach()
        assert model.attached.refusals == {}
        return model

    @property
    def computed_names(self) -> set[str]:
        return {self.layout[tensor].name for tensor in self.computed}

    def wrong_sums(self) -> list[str]:
        """Placed tensors whose live sum is not that of the newest version."""
        sums, wanted = self.driver.fingerprint(self.layout, self.attached), vector(self.layout, self.states[-1])
        placed = (tensor for tensor, how in enumerate(self.attached.held) if how is TensorHandling.PLACED)
        return [self.layout[tensor].name for tensor in placed if sums[tensor] != wanted[tensor]]

    def beside(self, version: int) -> dict[str, str]:
        """The computed tensors and the vector of a version, as files."""
        path, sums = self.home / f"loaded-{version}.safetensors", self.home / f"vector-{version}.bin"
        if not path.exists():
            write_safetensors(path, [(self.layout[t], self.states[version][t]) for t in self.computed])
            sums.write_bytes(vector(self.layout, self.states[version]).astype("<u8").tobytes())
        return {"loaded": str(path), "vector": str(sums)}

    def refit(self, lanes: Lanes, *, back: bool = True) -> None:
        """To a next version; with `back` once to it and back before."""
        self.states.append(lanes)
        version, files = len(self.states) - 1, self.beside(len(self.states) - 1)
        made = write_version(self.home / "chunks", self.layout, self.states[-2], lanes, version=version)
        hop = msgspec.structs.replace(made.hop, loaded=files["loaded"], after=files["vector"])
        first = inprocess.state(self.model)
        for txn in (f"back-{version}", f"on-{version}")[not back :]:
            prepared = self.driver.prepare(txn, [Version(hop, made.segments)])
            assert not inprocess.differing(first, inprocess.state(self.model)), "prepare writes nothing"
            assert self.driver.swap(txn) == prepared.after
            if txn.startswith("back"):
                assert self.driver.ok(Op.ROLLBACK, calls.Sums, txn=txn) == prepared.before
                self.driver.ok(Op.CLOSE, txn=txn)
                assert not inprocess.differing(first, inprocess.state(self.model)), "a rollback restores every bit"
        self.driver.ok(Op.COMMIT, txn=txn)

    def differing(self, version: int) -> list[str]:
        """What a comparison of the computed tensors with the bytes of a version finds."""
        job = f"compare-{version}"
        self.driver.ok(Op.START, id=job, kind="compare", **self.beside(version))
        self.driver.finish(job)
        return self.driver.ok(Op.JOIN, calls.ComparedRank, id=job).differ

    def against_a_fresh_load(self) -> list[str]:
        """Parameters, buffers and what is beside them, in which a fresh load of the newest version differs."""
        out = self.home / f"fresh-{len(self.states) - 1}"
        bits = {spec.name: lanes for spec, lanes in zip(self.layout, self.states[-1], strict=True)}
        write_checkpoint(out, self.layout, bits_of=bits.__getitem__)
        copy_side_files(self.path, out)
        return different(self.model, inprocess.load(out, **self.options)[0])


class RefittedRanks:
    """Two tensor-parallel ranks with the model of a checkpoint directory, one after the other in this process."""

    def __init__(self, path: Path, home: Path, **options: Any) -> None:
        self.ranks: list[Refitted] = []
        for rank in range(2):
            (home / f"rank-{rank}").mkdir()
            with inprocess.as_rank(rank, 2):
                self.ranks.append(Refitted.served(path, home / f"rank-{rank}", tensor_parallel_size=2, **options))
        self.layout = self.ranks[0].layout
        self.placement = join_placement(self.layout, [rank.attached for rank in self.ranks])

    def wrong_sums(self) -> list[str]:
        """Placed tensors whose live sum over both ranks is not that of the newest version."""
        boxes = [box for rank in self.ranks for box in rank.attached.boxes]
        sums = join_boxes(len(self.layout), boxes, np.concatenate([rank.driver.box_sums() for rank in self.ranks]))
        wrong = (sums != vector(self.layout, self.ranks[0].states[-1])) & self.placement.exact
        return [self.layout[tensor].name for tensor in np.flatnonzero(wrong)]

    def refit(self, lanes: Lanes) -> None:
        """Both ranks to a next version, there and back and there again."""
        for number, rank in enumerate(self.ranks):
            with inprocess.as_rank(number, 2):
                rank.refit(lanes)

    def against_a_fresh_load(self) -> list[str]:
        """What differs on a rank from what a fresh load leaves there."""
        wrong = []
        for number, rank in enumerate(self.ranks):
            with inprocess.as_rank(number, 2):
                wrong += [f"{name} of rank {number}" for name in rank.against_a_fresh_load()]
        return wrong


def different(one: torch.nn.Module, two: torch.nn.Module) -> list[str]:
    """Names of parameters and buffers, and paths of hidden tensors and numbers, in which two models differ."""
    wrong = inprocess.differing(inprocess.state(one), inprocess.state(two))
    kept, wanted = hidden(one), hidden(two)
    wrong += sorted(kept.keys() ^ wanted.keys())
    for path in kept.keys() & wanted.keys():
        if inprocess.differing({path: torch.as_tensor(kept[path])}, {path: torch.as_tensor(wanted[path])}):
            wrong.append(path)
    return wrong


def hidden(model: torch.nn.Module) -> dict[str, torch.Tensor | float]:
    """Tensors and numbers that a model keeps beside parameters and buffers: what was derived once would go stale."""
    found: dict[str, torch.Tensor | float] = {}
    known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    seen: set[int] = set()
    todo: deque[tuple[str, Any]] = deque([("", model)])
    while todo:
        path, value = todo.popleft()
        if isinstance(value, float):
            found[path] = value
        elif id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                if value.untyped_storage()._cdata not in known and not value.is_meta:
                    found[path] = value
            else:
                todo.extend((f"{path}.{name}", inner) for name, inner in _inside(value))
    return found


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value holds. A walk of its own beside the product's `loader.reachable`, on purpose: what that misses, the
    comparison must not miss as well."""
    if isinstance(value, dict):
        yield from ((str(key), inner) for key, inner in value.items())
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from ((str(number), inner) for number, inner in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, MethodType):
        yield "self", value.__self__
    elif isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # it is not assigned yet
                yield name, cell.cell_contents
    elif type(value).__module__.startswith(HOLDERS) or isinstance(value, torch.nn.Module):
        yield from getattr(value, "__dict__", {}).items()
