"""Real vLLM servers, for `validate_gpu.py`: refits under load, compared with a fresh server.

Each check starts a server on a tiny model, on a GPU with compilation and CUDA graphs, refits it three times while it
answers requests, and compares the SHA-256 of every parameter and buffer with those of a fresh server on the last
version. On a CPU only the dense model is served, without compilation.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.vllm.model_families import write_served_family
from support.vllm.server import Rig, rig

from dcr_daemon.engine.messages import RankChecksums
from dcr_daemon.engine.port import Verdict
from dcr_daemon.wording import shorten
from dcr_demo.models import copy_side_files, write_tiny
from dcr_demo.processes import ProcessDied

REFITS = 3
CLIENTS = 4
EXPERT_BACKENDS = ("triton", "flashinfer_cutlass", "flashinfer_trtllm")
DEFAULTS_OF_THE_RIG = ("--enforce-eager",)  # not on a GPU: compile, and capture graphs
CONSUMPTION = ("--gpu-memory-utilization", "0.3")
#: What vLLM says of a backend that this device, or this environment, cannot run.
NOT_OFFERED = re.compile(r"\S[^\n]* (does not support the deployment|is not valid for this) configuration[^\n]*")


class NotOffered(Exception):
    """vLLM has no such kernels here; the text is vLLM's."""


@dataclass(frozen=True)
class ServerCheck:
    """One server to refit: `make` writes its model, `options` are vLLM's. `on_cpu`: whether a CPU can serve it."""

    name: str
    make: Callable[[Path], Path]
    options: tuple[str, ...] = ()
    on_cpu: bool = False

    def run(self, device: str) -> dict[str, Any]:
        """Returns figures; raises `AssertionError`, `NotOffered`, or `ProcessDied` with the end of the server's log."""
        with tempfile.TemporaryDirectory(prefix="dcr-") as scratch:
            work = Path(scratch)
            serve = functools.partial(_server, options=self.options, device=device)
            with serve(self.make(work / "model"), work / "s") as served:
                figures, live = asyncio.run(_refit_under_load(served))
                fresh = Path(served.versions.anchor(served.versions.newest)[0]).parent
                copy_side_files(served.server.model, fresh)
            with serve(fresh, work / "f") as other:
                wanted = asyncio.run(_checksums(other))
            wrong = _differing(live, wanted)
            assert not wrong, f"{shorten(wrong)} differ from a fresh server's"
            return figures | {"compared": sum(len(rank.parameters) + len(rank.buffers) for rank in wanted)}


def checks() -> Iterator[ServerCheck]:
    yield ServerCheck("server: dense, TP 1, compiled, graphs", _dense, on_cpu=True)
    for backend in EXPERT_BACKENDS:
        yield ServerCheck(f"server: mixture, {backend}", _mixture, ("--moe-backend", backend))
    yield ServerCheck("server: gpt-oss, FlashInfer attention", _gpt_oss, ("--attention-backend", "FLASHINFER"))


def _dense(out: Path) -> Path:
    return write_tiny(out, hidden=512, layers=4)


def _mixture(out: Path) -> Path:
    return write_tiny(out, kind="moe", hidden=512)


def _gpt_oss(out: Path) -> Path:
    """A tiny gpt-oss in BF16, with attention sinks."""
    return write_served_family(out, "gpt_oss", hidden_size=256, intermediate_size=256, head_dim=64)


@contextmanager
def _server(model: Path, work: Path, *, options: tuple[str, ...], device: str) -> Iterator[Rig]:
    """On a GPU with compilation and graphs; the rig's CPU settings mean nothing to vLLM for CUDA."""
    extra, without = ((*options, *CONSUMPTION), DEFAULTS_OF_THE_RIG) if device == "cuda" else (options, ())
    try:
        with rig(model, work, "gpu", extra=extra, without=without, env=_cache(work)) as made:
            yield made
    except ProcessDied as error:
        raise_if_not_offered((work / "gpu.log").read_text(errors="replace"))
        raise error


def raise_if_not_offered(log: str) -> None:
    """Raises `NotOffered` if a server's log says that vLLM refused the backend."""
    if said := NOT_OFFERED.search(log):
        raise NotOffered(said.group())


def _cache(work: Path) -> dict[str, str]:
    """Compiled code of one server only, unless the caller keeps one."""
    return {} if "VLLM_CACHE_ROOT" in os.environ else {"VLLM_CACHE_ROOT": str(work / "cache")}


async def _checksums(served: Rig) -> list[RankChecksums]:
    await served.own()
    return await served.engine.checksums()


def _differing(live: list[RankChecksums], wanted: list[RankChecksums]) -> list[str]:
    """Parameters and buffers by rank that have other digests, or are not on both sides."""
    assert len(live) == len(wanted)
    wrong = []
    for one, other in zip(live, wanted, strict=True):
        for kind in ("parameters", "buffers"):
            found, fresh = getattr(one, kind), getattr(other, kind)
            names = sorted(found.keys() | fresh.keys())
            wrong += [f"{name} of rank {one.rank}" for name in names if found.get(name) != fresh.get(name)]
    return wrong


async def _refit_under_load(served: Rig) -> tuple[dict[str, Any], list[RankChecksums]]:
    """Refit while requests are answered; the pauses, and the digests of what is live then."""
    await served.own()
    stop, pauses = threading.Event(), []

    def ask() -> int:
        answers = 0
        while not stop.is_set():
            served.server.complete("Once upon a time", max_tokens=64)
            answers += 1
        return answers

    with ThreadPoolExecutor(CLIENTS) as clients:
        load = [clients.submit(ask) for _ in range(CLIENTS)]
        try:
            for _ in range(REFITS):
                swapped = await served.refit(served.versions.step())
                assert swapped.verdict is Verdict.COMMITTED, swapped.reason
                pauses.append({name: round(1000 * taken, 2) for name, taken in swapped.phases.items()})
                await asyncio.sleep(1)
        finally:
            stop.set()
    answers = [client.result() for client in load]
    assert all(answers), "a client got no answer"
    return {"pauses in ms": pauses, "requests": sum(answers)}, await served.engine.checksums()
