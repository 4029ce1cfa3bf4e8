"""Compares the device memory with the host's, bit for bit: run with `TRITON_INTERPRET=1` and triton on the path.

Prints one JSON line: the class of the kernels, and for each case what differs ("" if nothing does). It is a program of
its own because vLLM would take an importable triton for a GPU's.
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
from dcr_daemon.vllm_plugin.weights.torch_memory import TorchMemory

DTYPES = {"U8": torch.uint8, "BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}
STRIDED = {
    "whole": Region("t", (40, 31), 0, (31, 1), 0, (31, 1)),
    "columns of a shard": Region("t", (40, 9), 4, (16, 1), 11, (31, 1)),
    "transposed, four axes": Region("t", (3, 4, 5, 6), 7, (2, 6, 24, 130), 3, (130, 31, 6, 1)),
    "above 2^31 elements": Region("t", (3, 700), 5, ((1 << 30) + 9, 1), 2, (700, 1)),
}


def memories(dtype: str, region: Region, repack: Repack | None, bits: np.ndarray) -> tuple[Layout, list]:
    """Both memories over their own copies of the live bits; sparse where they are large."""
    made = []
    for kind in ("host", "device"):
        layout = Layout([TensorSpec("t", dtype, (region.dst_last + 5,))])
        width = layout[0].width
        size = (region.src_last + 1) * width if repack is None else bits.size
        storage = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
        tensor = torch.from_numpy(storage).view(DTYPES[dtype])
        placement = Placement(held=[])
        placement.add(Copy("p", region), tensor=0, offset=0, repack=repack)
        for row in placement.rows:
            targets = row.targets()
            storage.view(f"<u{width}")[targets] = np.resize(bits.view(f"<u{width}"), targets.size)
        live = LiveTensors({"p": tensor}, {"p": ({"p": tensor}, "p")})
        memory = (
            HostMemory(placement, live, layout=layout)
            if kind == "host"
            else TorchMemory(placement, live, layout=layout, arena=DeviceArena(1 << 20, torch.device("cpu")))
        )
        made.append((memory, placement, storage.view(f"<u{width}")))
    return layout, made


def differences(dtype: str, region: Region, repack: Repack | None, seed: int = 0) -> str:
    """What the two memories do differently: gather, write, sums, the way back, the sums of whole boxes."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 256, 1 << 14, dtype=np.uint8)
    layout, ((host, placement, on_host), (device, _, on_device)) = memories(dtype, region, repack, bits)
    dtype_bits = f"<u{layout[0].width}"
    groups: list[Group] = []
    for number, row in enumerate(placement.rows):
        elements = np.arange(row.region.dst, row.region.dst_last + 1)
        picked, element, target = host.locate(number, elements)
        chosen = np.sort(rng.choice(picked.size, max(1, picked.size * 2 // 3), replace=False))
        element, target = element[chosen].copy(), target[chosen].copy()
        read = [np.empty(chosen.size, dtype=dtype_bits) for _ in range(2)]
        for memory, out in zip((host, device), read, strict=True):
            memory.gather([Reading(number, element, target, out)])
        if not np.array_equal(*read):
            return f"gathered bits of row {number}"
        new = rng.integers(0, 256, read[0].nbytes, dtype=np.uint8).view(dtype_bits)
        groups.append(Group(number, 0, element, target, read[0], new))
    places = np.concatenate([row.targets() for row in placement.rows])
    before = on_host[places].copy()
    for memory in (host, device):
        memory.set_groups(groups)
    for side in (ValueSet.NEW, ValueSet.NEW, ValueSet.OLD, ValueSet.NEW):
        sums = [memory.write(side) for memory in (host, device)]
        if not np.array_equal(*sums):
            return f"sums after {side.name}"
        if not np.array_equal(on_host[places], on_device[places]):
            return f"bits after {side.name}"
    if not np.array_equal(*(memory.box_sums(lambda size: None) for memory in (host, device))):
        return "sums of boxes"
    device.write(ValueSet.OLD)
    return "" if np.array_equal(on_device[places], before) else "bits after the way back"


def main() -> None:
    results = {}
    for dtype in DTYPES:
        for name, region in STRIDED.items():
            if not (name.startswith("above") and dtype == "I64"):  # 17 GB, even if sparse
                results[f"{dtype}, {name}"] = differences(dtype, region, None)
        permutation = np.random.default_rng(1).permutation(44)[:40].astype(np.uint32)
        block = Region("t", (31, 40), 0, (40, 1), 0, (40, 1))
        results[f"{dtype}, repacked"] = differences(dtype, block, Repack(40, 44, permutation))
    _, (_, (memory, _, _)) = memories("U8", STRIDED["whole"], None, np.zeros(8, dtype=np.uint8))
    print(json.dumps({"kernels": type(memory._device_kernels).__name__, "differ": results}))


if __name__ == "__main__":
    main()
