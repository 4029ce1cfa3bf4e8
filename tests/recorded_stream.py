"""Write small streams from fixed input with fixed nonces, and compare their objects with a recording.

    python tests/recorded_stream.py             compare with tests/recorded_stream.json; exit 1 on a difference
    python tests/recorded_stream.py --record    write the recording anew (only with a deliberate change of format)

Each case publishes through the public API into a directory store. Clock, nonces and the number of worker threads are
fixed, so that every object in the bucket has the same name and the same bytes on every run and every machine. A
restructuring must not change one of them: records, layouts, chunks, sums, parts, declarations and anchors are all
compared by SHA-256. Chunks are zstd frames: the recording names the versions of zstandard and of its library.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
import zstandard
from torch import nn

from dcr_daemon import Publisher, runtime
from dcr_daemon.cli.app import run as run_command

RECORDING = Path(__file__).with_suffix(".json")
RANKS = 2
STEPS = 4
SIZES = {"embed": (512, 64), "up": (256, 64), "down": (64, 256), "norm": (64,)}


class FixedRuntime(runtime.SystemRuntime):
    """The system's runtime with counted nonces and a clock that stands still."""

    def __init__(self, process: int) -> None:
        super().__init__()
        self._process, self._count = process, 0

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC)

    def nonce(self, size: int) -> str:
        self._count += 1
        return f"{self._process:x}{self._count:0{2 * size - 1}x}"

    def jitter(self) -> float:
        return 0.5


