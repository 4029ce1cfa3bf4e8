"""Checks on a GPU what the tests can only check on a CPU: bits, streams, graphs, memory, speed, and real vLLM servers.

    python tools/validate_gpu.py [--device cuda|cpu] [--report report.json] [--skip-servers] [--quick]

Run it from a checkout, in an environment with dcr-daemon, the packages of `requirements/dev.txt` and vLLM for this GPU.
It takes about ten minutes, half of them for the servers (`gpu_servers.py`). Every check prints a line; the report is a
JSON list of checks with `state` passed, failed or skipped, a reason, and figures. The exit status is 1 if one failed.

With `--device cpu` everything that needs a GPU is skipped with that reason, and the rest runs on small sizes: of the
servers the dense one, with vLLM for CPUs. A backend that vLLM does not offer on this GPU is skipped with vLLM's reason.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from gpu_servers import ServerCheck

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "demo")]

from support.vllm import device_cases as cases  # noqa: E402  # the path is set above

from dcr_daemon.canonical.layout import Layout, TensorSpec  # noqa: E402
from dcr_daemon.canonical.region import Region  # noqa: E402
from dcr_daemon.vllm_plugin.weights.arena import DeviceArena  # noqa: E402
from dcr_daemon.vllm_plugin.weights.memory import Group, LiveTensors, ValueSet  # noqa: E402
from dcr_daemon.vllm_plugin.weights.placement import Copy, Placement  # noqa: E402
from dcr_daemon.vllm_plugin.weights.torch_memory import TorchMemory, storage_bits  # noqa: E402

NEEDS_GPU = "needs a GPU"


@dataclass
class Check:
    """What one check found."""

    name: str
    state: str = "passed"
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


class Skipped(Exception):
    """The check cannot run here; the text says why."""


class Model:
    """`tensors` BF16 matrices of `rows` times `columns` on the device, all zero, and the product's memory over them."""

    def __init__(self, device: torch.device, *, tensors: int, rows: int, columns: int, cap: int | None = None) -> None:
        self.device, self.size = device, rows * columns
        specs = [TensorSpec(f"t{number:04d}", "BF16", (rows, columns)) for number in range(tensors)]
        layout = Layout(specs)
        placement = Placement(held=[])
        self.live: dict[str, torch.Tensor] = {}
        for spec in specs:
            self.live[spec.name] = torch.zeros(rows, columns, dtype=torch.bfloat16, device=device)
            region = Region(spec.name, (self.size,), 0, (1,), 0, (1,))
            placement.add(Copy(spec.name, region), tensor=layout.index(spec.name), offset=0, repack=None)
        live_tensors = LiveTensors(self.live, {name: ({name: tensor}, name) for name, tensor in self.live.items()})
        self.arena = DeviceArena(cap or max(1 << 20, layout.nbytes // 10), device)
        self.memory = TorchMemory(placement, live_tensors, layout=layout, arena=self.arena)
        self.bytes = layout.nbytes

    def change(self, seed: int, share: float = 0.01) -> list[Group]:
        """About `share` of all elements get other bits; the old ones are 0."""
        random = np.random.default_rng(seed)
        groups = []
        for number in range(len(self.live)):
            at = np.unique(random.integers(0, self.size, max(1, int(self.size * share)))).astype(np.uint32)
            new = random.integers(1, 0x4000, at.size).astype("<u2")
            groups.append(Group(number, 0, at, at, np.zeros(at.size, dtype="<u2"), new))
        return groups


class Validation:
    """All checks on one device. Each returns its figures, and raises `AssertionError` or `Skipped`."""

    def __init__(self, device: torch.device, *, quick: bool) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        size = (4, 256, 128) if not self.cuda else (16, 1024, 1024) if quick else (400, 8192, 4096)
        tensors, rows, columns = size
        self.sizes = {"tensors": tensors, "rows": rows, "columns": columns}

    def clock(self, work: Callable[[], Any]) -> tuple[Any, float]:
        self.wait()
        began = time.perf_counter()
        found = work()
        self.wait()
        return found, time.perf_counter() - began

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def require_gpu(self) -> None:
        if not self.cuda:
            raise Skipped(NEEDS_GPU)

    def server(self, check: ServerCheck) -> dict[str, Any]:
        from gpu_servers import NotOffered

        if not check.on_cpu:
            self.require_gpu()
        try:
            return check.run(self.device.type)
        except NotOffered as reason:
            raise Skipped(str(reason)) from reason

    def kernels(self) -> dict[str, Any]:
        """Which kernels are used; on a GPU they must be Triton's."""
        used = type(Model(self.device, tensors=1, rows=8, columns=8).memory._device_kernels).__name__
        assert used == "TritonKernels" or not self.cuda, f"the pause would run on {used}"
        return {"kernels": used}

    def bits(self) -> dict[str, Any]:
        """Every width, strided and repacked rows, storages above 2^31 elements: equal to the host, there and back."""
        found = cases.all_differences(self.device)
        wrong = {name: what for name, what in found.items() if what}
        assert not wrong, str(wrong)
        return {"cases": len(found)}

    def large(self) -> dict[str, Any]:
        """In a storage above 2^31 elements writes arrive at its end, and nothing else changes."""
        self.require_gpu()
        model = Model(self.device, tensors=1, rows=(1 << 20) + 1, columns=1 << 11, cap=1 << 20)
        at = np.array([0, 5, (1 << 31) - 1, 1 << 31, model.size - 1], dtype=np.uint32)
        model.memory.set_groups([Group(0, 0, at, at, np.zeros(5, "<u2"), np.arange(1, 6).astype("<u2"))])
        model.memory.write(ValueSet.NEW)
        live = storage_bits(model.live["t0000"])
        assert live[torch.from_numpy(at.astype(np.int64)).to(self.device)].tolist() == [1, 2, 3, 4, 5]
        assert int((live != 0).sum()) == 5, "other elements changed"
        return {"elements": model.size}

    def speed(self) -> dict[str, Any]:
        """Milliseconds and GB/s of the pause, of staging and of the fingerprint."""
        model = Model(self.device, **self.sizes)
        groups = model.change(1)
        count = sum(group.element.size for group in groups)
        _, stage = self.clock(lambda: model.memory.set_groups(groups))
        model.memory.write(ValueSet.NEW)
        _, write = self.clock(lambda: model.memory.write(ValueSet.NEW))
        _, whole = self.clock(lambda: model.memory.box_sums(lambda size: None))
        return {
            "changed": count,
            "stage seconds": round(stage, 3),
            "pause ms": round(1000 * write, 3),
            "pause GB/s": round(count * 12 / write / 1e9, 2),
            "fingerprint GB/s": round(model.bytes / whole / 1e9, 2),
        }

    def second_transaction(self) -> dict[str, Any]:
        """A transaction takes nothing beside the arena, the second one no more than the first."""
        model = Model(self.device, **self.sizes)
        first = model.change(1)
        model.memory.set_groups(first)
        used = model.arena._used
        count = sum(group.element.size for group in first)
        assert used <= 8.5 * count + (1 << 16), f"{used / count:.1f} bytes per change"
        figures = {"bytes per change": round(used / count, 2)}
        if self.cuda:
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            model.memory.write(ValueSet.NEW)
            model.memory.set_groups(model.change(2))
            model.memory.write(ValueSet.NEW)
            grown = torch.cuda.max_memory_allocated(self.device) - before
            assert grown == 0, f"{grown} bytes were allocated"
        return figures

    def little_memory(self) -> dict[str, Any]:
        """The pause and the way back work with almost nothing free."""
        self.require_gpu()
        model = Model(self.device, **self.sizes)
        model.memory.set_groups(model.change(3))
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self.device)[0]
        held = [torch.empty(max(0, free - (64 << 20)), dtype=torch.uint8, device=self.device)]
        try:
            model.memory.write(ValueSet.NEW)
            model.memory.write(ValueSet.OLD)
            left = torch.cuda.mem_get_info(self.device)[0]
        finally:
            held.clear()
            torch.cuda.empty_cache()
        assert all(not tensor.any() for tensor in model.live.values()), "the way back left other values"
        return {"free MiB": left >> 20}

    def graphs(self) -> dict[str, Any]:
        """A captured graph computes with the new weights after a write."""
        self.require_gpu()
        model, graph, inputs = self._captured()
        before = graph[1].clone()
        model.memory.set_groups(model.change(4))
        model.memory.write(ValueSet.NEW)
        graph[0].replay()
        self.wait()
        assert torch.equal(graph[1], inputs @ model.live["t0000"].t()), "the graph computes with something else"
        assert not torch.equal(graph[1], before), "nothing changed"
        return {}

    def streams(self) -> dict[str, Any]:
        """A fingerprint beside a busy stream gives the same sums; how much longer the stream's steps take."""
        self.require_gpu()
        model, graph, _ = self._captured()
        wanted, found = model.memory.box_sums(lambda size: None), []
        job = threading.Thread(target=lambda: found.append(model.memory.box_sums(lambda size: None)))

        def step() -> float:
            began = time.perf_counter()
            for _ in range(40):
                graph[0].replay()
            torch.cuda.current_stream().synchronize()
            return 1000 * (time.perf_counter() - began)

        alone = [step() for _ in range(60)]
        job.start()
        beside = [step() for _ in range(60)]
        job.join()
        assert (found[0] == wanted).all(), "the sums differ"
        return {"step ms": round(float(np.median(alone)), 3), "step ms beside": round(float(np.median(beside)), 3)}

    def _captured(self) -> tuple[Model, tuple[Any, torch.Tensor], torch.Tensor]:
        """A model, a captured product of its first tensor with its result, and the inputs."""
        model = Model(self.device, **self.sizes)
        weight = model.live["t0000"]
        inputs = torch.randn(64, weight.shape[1], device=self.device, dtype=torch.bfloat16)
        aside = torch.cuda.Stream(self.device)
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            _ = inputs @ weight.t()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = inputs @ weight.t()
        graph.replay()
        self.wait()
        return model, (graph, result), inputs


def run(name: str, check: Callable[[], dict[str, Any]]) -> Check:
    """Run one check and print its line."""
    found = Check(name)
    try:
        found.figures = check()
    except Skipped as reason:
        found.state, found.reason = "skipped", str(reason)
    except Exception as error:  # noqa: BLE001  # the other checks run all the same
        found.state, found.reason = "failed", f"{type(error).__name__}: {error}"
    print(f"{found.state:8s}{name:40s}{found.reason} {json.dumps(found.figures)}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--report", type=Path, default=Path("validate_gpu.json"))
    parser.add_argument("--skip-servers", action="store_true")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU: use --device cpu for what runs without one")
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    all_of = Validation(device, quick=args.quick)
    names = ("kernels", "bits", "large", "speed", "second_transaction", "little_memory", "graphs", "streams")
    checks = [run(name.replace("_", " "), getattr(all_of, name)) for name in names]
    if not args.skip_servers:
        import gpu_servers

        checks += [run(server.name, functools.partial(all_of.server, server)) for server in gpu_servers.checks()]
    gpu = torch.cuda.get_device_name(device) if all_of.cuda else ""
    report = {"device": gpu or "cpu", "torch": torch.__version__, "checks": [asdict(check) for check in checks]}
    args.report.write_text(json.dumps(report, indent=1))
    return int(any(check.state == "failed" for check in checks))


if __name__ == "__main__":
    sys.exit(main())
