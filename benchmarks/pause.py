"""What the pause of a host costs: writing and summing changed elements block by block, against two passes over them.

    python benchmarks/pause.py [--elements 383000000] [--changed 0.01] [--rounds 7] [--json]

One generated bf16 tensor, `--changed` of its elements spread evenly. The first line is the kernel of the product
(`kernels.write_groups`), the second one writes all elements first and then reads all of them again to sum them, as the
product did before. Both give the same sums. Times are wall milliseconds, medians over the rounds, each round both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dcr_daemon.vllm_plugin.weights import kernels as k


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.ctypes.data)


def two_passes(group: np.ndarray[Any, Any], column: int, scratch: np.ndarray[Any, Any]) -> int:
    base, width, count = (int(group[0, name]) for name in (k.G_BASE, k.G_WIDTH, k.G_COUNT))
    targets, elements, values = (int(group[0, name]) for name in (k.G_TARGET, k.G_ELEMENT, column))
    k._scatter(base, width, targets, count, values)
    total = 0
    for first in range(0, count, k.BLOCK):
        n = min(k.BLOCK, count - first)
        k.gather(base, width, targets + 4 * first, n, address(scratch))
        total += int(k.sum_bits(address(scratch), width, 0, elements + 4 * first, n, np.uint64(0)))
    return total % (1 << 64)


def one_pass(group: np.ndarray[Any, Any], column: int, scratch: np.ndarray[Any, Any]) -> int:
    sums = np.zeros(1, dtype=np.uint64)
    k.write_groups(group, column, 1, sums, address(scratch))
    return int(sums[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=383_000_000)
    parser.add_argument("--changed", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    random = np.random.default_rng(0)
    live = random.integers(0, 1 << 16, args.elements, dtype=np.uint16)
    count = int(args.elements * args.changed)
    places = np.unique(random.integers(0, args.elements, count, dtype=np.uint32))
    old, new = live[places], random.integers(0, 1 << 16, places.size, dtype=np.uint16)
    group = np.zeros((1, k.GROUP_COLUMNS), dtype=np.int64)
    group[0] = address(live), address(places), address(places), address(old), address(new), places.size, 2, 0, 0
    scratch = np.zeros(k.BLOCK, dtype=np.uint64)
    ways: dict[str, Callable[..., int]] = {"one pass": one_pass, "two passes": two_passes}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.rounds + 1):  # the first one compiles
        column = k.G_OLD if number % 2 else k.G_NEW
        sums = set()
        for name, write in ways.items():
            began = time.perf_counter()
            sums.add(write(group, column, scratch))
            if number:
                times[name].append(1000 * (time.perf_counter() - began))
        assert len(sums) == 1, "both ways give the same sum"
    found = {name: statistics.median(taken) for name, taken in times.items()}
    if args.json:
        print(json.dumps({"changed": int(places.size), "milliseconds": found}))
        return
    print(f"{places.size} of {args.elements} elements changed")
    for name, taken in found.items():
        print(f"{name:12s} {taken:8.1f} ms   {taken / found['two passes']:.2f} of two passes")


if __name__ == "__main__":
    main()
