"""Compares the device memory with the host's, bit for bit. `tools/validate_gpu.py` runs it on a GPU.

As a program, with `TRITON_INTERPRET=1` and triton on the path, it runs Triton's kernels on a CPU and prints one JSON
line: the class of the kernels, and for each case what differs ("" if nothing does). It is a program of its own
because vLLM would take an importable triton for a GPU's.
"""

from __future__ import annotations

import json
import mmap

import numpy as np
import torch

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.canonical.region import Region
from dcr_daemon.vllm_plugin.weights.arena import DeviceArena
from dcr_daemon.vllm_plugin.weights.memory import Group, HostMemory, LiveTensors, Reading, ValueSet
from dcr_daemon.vllm_plugin.weights.placement import Copy, Placement, Repack
from dcr_daemon.vllm_plugin.weights.torch_memory import TorchMemory, storage_bits

DTYPES = {"U8": torch.uint8, "BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}
STRIDED = {
    "whole": Region("t", (40, 31), 0, (31, 1), 0, (31, 1)),
    "columns of a shard": Region("t", (40, 9), 4, (16, 1), 11, (31, 1)),
    "transposed, four axes": Region("t", (3, 4, 5, 6), 7, (2, 6, 24, 130), 3, (130, 31, 6, 1)),
    "above 2^31 elements": Region("t", (3, 700), 5, ((1 << 30) + 9, 1), 2, (700, 1)),
}


CPU = torch.device("cpu")


class Live:
    """One parameter "p" on a device, with `values` at the places of its rows; sparse on the host."""

    def __init__(self, dtype: str, region: Region, repack: Repack | None, *, device: torch.device) -> None:
        self.layout = Layout([TensorSpec("t", dtype, (region.dst_last + 5,))])
        self.bits = np.dtype(f"<u{self.layout[0].width}")
        self.placement = Placement(held=[])
        self.placement.add(Copy("p", region), tensor=0, offset=0, repack=repack)
        self.places = np.concatenate([row.targets() for row in self.placement.rows])
        size = max(row.end for row in self.placement.rows)
        if device.type == "cpu":
            storage = np.frombuffer(mmap.mmap(-1, size * self.bits.itemsize), dtype=np.uint8)
            self.tensor = torch.from_numpy(storage).view(DTYPES[dtype])
        else:
            self.tensor = torch.zeros(size, dtype=DTYPES[dtype], device=device)
        self.live_tensors = LiveTensors({"p": self.tensor}, {"p": ({"p": self.tensor}, "p")})
        self._flat = storage_bits(self.tensor)
        self._where = torch.from_numpy(self.places).to(device)

    def put(self, values: np.ndarray) -> None:
        signed = values.view(f"<i{self.bits.itemsize}")
        self._flat[self._where] = torch.from_numpy(signed.copy()).to(self._flat.device)

    def held(self) -> np.ndarray:
        return self._flat[self._where].cpu().numpy().view(self.bits)


def differences(dtype: str, region: Region, repack: Repack | None, *, device: torch.device) -> str:
    """What the two memories do differently: gather, write, sums, the way back, the sums of whole boxes."""
    rng = np.random.default_rng(0)
    at_host, at_device = (Live(dtype, region, repack, device=where) for where in (CPU, device))
    values = rng.integers(0, 256, at_host.places.size * at_host.bits.itemsize, dtype=np.uint8).view(at_host.bits)
    for live in (at_host, at_device):
        live.put(values)
    host = HostMemory(at_host.placement, at_host.live_tensors, layout=at_host.layout)
    arena = DeviceArena(1 << 20, device)
    other = TorchMemory(at_device.placement, at_device.live_tensors, layout=at_device.layout, arena=arena)
    groups: list[Group] = []
    for number, row in enumerate(at_host.placement.rows):
        elements = np.arange(row.region.dst, row.region.dst_last + 1)
        picked, element, target = host.locate(number, elements)
        chosen = np.sort(rng.choice(picked.size, max(1, picked.size * 2 // 3), replace=False))
        element, target = element[chosen].copy(), target[chosen].copy()
        read = [np.empty(chosen.size, dtype=at_host.bits) for _ in range(2)]
        for memory, out in zip((host, other), read, strict=True):
            memory.gather([Reading(number, element, target, out)])
        if not np.array_equal(*read):
            return f"gathered bits of row {number}"
        new = rng.integers(0, 256, read[0].nbytes, dtype=np.uint8).view(at_host.bits)
        groups.append(Group(number, 0, element, target, read[0], new))
    for memory in (host, other):
        memory.set_groups(groups)
    for side in (ValueSet.NEW, ValueSet.NEW, ValueSet.OLD, ValueSet.NEW):
        sums = [memory.write(side) for memory in (host, other)]
        if not np.array_equal(*sums):
            return f"sums after {side.name}"
        if not np.array_equal(at_host.held(), at_device.held()):
            return f"bits after {side.name}"
    if not np.array_equal(*(memory.box_sums(lambda size: None) for memory in (host, other))):
        return "sums of boxes"
    other.write(ValueSet.OLD)
    return "" if np.array_equal(at_device.held(), values) else "bits after the way back"


def all_differences(device: torch.device) -> dict[str, str]:
    """Every case by its name, with what differs in it."""
    found = {}
    for dtype in DTYPES:
        for name, region in STRIDED.items():
            if not (name.startswith("above") and dtype == "I64"):  # 17 GB, even if sparse
                found[f"{dtype}, {name}"] = differences(dtype, region, None, device=device)
        permutation = np.random.default_rng(1).permutation(44)[:40].astype(np.uint32)
        block = Region("t", (31, 40), 0, (40, 1), 0, (40, 1))
        found[f"{dtype}, repacked"] = differences(dtype, block, Repack(40, 44, permutation), device=device)
    return found


def main() -> None:
    live = Live("U8", STRIDED["whole"], None, device=CPU)
    memory = TorchMemory(live.placement, live.live_tensors, layout=live.layout, arena=DeviceArena(1 << 12, CPU))
    print(json.dumps({"kernels": type(memory._device_kernels).__name__, "differ": all_differences(CPU)}))


if __name__ == "__main__":
    main()