class Model(nn.Module):
    """The four parameters of `SIZES`."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SIZES.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False))


def weights(step: int) -> dict[str, torch.Tensor]:
    """The weights of a step: about 2 % of the elements differ from those of the step before."""
    random, values = np.random.default_rng(0), {}
    for name, shape in SIZES.items():
        bits = random.integers(0x3C00, 0x4000, shape, dtype=np.uint16)
        for number in range(1, step + 1):
            change = np.random.default_rng([number, len(name)])
            at = change.random(shape) < 0.02
            bits = np.where(at, bits + change.integers(1, 4, shape, dtype=np.uint16), bits)
        values[name] = torch.from_numpy(bits.astype(np.uint16)).view(torch.bfloat16).clone()
    return values


def save(directory: Path, step: int) -> None:
    """A Hugging Face checkpoint of two files. Each appears whole, by a rename, and its configuration first."""
    from safetensors.torch import save_file

    values, names = weights(step), list(SIZES)
    parts = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    table = {name: file for file, group in parts.items() for name in group}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text('{"model_type": "recorded"}')
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    for file, group in parts.items():
        save_file({name: values[name] for name in group}, directory / file)


def publish(home: Path, given: Callable[[int], object], *, codec: str = "auto", state: str = "state") -> None:
    """Publish the steps one after another; every second version gets an anchor."""
    with Publisher(
        f"file://{home}/bucket", base=home / "base", create=True, name="recorded", state=home / state, codec=codec,
        anchor_every=2, emit=lambda event: None,
    ) as target:  # fmt: skip
        for step in range(1, STEPS + 1):
            target.publish(given(step), step=step, metadata={"loss": step / 8}).wait_sealed(120)


def as_module(step: int) -> nn.Module:
    model = Model()
    for name, value in weights(step).items():
        getattr(model, name).copy_(value)
    return model


def watched(home: Path) -> None:
    """Checkpoints below a directory, published by the command, one start for each."""
    for step in range(1, STEPS + 1):
        save(home / "checkpoints" / f"step-{step}", step)
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = run_command([
                "publish", "--to", f"file://{home}/bucket", "--create", "--base", f"{home}/base",
                "--name", "recorded", "--state", f"{home}/state", "--watch", f"{home}/checkpoints", "--once",
            ])  # fmt: skip
        if code:
            raise SystemExit(f"dcr publish ended with {code}:\n{out.getvalue()}")


def ranks(home: Path) -> None:
    """Two processes under torch.distributed, sharded by FSDP2; one tensor is cut along its second axis."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(RANKS):
        names = {"RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in names.items()}
        children.append(subprocess.Popen([sys.executable, __file__, "--rank", str(home)], env=environment))
    if codes := [code for child in children if (code := child.wait(600))]:
        raise SystemExit(f"ranks ended with {codes}")


def one_rank(home: Path) -> None:
    from torch import distributed
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    rank = int(os.environ["RANK"])
    fix(rank + 1)
    distributed.init_process_group("gloo")

    def sharded(step: int) -> nn.Module:
        return fully_shard(as_module(step), shard_placement_fn=lambda p: Shard(1) if p.shape == SIZES["down"] else None)

    publish(home, sharded, state=f"state-{rank}")
    distributed.destroy_process_group()


CASES: dict[str, Callable[[Path], None]] = {
    "mapping": lambda home: publish(home, weights),
    "stream": lambda home: publish(home, lambda step: iter(weights(step).items())),
    "module": lambda home: publish(home, as_module),
    "xor": lambda home: publish(home, weights, codec="xor"),
    "overwrite": lambda home: publish(home, weights, codec="overwrite"),
    "masters": lambda home: publish(home, lambda step: {k: v.float() for k, v in weights(step).items()}),
    "watched": watched,
    "ranks": ranks,
}


def fix(process: int) -> None:
    """Fix what a run draws from its machine: nonces, the clock, the number of threads."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    runtime.install(FixedRuntime(process))


def objects(bucket: Path) -> dict[str, str]:
    """Key → SHA-256 of each object of a directory store.

    A seal of a watched checkpoint names inodes and times of the machine's files. They are blanked, and in that bucket
    so are the digests in records: `digest`, of the record itself, and `prev`, of the one before.
    """
    found, blanked = {}, False
    for path in sorted(path for path in bucket.rglob("*") if path.is_file()):
        body, machine = re.subn(rb'"(mtime_ns|inode|earlier_ns)":\d+', rb'"\1":0', path.read_bytes())
        blanked = blanked or bool(machine)
        if blanked:
            body = re.sub(rb'"(prev|digest)":"\w+"', rb'"\1":""', body)
        found[str(path.relative_to(bucket))] = hashlib.sha256(body).hexdigest()
    return found


def written(name: str) -> dict[str, str]:
    """Run one case in this process, and return the objects that it wrote."""
    with tempfile.TemporaryDirectory() as root:
        home = Path(root)
        fix(0)
        save(home / "base", 0)
        CASES[name](home)
        return objects(home / "bucket")


def libraries() -> str:
    return f"zstandard {zstandard.__version__}, zstd {'.'.join(map(str, zstandard.ZSTD_VERSION))}"


def differences(recorded: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> list[str]:
    """One line for each object that is missing, new or different."""
    lines = []
    for case in sorted(recorded.keys() | now.keys()):
        old, new = recorded.get(case, {}), now.get(case, {})
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                what = "differs" if key in old and key in new else "is missing" if key in old else "is new"
                lines.append(f"{case}: {key} {what}")
    return lines


def run() -> int:
    parser = argparse.ArgumentParser(description="compare streams of fixed input with a recording")
    parser.add_argument("--record", action="store_true", help="write the recording anew")
    parser.add_argument("--only", choices=CASES, help="one case")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank:
        one_rank(chosen.rank)
        return 0
    now = {}
    for name in [chosen.only] if chosen.only else CASES:
        now[name] = written(name)
        print(f"{name}: {len(now[name])} objects", flush=True)
    if chosen.record:
        RECORDING.write_text(json.dumps({"libraries": libraries(), "streams": now}, indent=1, sort_keys=True) + "\n")
        return 0
    recording = json.loads(RECORDING.read_text())
    if recording["libraries"] != libraries():
        print(f"recorded with {recording['libraries']}, this is {libraries()}: chunks may differ for that alone")
    recorded = {name: recording["streams"][name] for name in now}
    lines = differences(recorded, now)
    print("\n".join(lines) or "every object is as recorded, byte for byte")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(run())
