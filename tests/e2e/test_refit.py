"""The main job through the commands' own processes: trainer, SeaweedFS, vLLM; every bit compared."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from dcr_demo.models import Kind, write_tiny
from dcr_demo.processes import VllmServer
from dcr_demo.proof import Proof, compare
from dcr_demo.scene import Scene
from dcr_demo.trainer import Trainer

pytestmark = [pytest.mark.vllm, pytest.mark.seaweed, pytest.mark.slow]

STEPS = 5
PROMPT = "Once upon a time there was a model that learned while it was talking. " * 3  # several KV blocks long
LEARNING_RATE = 1e-4  # a tiny model must answer visibly otherwise after five steps
Answer = tuple[str, Any]


@dataclass
class Run:
    """What one whole run left behind. `answers[0]` and `[1]` are of version 0, the others of each version in turn."""

    proof: Proof
    answers: list[Answer]
    fresh_answer: Answer
    commits: list[dict[str, Any]]
    requests: list[dict[str, Any]]
    log: list[dict[str, Any]]
    status: dict[str, Any]
    report: dict[str, Any]


def answer(server: VllmServer) -> Answer:
    """Text and log-probabilities of the same prompt every time, so that its prefix is cached."""
    choice = server.complete(PROMPT, max_tokens=16)
    return choice["text"], choice["logprobs"]["token_logprobs"]


def refit(scene: Scene, *, ranks: int, tokens: int) -> Run:
    """Five trained versions into a server that answers meanwhile; then a fresh server on what the stream describes."""
    scene.publisher()
    server = scene.vllm(scene.model, tensor_parallel=ranks)
    trainer = Trainer(scene.model, learning_rate=LEARNING_RATE, seed=5)
    scene.wait(server.socket_open, "the engine's socket")
    assert not server.healthy()  # must E2: nobody has proved it yet
    events = scene.subscriber(server.engine)
    scene.wait(server.healthy, "the public port")
    answers = [answer(server), answer(server)]
    traffic = scene.traffic(server, clients=2, tokens=tokens)
    scene.wait(lambda: bool(scene.requests()), "the first answers")
    for number in range(1, STEPS + 1):
        trainer.step()
        trainer.save(scene.checkpoints / f"step-{number}", shard_bytes=100_000)
        scene.wait(events.has("Committed", version=number), f"version {number} to be served")
        answers.append(answer(server))
    scene.stop(traffic)
    proof, fresh_answer = against_fresh(scene, server, ranks)
    return Run(
        proof,
        answers,
        fresh_answer,
        commits=events.of("Committed"),
        requests=scene.requests(),
        log=scene.run("log", scene.stream),
        status=scene.run("status", scene.stream)[0],
        report=scene.run("verify", scene.stream)[0],
    )


def against_fresh(scene: Scene, server: VllmServer, ranks: int) -> tuple[Proof, Answer]:
    """Compare with a server that loaded the materialised checkpoint through vLLM's own loader."""
    out = scene.work / "materialised"
    scene.run("materialize", scene.stream, "--out", str(out))
    fresh = scene.vllm(out, name="fresh", tensor_parallel=ranks)
    scene.wait(fresh.socket_open, "the fresh engine's socket")
    scene.subscriber(fresh.engine, name="prover")
    scene.wait(fresh.healthy, "the fresh server's port")
    return compare(server, fresh, tokens=16), answer(fresh)


CASES: dict[str, tuple[Kind, int, int]] = {"dense": ("dense", 1, 48), "tied": ("tied", 1, 48), "moe": ("moe", 2, 16)}


@pytest.fixture(scope="module", params=list(CASES))
def run(request: pytest.FixtureRequest, seaweed: Any) -> Iterator[tuple[int, Run]]:
    """One run per model; the tests below each look at one side of it."""
    kind, ranks, tokens = CASES[request.param]
    env = {**seaweed.environ, "AWS_ENDPOINT_URL_S3": seaweed.endpoint_url}
    with tempfile.TemporaryDirectory(prefix="dcr-") as name:  # short enough for unix sockets
        work = Path(name)
        base = write_tiny(work / "model", kind=kind, seed=5)
        with Scene(work, base, stream=seaweed.stream(), env=env) as scene:
            yield ranks, refit(scene, ranks=ranks, tokens=tokens)


def test_every_parameter_and_buffer_of_every_rank_is_bitwise_that_of_a_fresh_server(run: tuple[int, Run]) -> None:
    ranks, found = run
    assert found.proof.ranks == ranks
    assert found.proof.tensors > 20 * ranks
    assert found.proof.differing == []


def test_completions_and_log_probabilities_are_those_of_a_fresh_server(run: tuple[int, Run]) -> None:
    _, found = run
    assert found.proof.completions > 0
    assert found.proof.differing_completions == []


def test_a_cached_prompt_answers_as_the_new_policy(run: tuple[int, Run]) -> None:
    _, found = run
    assert found.answers[0] == found.answers[1]
    assert found.answers[-1] == found.fresh_answer
    policies = found.answers[1:]
    assert all(a != b for a, b in itertools.pairwise(policies))  # every version answers otherwise


def test_every_request_in_flight_finishes_also_across_a_refit(run: tuple[int, Run]) -> None:
    _, found = run
    assert [r["error"] for r in found.requests if r["error"]] == []
    spans = [(r["start"], r["end"]) for r in found.requests]
    crossed = [c for c in found.commits if any(start < c["monotonic"] < end for start, end in spans)]
    assert len(crossed) == STEPS


def test_versions_arrive_one_by_one_and_the_engine_paused_for_each(run: tuple[int, Run]) -> None:
    _, found = run
    assert [c["version"] for c in found.commits] == list(range(1, STEPS + 1))
    assert all(0 < c["pause_seconds"] < c["seconds"] for c in found.commits)


def test_the_stream_tells_the_same_story(run: tuple[int, Run]) -> None:
    _, found = run
    sealed = [row for row in found.log if row["state"] == "sealed" and row["version"] > 0]
    assert [row["version"] for row in sealed] == list(range(1, STEPS + 1))
    assert [row["step"] for row in sealed] == list(range(1, STEPS + 1))
    assert all(0 < row["changed"] < row["elements"] for row in sealed)
    assert found.status["head"]["version"] == STEPS
    assert {"subscriber", "prover"} <= {r["id"] for r in found.status["replicas"]}
    assert found.report["damages"] == []
    assert found.report["versions"] == STEPS
