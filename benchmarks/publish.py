"""Publish a model of 1 GB from end to end on this machine, in ratios to copying its bytes in the same run.

    python benchmarks/publish.py [--gigabytes 1] [--steps 5] [--against CHECKOUT] [--json]

Three ways of one process: `Publisher` with a mapping of tensors, `Publisher` with a stream of pairs, and `dcr publish
--watch` with checkpoints on disk. About 1 % of the BF16 elements change from step to step. Time runs from the call (or
the start of the command) to the seal in a directory store; CPU time is that of the whole process. `--against` measures
another checkout of DCR as well, the two in turn, and prints the ratio of this tree to that one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TENSOR = (4096, 4096)  #: elements; 32 MiB of BF16
PER_FILE = 8
CHANGED = 0.01
WAYS = ("mapping", "stream", "watch")


def names(gigabytes: float) -> list[str]:
    return [f"layers.{n}.weight" for n in range(max(1, round(gigabytes * 1e9 / (2 * TENSOR[0] * TENSOR[1]))))]


def base_values(gigabytes: float) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    draw = (random.standard_normal(TENSOR, dtype=np.float32) * np.float32(0.04) for _ in names(gigabytes))
    return {
        name: (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        for name, values in zip(names(gigabytes), draw, strict=True)
    }


def train(values: dict[str, np.ndarray], step: int) -> None:
    """Change about 1 % of the elements in place, by one or two units in the last place."""
    random = np.random.default_rng(step)
    for bits in values.values():
        flat = bits.reshape(-1)
        at = random.integers(0, flat.size, int(flat.size * CHANGED))
        flat[at] += random.integers(1, 3, at.size).astype(np.uint16)


def save(directory: Path, values: dict[str, np.ndarray]) -> None:
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    held = list(values)
    groups = [held[n : n + PER_FILE] for n in range(0, len(held), PER_FILE)]
    table = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        save_file({name: torch.from_numpy(values[name]).view(torch.bfloat16) for name in group}, directory / file)
        table |= dict.fromkeys(group, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))


def used() -> float:
    """CPU seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def timed(work: Callable[[], Any]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), used()
    work()
    return {"seconds": time.perf_counter() - wall, "cpu": used() - cpu}


def library(way: str, home: Path, gigabytes: float, steps: int) -> list[dict[str, float]]:
    import torch

    from dcr_daemon import Publisher

    values, times = base_values(gigabytes), []
    with Publisher(
        f"file://{home}/bucket", base=home / "base", create=True, state=home / "state", upload_base=False
    ) as target:
        for step in range(1, steps + 1):
            train(values, step)
            tensors = {name: torch.from_numpy(bits).view(torch.bfloat16) for name, bits in values.items()}
            given: Any = tensors if way == "mapping" else iter(tensors.items())
            times.append(timed(lambda given=given, step=step: target.publish(given, step=step).wait_sealed(600)))
    return times


def watch(home: Path, gigabytes: float, steps: int) -> list[dict[str, float]]:
    """One command for each checkpoint, from its start to its end: what starting costs is part of the time."""
    command = [
        sys.executable, "-m", "dcr_daemon", "publish", "--to", f"file://{home}/bucket", "--create",
        "--base", f"{home}/base", "--state", f"{home}/state", "--no-upload-base",
        "--watch", f"{home}/checkpoints", "--once",
    ]  # fmt: skip

    def run() -> dict[str, float]:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"seconds": time.perf_counter() - start, "cpu": cpu}

    values, times = base_values(gigabytes), []
    for step in range(1, steps + 1):
        train(values, step)
        save(home / "checkpoints" / f"step-{step}", values)
        times.append(run())
    return times


def copying(gigabytes: float) -> float:
    """Seconds to copy as many bytes as the model has, on one thread; the median of five."""
    source = np.ones(int(gigabytes * 1e9), dtype=np.uint8)
    target = np.empty_like(source)
    target[:] = source
    return statistics.median(timed(lambda: np.copyto(target, source))["seconds"] for _ in range(5))


def child(way: str, gigabytes: float, steps: int) -> None:
    with tempfile.TemporaryDirectory() as root:
        home = Path(root)
        save(home / "base", base_values(gigabytes))
        times = watch(home, gigabytes, steps) if way == "watch" else library(way, home, gigabytes, steps)
    rest = times[1:] or times  # the first one compiles, and warms the caches
    print(json.dumps({key: statistics.median(one[key] for one in rest) for key in ("seconds", "cpu")}))


def measure(way: str, chosen: argparse.Namespace, tree: Path) -> dict[str, float]:
    environment = os.environ | {"PYTHONPATH": str(tree)}
    arguments = ["--way", way, "--gigabytes", str(chosen.gigabytes), "--steps", str(chosen.steps)]
    ended = subprocess.run(
        [sys.executable, __file__, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise SystemExit(ended.stderr)
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="publish a model from end to end, in ratios to copying it")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="with --against: turns of the two checkouts")
    parser.add_argument("--against", type=Path, help="another checkout, measured in turn")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.way:
        child(chosen.way, chosen.gigabytes, chosen.steps)
        return
    here = Path(__file__).resolve().parents[1]
    copy, result = copying(chosen.gigabytes), dict[str, Any]()
    for way in WAYS:
        rounds = chosen.rounds if chosen.against else 1
        pairs = [
            (measure(way, chosen, here), measure(way, chosen, chosen.against) if chosen.against else None)
            for _ in range(rounds)
        ]
        ours = {key: statistics.median(mine[key] for mine, _ in pairs) for key in ("seconds", "cpu")}
        result[way] = {"seconds_per_copy": ours["seconds"] / copy, "cpu_per_copy": ours["cpu"] / copy, **ours}
        if chosen.against:
            for key in ("seconds", "cpu"):
                theirs = statistics.median(other[key] for _, other in pairs if other)
                result[way][f"{key}_against"] = ours[key] / theirs
    if chosen.json:
        print(
            json.dumps({"machine": platform.platform(), "cores": os.cpu_count(), "copy_seconds": copy, "ways": result})
        )
        return
    print(f"{os.cpu_count()} cores, {platform.machine()}; copying {chosen.gigabytes:g} GB takes {copy:.2f} s")
    for way, row in result.items():
        line = f"{way:8} {row['seconds']:6.2f} s, {row['seconds_per_copy']:5.1f} x copy"
        line += f"; CPU {row['cpu']:6.2f} s, {row['cpu_per_copy']:5.1f} x"
        if chosen.against:
            line += f"   against the other checkout: time {row['seconds_against']:.3f}, CPU {row['cpu_against']:.3f}"
        print(line)


if __name__ == "__main__":
    main()
