"""Ways to start vLLM that place or run the workers otherwise: each is attached to, refitted twice, and proved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.vllm.server import Rig, rig

from dcr_daemon.engine.port import Verdict
from dcr_demo.models import Kind, write_tiny

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@dataclass(frozen=True)
class Launch:
    """`generates`: whether vLLM's CPU build can compute with it."""

    kind: Kind
    extra: tuple[str, ...]
    workers: int
    tensor_parallel: int = 1
    generates: bool = True


LAUNCHES = {
    # vLLM's CPU platform replaces "uni" by "mp", but not a class of that kind.
    "the worker inside EngineCore": Launch(
        "dense", ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"), 1
    ),
    # On a CPU the second stage has no buffer for what the first one computes, and asserts that it has.
    "two pipeline stages": Launch("tied", ("--pipeline-parallel-size", "2"), 2, generates=False),
    # On a CPU a worker crashes in its first forward pass, also without DCR.
    "experts on two ranks": Launch("moe", ("--enable-expert-parallel",), 2, tensor_parallel=2, generates=False),
}


@pytest.fixture(params=list(LAUNCHES))
def launched(request: pytest.FixtureRequest, short_tmp: Path) -> Iterator[tuple[Launch, Rig]]:
    launch = LAUNCHES[request.param]
    home = short_tmp / f"launch-{list(LAUNCHES).index(request.param)}"
    model = write_tiny(home / "model", kind=launch.kind)
    with rig(model, home / "l", "launch", tensor_parallel=launch.tensor_parallel, extra=launch.extra) as made:
        yield launch, made


async def test_two_refits_end_bit_for_bit_at_the_version(launched: tuple[Launch, Rig]) -> None:
    launch, made = launched
    engine = await made.own()
    assert len(await engine.checksums()) == launch.workers
    assert [worker.flagged for worker in made.workers()] == [True] * launch.workers, "polls leave the workers alone"
    for _ in range(2):
        version = made.versions.step()
        swapped = await made.refit(version)
        assert (swapped.verdict, swapped.version, swapped.serving) == (Verdict.COMMITTED, version, True)
        if launch.generates:
            assert (await made.complete("Once upon a time", max_tokens=4))["logprobs"]["tokens"]
    assert await made.live() == made.versions.vector(2).tobytes()
