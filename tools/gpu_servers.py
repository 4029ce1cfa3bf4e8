"""Real vLLM servers on a GPU, for `validate_gpu.py`: refits under load, compared with a fresh server.

Each check starts a server on a tiny model with compilation and CUDA graphs, refits it three times while it answers
requests, and compares the SHA-256 of every parameter and buffer with those of a fresh server on the last version.
"""

from __future__ import annotations

import asyncio
import functools
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.vllm.server import Rig, rig

from dcr_daemon.engine.port import Verdict
from dcr_demo.models import VOCABULARY, write_tiny

REFITS = 3
EXPERT_BACKENDS = ("triton", "flashinfer_cutlass", "flashinfer_trtllm")
DEFAULTS_OF_THE_RIG = ("--enforce-eager",)  # not on a GPU: compile, and capture graphs
CONSUMPTION = ("--gpu-memory-utilization", "0.3")


def checks() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Name and check of every server."""
    yield "server: dense, TP 1, compiled, graphs", functools.partial(_refits, _dense, ())
    for backend in EXPERT_BACKENDS:
        extra = ("--moe-backend", backend)
        yield f"server: mixture, {backend}", functools.partial(_refits, _mixture, extra)
    extra = ("--attention-backend", "FLASHINFER")
    yield "server: gpt-oss, FlashInfer attention", functools.partial(_refits, _gpt_oss, extra)


def _dense(out: Path) -> Path:
    return write_tiny(out, hidden=512, layers=4)


def _mixture(out: Path) -> Path:
    return write_tiny(out, kind="moe", hidden=512)


def _gpt_oss(out: Path) -> Path:
    """A tiny gpt-oss in BF16, with attention sinks."""
    import torch
    from transformers import AutoModelForCausalLM, GptOssConfig

    tokenizer = write_tiny(out.with_name("tokenizer"), hidden=128)
    config = GptOssConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=1024,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(torch.bfloat16).save_pretrained(out)
    for path in tokenizer.glob("*token*"):
        (out / path.name).write_bytes(path.read_bytes())
    return out


def _refits(make: Callable[[Path], Path], extra: tuple[str, ...]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="dcr-") as scratch:
        work = Path(scratch)
        with _server(make(work / "model"), work / "s", extra) as served:
            figures, live = asyncio.run(_refit_under_load(served))
            fresh = Path(served.versions.anchor(served.versions.newest)[0]).parent
            for path in served.server.model.iterdir():
                if path.suffix != ".safetensors" and "index" not in path.name:
                    (fresh / path.name).write_bytes(path.read_bytes())
        with _server(fresh, work / "f", extra) as other:
            wanted = asyncio.run(_checksums(other))
        assert live == wanted, "parameters differ from a fresh server's"
        return figures


@contextmanager
def _server(model: Path, work: Path, extra: tuple[str, ...]) -> Iterator[Rig]:
    """A server with compilation and graphs. The rig's CPU settings mean nothing to vLLM for CUDA."""
    with rig(model, work, "gpu", extra=(*extra, *CONSUMPTION), without=DEFAULTS_OF_THE_RIG, env=_cache(work)) as made:
        yield made


def _cache(work: Path) -> dict[str, str]:
    """Compiled code of one server only, unless the caller keeps one."""
    return {} if "VLLM_CACHE_ROOT" in os.environ else {"VLLM_CACHE_ROOT": str(work / "cache")}


async def _checksums(served: Rig) -> list[Any]:
    await served.own()
    return await served.engine.checksums()


async def _refit_under_load(served: Rig) -> tuple[dict[str, Any], list[Any]]:
    """Refit while requests are answered; the pauses, and the digests of what is live then."""
    await served.own()
    stop, answers = threading.Event(), []

    def ask() -> None:
        while not stop.is_set():
            answers.append(served.server.complete("Once upon a time", max_tokens=64))

    load = [threading.Thread(target=ask) for _ in range(4)]
    for thread in load:
        thread.start()
    pauses = []
    try:
        for _ in range(REFITS):
            swapped = await served.refit(served.versions.step())
            assert swapped.verdict is Verdict.COMMITTED, swapped.reason
            pauses.append({name: round(1000 * taken, 2) for name, taken in swapped.phases.items()})
            await asyncio.sleep(1)
    finally:
        stop.set()
        for thread in load:
            thread.join()
    assert answers, "no request was answered"
    return {"pauses in ms": pauses, "requests": len(answers)}, await served.engine.checksums()
