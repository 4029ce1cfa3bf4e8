"""A refit over a slow link: `publish()` until it is sealed, staged and committed, against the bytes on the wire.

    python benchmarks/refit.py [--model-gb 1.08] [--mbit 200 1000] [--rtt 0.05] [--changed 0.01 0.03]
                               [--subscribers 1 4] [--versions 3] [--engine dir|vllm] [--no-dense] [--home DIR] [--json]

A trainer publishes a generated model; subscribers follow it with all options at their defaults. Every process reaches
one real SeaweedFS through a link of its own (`rig/link.py`). Times are seconds after the call of `publish()`; staged
and committed are those of the last subscriber. The bound is the version's bytes at the link's rate and two round trips.
`wire` is committed without the engine's own prepare and pause, over the bound. The dense way moves the same model over
the same links in the same run: boto3, in parts, up and then down. Memory: the most that a process had at once, of the
publisher above the live weights. Medians over the versions but the first, which is left out; --json has all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "demo"), str(ROOT)]

from benchmarks.rig.machine import describe, forget_peak, machine, peak_mb  # noqa: E402
from dcr_daemon.tracing.refits import find_refits  # noqa: E402
from dcr_daemon.tracing.timeline import read_traces  # noqa: E402
from dcr_demo.models import write_tiny  # noqa: E402
from dcr_demo.processes import Process, SeaweedFS, free_ports, seaweedfs, vllm_server  # noqa: E402
from dcr_demo.record import EventTail  # noqa: E402

HIDDEN = 2048  #: of the model; smaller ones are narrower
PATIENCE = 900.0  #: seconds for one version
REST = 5.0  #: seconds between two versions


class Replica:
    """One subscriber behind its own link, with what it emits."""

    def __init__(self, process: Process, home: Path) -> None:
        self.process, self.trace = process, home / "trace.json"
        self.events = EventTail(home / "events.jsonl")

    def at(self, kind: str, version: int) -> dict[str, Any]:
        """Wait for this event."""
        self.process.wait_ready(self.events.has(kind, version=version), timeout=PATIENCE)
        found = self.events.first(kind, version=version)
        assert found is not None
        return found


class Bench:
    """The processes of one setting: a trainer and its replicas, behind links."""

    def __init__(self, home: Path, base: Path, bucket: SeaweedFS, *, mbit: float, rtt: float) -> None:
        self._home, self._base, self._bucket = home, base, bucket
        self._mbit, self._rtt = mbit, rtt
        self._stack = contextlib.ExitStack()
        self._stream = f"s3://{bucket.bucket}/{home.name}"
        self.replicas: list[Replica] = []
        self._trainer: subprocess.Popen[str]

    def link(self, name: str) -> str:
        """The URL of the store behind a new link."""
        (port,) = free_ports(1)
        target = self._bucket.endpoint.rsplit(":", 1)[1]
        script = str(ROOT / "benchmarks" / "rig" / "link.py")
        argv = [sys.executable, "-P", script, str(port), target, "--mbit", str(self._mbit), "--rtt", str(self._rtt)]
        self._stack.enter_context(Process(f"link-{name}", argv, self._home / f"link-{name}.log"))
        return f"http://127.0.0.1:{port}"

    @property
    def environ(self) -> dict[str, str]:
        given = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "DCR_"))}
        keys = {key: value for key, value in self._bucket.env.items() if key != "AWS_ENDPOINT_URL_S3"}
        return given | keys | {"AWS_CONFIG_FILE": os.devnull, "DCR_TRACE": str(self._home / "publisher.json")}

    def start(self, subscribers: int, engine: str) -> None:
        script = str(ROOT / "benchmarks" / "rig" / "trainer.py")
        argv = [sys.executable, "-P", script, self._stream, str(self._base), str(self._home / "state")]
        argv += ["--endpoint-url", self.link("trainer")]
        log = self._stack.enter_context((self._home / "trainer.log").open("ab"))
        self._trainer = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=self.environ, text=True
        )
        self._stack.callback(self._end_trainer)
        self._heard()
        for number in range(subscribers):
            self.replicas.append(self._replica(number, engine))
        for replica in self.replicas:
            replica.at("Serving", 0)
            time.sleep(1)  # until it has nothing left to do

    def _replica(self, number: int, engine: str) -> Replica:
        home = self._home / f"r{number}"
        home.mkdir()
        if engine == "vllm":
            server = vllm_server(self._base, home)
            self._stack.enter_context(server.process)
            server.process.wait_ready(server.socket_open)
            url = server.engine
        else:
            shutil.copytree(self._base, home / "current")
            url = f"dir://{home}/current"
        argv = [
            *(sys.executable, "-P", "-m", "dcr_daemon", "subscribe", "--from", self._stream, "--engine", url),
            *("--endpoint-url", self.link(f"r{number}"), "--replica", f"r{number}", "--state", str(home / "state")),
            *("--events", str(home / "events.jsonl"), "--trace", str(home / "trace.json")),
        ]
        process = Process(f"r{number}", argv, home / "log", self.environ)
        return Replica(self._stack.enter_context(process), home)

    def _heard(self) -> dict[str, Any]:
        assert self._trainer.stdout is not None
        line = self._trainer.stdout.readline()
        if not line:
            raise SystemExit(f"the trainer ended:\n{(self._home / 'trainer.log').read_text()[-3000:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _end_trainer(self) -> None:
        self._trainer.terminate()
        self._trainer.wait()

    def publish(self, changed: float, bound_of: Any) -> dict[str, Any]:
        """One version, until it is committed everywhere."""
        for replica in self.replicas:
            forget_peak(replica.process.pid)
        assert self._trainer.stdin is not None
        self._trainer.stdin.write(f"{changed}\n")
        self._trainer.stdin.flush()
        told = self._heard()
        version, called = told["version"], told["called"]
        committed = [replica.at("Committed", version) for replica in self.replicas]
        last = max(range(len(committed)), key=lambda n: committed[n]["monotonic"])
        prepared = self.replicas[last].at("Prepared", version)
        row: dict[str, Any] = {key: told[key] for key in ("version", "bytes", "changed", "elements")}
        row |= {name: told[name] - called for name in ("returned", "sealed")}
        row["staged"] = max(replica.at("Staged", version)["monotonic"] for replica in self.replicas) - called
        row["committed"] = committed[last]["monotonic"] - called
        row["prepare"] = prepared["prepare_seconds"]
        row["pause"] = committed[last]["pause_seconds"]
        row["engine"] = committed[last]["monotonic"] - prepared["monotonic"] + prepared["prepare_seconds"]
        row["publisher_before_mb"], row["publisher_peak_mb"] = told["before_mb"], told["peak_mb"]
        row["subscriber_peak_mb"] = max(peak_mb(replica.process.pid) for replica in self.replicas)
        return row | {"bound": bound_of(told["bytes"])}

    def phases(self) -> dict[int, dict[str, Any]]:
        """By version: seconds of each phase, and alone, from the traces."""
        files = [self._home / "publisher.json", *(replica.trace for replica in self.replicas)]
        return {
            refit.version: {name: {"seconds": p.seconds, "alone": p.alone} for name, p in refit.phases.items()}
            | {"waiting": {"seconds": refit.waiting, "alone": refit.waiting}}
            for refit in find_refits(read_traces(files))
        }

    def close(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def bench(home: Path, base: Path, bucket: SeaweedFS, *, mbit: float, rtt: float) -> Iterator[Bench]:
    home.mkdir()
    made = Bench(home, base, bucket, mbit=mbit, rtt=rtt)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(home, ignore_errors=True)


def measure(made: Bench, subscribers: int, given: argparse.Namespace, mbit: float) -> list[dict[str, Any]]:
    """One row for each share of changed elements."""
    made.start(subscribers, given.engine)
    bound = lambda size: size / (mbit * 125_000) + 2 * given.rtt  # noqa: E731
    rows = []
    for changed in given.changed:
        versions = []
        for _ in range(given.versions + 1):
            versions.append(made.publish(changed, bound))
            time.sleep(given.rest)
        rows.append({"mbit": mbit, "rtt": given.rtt, "subscribers": subscribers, "changed": changed,
                     "engine_kind": given.engine, "versions": versions})  # fmt: skip
    phases = made.phases()
    for row in rows:
        for one in row["versions"]:
            one["phases"] = phases.get(one["version"], {})
        row["median"] = median(row["versions"][1:])
    return rows


def median(versions: list[dict[str, Any]]) -> dict[str, float]:
    found = {
        name: statistics.median(one[name] for one in versions)
        for name in versions[0]
        if name not in ("phases", "version")
    }
    for name in ("sealed", "staged", "committed"):
        found[f"{name}_ratio"] = statistics.median(one[name] / one["bound"] for one in versions)
    found["wire_ratio"] = statistics.median((one["committed"] - one["engine"]) / one["bound"] for one in versions)
    return found


def dense(made: Bench, base: Path, home: Path, bucket: SeaweedFS, mbit: float) -> dict[str, Any]:
    """The whole model, up by one link and down by another."""
    script, found = str(ROOT / "benchmarks" / "rig" / "dense.py"), {}
    for way, directory in (("up", base), ("down", home / "down")):
        directory.mkdir(exist_ok=True)
        argv = [sys.executable, "-P", script, way, made.link(way), bucket.bucket, str(directory)]
        done = subprocess.run(argv, env=made.environ, capture_output=True, text=True, check=True)
        found[way] = json.loads(done.stdout)
    shutil.rmtree(home / "down")
    return {"mbit": mbit, "seconds": sum(one["seconds"] for one in found.values()), **found}


def write_model(path: Path, gigabytes: float) -> Path:
    """A Qwen3 of about so many 10**9 bytes in BF16: 9 · hidden² elements per layer."""
    hidden = HIDDEN if gigabytes > 0.3 else 512
    return write_tiny(path, hidden=hidden, layers=max(1, round(gigabytes * 1e9 / 2 / (9 * hidden**2))))


def run(given: argparse.Namespace, home: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"machine": machine(), "model_gb": given.model_gb, "rows": [], "dense": []}
    base = write_model(home / "base", given.model_gb)
    with seaweedfs(home / "weed") as bucket:
        for mbit in given.mbit:
            for subscribers in given.subscribers:
                with bench(home / f"run-{mbit:g}-{subscribers}", base, bucket, mbit=mbit, rtt=given.rtt) as made:
                    rows = measure(made, subscribers, given, mbit)
                found["rows"] += rows
                if not given.json:
                    show(rows)
            if given.dense:
                with bench(home / f"dense-{mbit:g}", base, bucket, mbit=mbit, rtt=given.rtt) as made:
                    found["dense"].append(dense(made, base, home, bucket, mbit))
                if not given.json:
                    show_dense(found, mbit)
    found["load_after"] = machine()["load"]
    return found


HEAD = (
    f"{'Mbit/s':>7} {'subs':>4} {'changed':>8} {'MB':>7} {'bound':>6} {'returned':>8} {'sealed':>12} {'staged':>12} "
    f"{'committed':>13} {'engine':>7} {'wire':>5} {'publisher':>10} {'subscriber':>10}"
)


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        m = row["median"]
        times = " ".join(f"{m[name]:5.2f} {m[f'{name}_ratio']:4.1f} ×" for name in ("sealed", "staged", "committed"))
        above = m["publisher_peak_mb"] - m["publisher_before_mb"]
        print(
            f"{row['mbit']:7g} {row['subscribers']:4d} {row['changed']:8.2%} {m['bytes'] / 1e6:7.2f} {m['bound']:6.2f} "
            f"{m['returned']:8.2f} {times} {m['engine']:7.2f} {m['wire_ratio']:5.2f} {above:+7.0f} MB "
            f"{m['subscriber_peak_mb']:7.0f} MB",
            flush=True,
        )


def show_dense(found: dict[str, Any], mbit: float) -> None:
    way = found["dense"][-1]
    print(
        f"{mbit:7g} dense: {way['seconds']:.1f} s for {way['up']['bytes'] / 1e6:.0f} MB up and down; memory "
        f"{way['up']['peak_mb']:.0f} MB and {way['down']['peak_mb']:.0f} MB"
    )
    for row in found["rows"]:
        if row["mbit"] == mbit:
            times = way["seconds"] / row["median"]["committed"]
            print(f"{'':7} {row['subscribers']} subscribers, {row['changed']:.2%}: dense takes {times:.1f} × as long")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-gb", type=float, default=1.08, help="10**9 bytes")
    parser.add_argument("--mbit", type=float, nargs="+", default=[200.0, 1000.0])
    parser.add_argument("--rtt", type=float, default=0.05, help="seconds")
    parser.add_argument("--changed", type=float, nargs="+", default=[0.01, 0.03])
    parser.add_argument("--subscribers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--versions", type=int, default=3, help="of each setting, beside the first")
    parser.add_argument("--rest", type=float, default=REST, help="seconds between two versions")
    parser.add_argument("--engine", choices=["dir", "vllm"], default="dir")
    parser.add_argument("--dense", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--home", type=Path, help="directory for models, states and the bucket; default: a temporary one"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if not given.json:
        print(f"{describe(machine())}\n{HEAD}", flush=True)
    with tempfile.TemporaryDirectory(prefix="dcr-refit-", dir=given.home) as home:
        found = run(given, Path(home))
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
