"""A training process as a benchmark needs it: changes a share of its weights and publishes them when it is told to.

    python benchmarks/rig/trainer.py STREAM BASE STATE --endpoint-url URL

Reads one share of the elements per line on stdin; for each it prints a JSON line: when `publish` was called, when it
returned and when the version was sealed (seconds on the machine's monotonic clock), its bytes, and the memory before
and at the peak. The elements are spread evenly, and each moves by one unit in its last place.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

sys.path[:0] = [str(Path(__file__).parents[2])]

from benchmarks.rig.machine import forget_peak, memory_mb, peak_mb  # noqa: E402
from dcr_daemon import Publisher  # noqa: E402
from dcr_daemon.events import Event, Sealed  # noqa: E402

BLOCK = 4 << 20  #: elements changed at a time


def change(weights: dict[str, torch.Tensor], share: float, random: np.random.Generator) -> None:
    for tensor in weights.values():
        bits = tensor.view(torch.int16).numpy().reshape(-1)
        for first in range(0, bits.size, BLOCK):
            block = bits[first : first + BLOCK]
            at = np.flatnonzero(random.random(block.size, dtype=np.float32) < share)
            block[at] += random.choice(np.array([-1, 1], np.int16), at.size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stream")
    parser.add_argument("base", type=Path)
    parser.add_argument("state", type=Path)
    parser.add_argument("--endpoint-url")
    given = parser.parse_args()
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(given.base.glob("*.safetensors")):
        weights |= {name: tensor.clone() for name, tensor in load_file(file).items()}
    sealed: list[tuple[float, Sealed]] = []

    def emit(event: Event) -> None:
        if isinstance(event, Sealed):
            sealed.append((time.monotonic(), event))

    random, pid = np.random.default_rng(1), os.getpid()
    options: dict[str, Any] = {"create": True, "upload_base": False, "anchor_share": None, "emit": emit}
    options |= {"endpoint_url": given.endpoint_url, "state": given.state, "base": given.base}
    with Publisher(given.stream, **options) as publisher:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            change(weights, float(line), random)
            forget_peak(pid)
            before, called = memory_mb(pid), time.monotonic()
            update = publisher.publish(weights)
            returned = time.monotonic()
            update.wait_sealed(600)
            at, event = sealed[-1]
            times = {"called": called, "returned": returned, "sealed": at}
            sizes = {"version": event.version, "bytes": event.bytes, "changed": event.changed}
            memory = {"before_mb": before, "peak_mb": peak_mb(pid)}
            print(json.dumps(times | sizes | memory | {"elements": event.elements}), flush=True)


if __name__ == "__main__":
    main()
