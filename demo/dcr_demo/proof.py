"""The proof at the end of the demo: the served model equals the checkpoint that the stream describes, bit for bit.

`dcr materialize` builds the newest version as a plain checkpoint, a second vLLM loads it with its own loader, and
the two are compared by SHA-256 of every parameter and every buffer on every rank, and by greedy completions with
their log-probabilities.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcr_demo.processes import VllmServer

PROMPTS = ("The capital of France is", "Gravity is", "Once upon a time")


@dataclass(frozen=True)
class Proof:
    """`tensors` counts parameters and buffers over all ranks; `differing` names those that are not bitwise equal."""

    ranks: int
    tensors: int
    differing: list[str] = field(default_factory=list)
    completions: int = 0
    differing_completions: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return self.tensors > 0 and not self.differing and not self.differing_completions


def checksums(socket: Path) -> list[dict[str, str]]:
    """Per rank: name of each parameter and buffer, and the SHA-256 of its bytes. Asks; owns nothing."""
    from dcr_daemon.engine.vllm_client import VllmEngine

    async def ask() -> list[dict[str, str]]:
        engine = VllmEngine(socket)
        try:
            ranks = sorted(await engine.checksums(), key=lambda rank: rank.rank)
            return [rank.parameters | {f"buffer {n}": sha for n, sha in rank.buffers.items()} for rank in ranks]
        finally:
            await engine.close()

    return asyncio.run(ask())


def compare(served: VllmServer, fresh: VllmServer, prompts: Sequence[str] = PROMPTS, *, tokens: int = 24) -> Proof:
    """Compare two running servers."""
    left, right = checksums(served.socket), checksums(fresh.socket)
    differing = [f"{len(left)} ranks against {len(right)}"] if len(left) != len(right) else []
    for rank, (a, b) in enumerate(zip(left, right, strict=False)):
        differing += [f"rank {rank}: {name}" for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
    wrong = [p for p in prompts if _answer(served, p, tokens) != _answer(fresh, p, tokens)]
    return Proof(len(left), sum(map(len, left)), differing, len(prompts), wrong)


def _answer(server: VllmServer, prompt: str, tokens: int) -> tuple[str, Any]:
    """Text and log-probabilities, token by token."""
    choice = server.complete(prompt, max_tokens=tokens)
    return choice["text"], choice["logprobs"]["token_logprobs"]
