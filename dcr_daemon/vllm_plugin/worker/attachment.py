"""What an attach produces on a worker: a layout, where it lies in live memory, and the jobs that work on it.

Runs in the worker process. `session` calls `attach` on the main thread, and starts the methods of `Attachment` as jobs
or calls them at `join`. Everything that a job needs is compiled and reserved at attach: compiling on the background
thread would hold the interpreter, and so generation, for seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.canonical.region import box
from dcr_daemon.codec.warm import compile_kernels
from dcr_daemon.errors import Corrupt, EngineRefused
from dcr_daemon.vllm_plugin.calls import FingerprintRank, HopFiles, Start, TensorHandling
from dcr_daemon.vllm_plugin.loader import audit, place_model
from dcr_daemon.vllm_plugin.loader.computed import ComputedLoader, Values, read_values, write_computed
from dcr_daemon.vllm_plugin.loader.reachable import Named
from dcr_daemon.vllm_plugin.weights import faults
from dcr_daemon.vllm_plugin.weights.arena import Arena, DeviceArena
from dcr_daemon.vllm_plugin.weights.dense import DenseFiles
from dcr_daemon.vllm_plugin.weights.memory import HostMemory, LiveTensors, ValueSet, WeightMemory, holders_of
from dcr_daemon.vllm_plugin.weights.placement import Placement
from dcr_daemon.vllm_plugin.worker.jobs import Job
from dcr_daemon.vllm_plugin.worker.prepare import Preparation
from dcr_daemon.vllm_plugin.worker.transaction import Transaction
from dcr_daemon.vllm_plugin.worker.unnamed import UnnamedParameters
from dcr_daemon.wording import shorten


@dataclass(frozen=True, slots=True)
class Attachment:
    """`memory` is None exactly if the model was refused. `external_writes`: the worker's count when it was made."""

    layout: Layout
    placement: Placement
    memory: WeightMemory | None
    external_writes: int
    computed_loader: ComputedLoader | None = None
    device_arena: DeviceArena | None = None
    unnamed: UnnamedParameters | None = None

    @property
    def live(self) -> WeightMemory:
        if self.memory is None:
            raise RuntimeError("this model was refused at attach")
        return self.memory

    def prepare(self, job: Job, hops: Sequence[HopFiles], *, arena: Arena) -> Transaction:
        """Decode against live weights; reads only (must E4)."""
        faults.point("job")
        preparation = Preparation(
            layout=self.layout, placement=self.placement, memory=self.live, arena=arena, advance=job.report_progress
        )
        txn = preparation.run(job.id, hops)
        last = hops[txn.fits - 1] if hops else None
        if last is not None and last.loaded:
            txn.values = self.read_computed([last.loaded], last.after)
        elif txn.computed:
            names = shorten(self.layout[tensor].name for tensor in sorted(txn.computed))
            raise EngineRefused(f"the change comes without the bytes of {names}, which the loader computes with")
        return txn

    def read_computed(self, paths: Sequence[str], vector: str) -> Values:
        """The canonical bytes of the loader-computed tensors; Corrupt unless they sum to the version of `vector`."""
        tensors = sorted(self.placement.computed)
        return read_values(paths, self.layout, tensors=tensors, vector=vector) if tensors else {}

    def run_loader(self, txn: Transaction) -> None:
        """Run the loader over a transaction's values, on copies of the parameters. Main thread, beside no forward
        pass."""
        if txn.values is not None and self.computed_loader is not None:
            txn.computed_parameters, txn.values = self.computed_loader.compute(txn.values), None

    def differing(self, values: Values) -> list[str]:
        """Parameters that do not hold what the loader computes from these values."""
        return (
            [parameter.name for parameter in self.computed_loader.compute(values)]
            if self.computed_loader is not None
            else []
        )

    def write_computed(self, values: Values) -> None:
        """Write what the loader computes from these values, at once: for a load, which goes forward only."""
        if self.computed_loader is not None:
            write_computed(self.computed_loader.compute(values), ValueSet.NEW)

    def replay(self) -> None:
        """Make what vLLM derived from weights again, after any write. Main thread, beside no forward pass."""
        if self.placement.replay is not None:
            self.placement.replay.run()

    def stale(self, tensors: range) -> list[int]:
        """Those of `tensors` of which a derived tensor is not what vLLM's hook makes. Main thread."""
        if self.placement.replay is None:
            return []
        filled = {number: self._parameters(number) for number in tensors}
        differing = self.placement.replay.differing(set().union(*filled.values()))
        wrong = {name for found in differing for name in found.sources}
        return [number for number, parameters in filled.items() if parameters & wrong]

    def _parameters(self, tensor: int) -> set[str]:
        """The parameters that a canonical tensor fills."""
        rows = [self.placement.rows[number] for number in self.placement.by_tensor.get(tensor, [])]
        return {row.parameter for row in rows} | set(self.placement.computed.get(tensor, ()))

    def fingerprint(self, job: Job) -> FingerprintRank:
        """Sum all boxes of this rank; reads only."""
        faults.point("job")
        return FingerprintRank(id=job.id, sums=self.live.box_sums(job.check_cancelled).tobytes())

    def scrub(self, job: Job, arg: Start) -> FingerprintRank:
        """Sum the boxes of some tensors at a limited rate, and a share of what the stream does not name; reads only."""
        faults.point("job")
        after_slice, tensors = job.rate_limited(arg.rate), range(*arg.tensors)
        sums = self.live.box_sums(after_slice, tensors)
        changed = []
        if self.unnamed is not None:
            changed = self.unnamed.changed(after_slice, self.unnamed.share(tensors, len(self.layout)))
        return FingerprintRank(id=job.id, sums=sums.tobytes(), changed=changed)

    def check_load(self, arg: Start) -> None:
        """Check that a load's files are complete and fit this engine, before anything is paused for them.

        Raises:
            Corrupt: a file is damaged, or a tensor is missing.
            EngineRefused: tensors that share their memory here differ in the files.
        """
        with DenseFiles(arg.files, self.layout) as files:
            require_all(files, sorted({*self.placement.by_tensor, *self.placement.computed}))
            for one, other in self.placement.aliases:
                rows = [self.placement.rows[number] for number in (one, other)]
                mine, theirs = (files.bits(row.tensor) for row in rows)
                part = box(rows[0].region)
                if not np.array_equal(part.view(mine), part.view(theirs)):
                    names = " and ".join(self.layout[row.tensor].name for row in rows)
                    raise EngineRefused(
                        f"{names} share their memory in this engine, and in these files they differ",
                        hint="train them tied, or serve a checkpoint whose config does not tie them",
                    )

    def load(self, job: Job, arg: Start) -> Values:
        """Overwrite all tensors of this rank from an anchor's files; nothing is written unless the files hold all of
        them.

        Loader-computed tensors are only read here, from the anchor or from a file of their own; `write_computed` writes
        them.
        """
        values = self.read_computed([arg.loaded] if arg.loaded else arg.files, arg.vector)
        if not arg.files:
            return values
        with DenseFiles(arg.files, self.layout) as files:
            tensors = sorted(self.placement.by_tensor)
            require_all(files, tensors)
            for done, tensor in enumerate(tensors):
                self.live.overwrite(tensor, files.bits(tensor), job.check_cancelled)
                job.report_progress((done + 1) / len(tensors))
        return values

    def describe(self) -> list[dict[str, Any]]:
        """Where each canonical tensor lies, for diagnosis."""
        return [
            {
                "tensor": self.layout[row.tensor].name,
                "parameter": row.parameter,
                "start": row.region.dst,
                "shape": list(row.region.shape),
                "strides": list(row.region.dst_strides),
                "live": row.base,
                "repacked": row.repack is not None,
            }
            for row in self.placement.rows
        ]


