"""What a streaming client sees at a swap: the gap between two tokens, beside the pause that the engine reports.

    python benchmarks/swap_gaps.py [--model dense|smollm2] [--swaps 20] [--clients 4] [--prompt 128]
                                   [--rate 0.01] [--between 1.0] [--json]

A real vLLM server on CPU for each value of `DCR_CACHES`. As many clients stream from it at once, while a share of the
elements changes with each version. A gap belongs to a swap if it overlaps the call. Prints p50 and p99, in
milliseconds, of the pause, of the gaps at swaps, and of all others, with the load of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("tests", "demo")]

if TYPE_CHECKING:
    from support.vllm.server import Rig

TOKENS = 256  #: of one answer
POLICIES = ("reset", "keep")


class Streams:
    """Clients that stream without a break. `arrivals`: for each answer, when its tokens came, in seconds."""

    def __init__(self, url: str, *, clients: int, prompt: int) -> None:
        self._url, self._clients, self._prompt = url, clients, prompt
        self.arrivals: list[list[float]] = []

    async def run(self) -> None:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
            for number in range(self._clients):
                group.create_task(self._client(session, number))

    async def _client(self, session: Any, number: int) -> None:
        for answer in itertools.count():
            # The tokenizer of the tiny model makes a token of each byte.
            words = f"{number} {answer} " + "a " * self._prompt
            body = {
                "model": "m", "prompt": words[: self._prompt], "max_tokens": TOKENS, "min_tokens": TOKENS,
                "ignore_eos": True, "stream": True,
            }  # fmt: skip
            times: list[float] = []
            self.arrivals.append(times)
            async with session.post(f"{self._url}/v1/completions", json=body) as reply:
                reply.raise_for_status()
                async for line in reply.content:
                    if line.startswith(b"data: {"):
                        times.append(time.monotonic())  # noqa: PERF401  the answer may be cut off

    def gaps(self, spans: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
        """The gaps between tokens that overlap one of the spans, and all others, in seconds."""
        at, others = list[float](), list[float]()
        for times in self.arrivals:
            for before, after in itertools.pairwise(times):
                overlaps = any(before < end and begin < after for begin, end in spans)
                (at if overlaps else others).append(after - before)
        return at, others


async def measure(made: Rig, given: argparse.Namespace) -> dict[str, Any]:
    engine = await made.own()
    streams = Streams(made.server.url, clients=given.clients, prompt=given.prompt)
    running = asyncio.create_task(streams.run())
    pauses, spans = [], []
    for _ in range(given.swaps):
        version = made.versions.step(given.rate)
        await engine.prepare(made.versions.transaction(version))
        await asyncio.sleep(given.between)
        begin = time.monotonic()
        swapped = await engine.swap(f"to-{version}")
        spans.append((begin, time.monotonic()))
        pauses.append(swapped.pause)
        await asyncio.sleep(given.between)
        made.versions.values[version - 1] = {}  # it is not needed any more
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    at, others = streams.gaps(spans)
    return {"pause": pauses, "gap at a swap": at, "gap between swaps": others}


def percentiles(seconds: list[float]) -> dict[str, float]:
    return {name: round(float(np.percentile(seconds, q)) * 1e3, 2) for name, q in (("p50", 50), ("p99", 99))} | {
        "samples": len(seconds)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=["dense", "smollm2"], default="dense")
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt (characters, at most)")
    parser.add_argument("--rate", type=float, default=0.01, help="share of the elements that a version changes")
    parser.add_argument("--between", type=float, default=1.0, help="seconds before and after each swap")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed: nothing is measured")
        return
    from support.vllm.server import rig

    from dcr_demo.models import write_smollm2, write_tiny

    report: dict[str, Any] = {"load": os.getloadavg()[0], "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory(prefix="dcr-") as name:
        work = Path(name)
        model = write_smollm2(work / "model") if given.model == "smollm2" else write_tiny(work / "model")
        for policy in POLICIES:
            with rig(model, work / policy, policy, env={"DCR_CACHES": policy}) as made:
                measured = asyncio.run(measure(made, given))
            report[policy] = {what: percentiles(seconds) for what, seconds in measured.items()}
    report["load at the end"] = os.getloadavg()[0]
    if given.json:
        print(json.dumps(report))
        return
    print(f"load {report['load']:.1f} to {report['load at the end']:.1f} on {report['cores']} cores; milliseconds")
    for policy in POLICIES:
        for what, row in report[policy].items():
            print(f"{policy:6} {what:18} p50 {row['p50']:8.2f}  p99 {row['p99']:8.2f}  ({row['samples']} samples)")


if __name__ == "__main__":
    main()