def require_all(files: DenseFiles, tensors: Sequence[int]) -> None:
    """Raises `Corrupt` unless the files hold all of these tensors."""
    missing = files.missing(tensors)
    if missing:
        raise Corrupt(f"the anchor lacks {shorten(missing)}")


def attach(
    model: torch.nn.Module,
    config: Any,
    layout: Layout,
    *,
    platform: str,
    device_arena: DeviceArena | None,
    external_writes: int,
    before: Attachment | None,
) -> Attachment:
    """Record where a layout lies, or use the recording of an earlier attachment (`before`) again.

    `device_arena`: on the device that holds the model, None if that is the host.

    After a reload the loader no longer shows where it puts elements. But the first recording stays true as long as no
    storage moved, and the fingerprint proves it again. What is derived from weights is looked for and proved each time.
    """
    if (
        before is not None
        and before.memory is not None
        and before.layout == layout
        and before.memory.moved_parameter() is None
        and before.device_arena is device_arena
    ):
        if before.placement.replay is not None:
            audit.audit(before.placement, model, config, layout=layout)
        _refuse_changed(before.placement, before.unnamed)
        memory = None if before.placement.refusals else before.memory
        return replace(before, memory=memory, external_writes=external_writes)
    placement, live = place_model.attach_model(model, config, layout, platform)
    if placement.refusals:
        return Attachment(layout, placement, None, external_writes)
    try:
        memory = open_memory(placement, LiveTensors(live, holders_of(model)), layout=layout, arena=device_arena)
    except ValueError as error:
        refused = Placement(held=[TensorHandling.REFUSED] * len(layout), refusals={"": str(error)})
        return Attachment(layout, refused, None, external_writes)
    compile_kernels(spec.width for spec in layout)
    unnamed = _watch_unnamed(model, placement, live, device_arena)
    _refuse_changed(placement, unnamed)
    if placement.refusals:
        return Attachment(layout, placement, None, external_writes)
    dtype = config.model_config.dtype if config is not None else None
    return Attachment(
        layout,
        placement,
        memory,
        external_writes,
        ComputedLoader(model, placement, live=live, layout=layout, dtype=dtype),
        device_arena,
        unnamed,
    )


def _watch_unnamed(
    model: torch.nn.Module, placement: Placement, live: Named, arena: DeviceArena | None
) -> UnnamedParameters | None:
    if not placement.unnamed:
        return None
    named = {name: live[name] for name in placement.unnamed}

    def opened(whole: Placement, layout: Layout) -> WeightMemory:
        return open_memory(whole, LiveTensors(named, holders_of(model)), layout=layout, arena=arena)

    return UnnamedParameters(model, named, opened)


def _refuse_changed(placement: Placement, unnamed: UnnamedParameters | None) -> None:
    """The first attach sums what the stream does not name; a later one refuses if it has changed since."""
    if unnamed is not None and (changed := unnamed.changed()):
        placement.refusals[""] = (
            f"{shorten(changed)} changed since the first attach, and the stream does not have them to repair them; "
            "start vLLM again"
        )


def open_memory(placement: Placement, homes: LiveTensors, *, layout: Layout, arena: DeviceArena | None) -> WeightMemory:
    """The `WeightMemory` of the host, or of the arena's device; compiles its kernels."""
    if arena is None:
        return HostMemory(placement, homes, layout=layout)
    from dcr_daemon.vllm_plugin.weights.torch_memory import TorchMemory

    return TorchMemory(placement, homes, layout=layout, arena=arena)
