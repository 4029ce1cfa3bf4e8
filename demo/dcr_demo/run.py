"""The main job, live: train, publish, refit a server that answers requests, and prove the result.

`run_demo` yields one `Row` per step as it is served, then ends with the proof. It prints nothing: `command` draws.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dcr_daemon import runtime
from dcr_demo.models import write_smollm2, write_tiny
from dcr_demo.processes import VllmServer, seaweedfs
from dcr_demo.proof import Proof, compare
from dcr_demo.record import EventTail
from dcr_demo.scene import Scene, short_directory

_FIRST_ANSWER = 300.0  #: seconds; the first completion compiles


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """`work` keeps everything that is written. `tiny`: a generated Qwen3 instead of SmolLM2. `s3`: a real S3 server."""

    work: Path
    steps: int = 4
    tiny: bool = False
    s3: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One version. Sizes are in bytes; `publish_to_serving` runs from the last shard's close to the commit, in seconds;
    `pause` is the time in which the engine generated nothing, in seconds."""

    version: int
    step: int
    reward: float
    changed: float
    payload: int
    dense: int
    publish_to_serving: float
    pause: float


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage that takes long has begun."""

    what: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The result. `requests` ended while versions moved; `failed` of them with an error."""

    stream: str
    work: str
    rows: list[Row]
    requests: int
    failed: int
    proof: Proof

    @property
    def holds(self) -> bool:
        return self.proof.holds and self.failed == 0

    def as_json(self) -> dict[str, Any]:
        """What `dcr demo --json` prints."""
        return asdict(self) | {"holds": self.holds}


def run_demo(options: DemoOptions) -> Generator[Stage | Row | Finished]:
    """Run the demo; every process ends with the generator. Raises `ProcessDied` with the end of a log."""
    work = short_directory(options.work)
    work.mkdir(parents=True, exist_ok=True)
    yield Stage("writing the model")
    model = write_model(work / "model", tiny=options.tiny)
    with ExitStack() as stack:
        s3 = stack.enter_context(seaweedfs(work / "s3")) if options.s3 else None
        where = {"stream": f"s3://{s3.bucket}/demo", "env": s3.env} if s3 else {}
        scene = stack.enter_context(Scene(work, model, **where))
        yield Stage("starting publisher and vLLM")
        scene.publisher()
        server = scene.vllm(model)
        yield Stage("loading the trainer")
        trainer = _trainer(model, tiny=options.tiny)
        scene.wait(scene.published.has("Claimed"), "the publisher's claim")
        yield Stage("waiting for vLLM to load, and for the subscriber to prove version 0")
        scene.wait(server.socket_open, "the engine's socket")
        subscribed = scene.subscriber(server.engine)
        scene.wait(server.healthy, "the public port")
        server.complete("Hello", max_tokens=2, timeout=_FIRST_ANSWER)
        traffic = scene.traffic(server)
        scene.wait(lambda: bool(scene.requests()), "the first answers")
        rows = []
        for _ in range(options.steps):
            row = _step(scene, trainer, subscribed)
            rows.append(row)
            yield row
        scene.stop(traffic)
        del trainer  # masters, gradients and moments make room for a second server
        yield Stage("proof: materialising, starting a fresh vLLM on it, comparing every byte")
        proof = _prove(scene, server)
        requests = scene.requests()
        failed = sum(r["error"] is not None for r in requests)
        yield Finished(scene.stream, str(work), rows, len(requests), failed, proof)


def write_model(out: Path, *, tiny: bool) -> Path:
    """The demo's model in `out`; one that is there already is used again."""
    if not (out / "config.json").exists():
        write_tiny(out, kind="tied") if tiny else write_smollm2(out)
    return out


def _trainer(model: Path, *, tiny: bool) -> Any:
    import torch

    from dcr_demo.trainer import Trainer

    torch.set_num_threads(1)  # vLLM answers requests meanwhile, on the same cores
    return Trainer(model, learning_rate=2e-6 if tiny else 1e-6)


def _step(scene: Scene, trainer: Any, subscribed: EventTail) -> Row:
    """Train, save, wait until it is served."""
    step = trainer.step()
    trainer.save(scene.checkpoints / f"step-{step.number:04d}", shard_bytes=64 << 20)
    saved = runtime.monotonic()
    scene.wait(lambda: _sealed(scene, step.number), f"step {step.number} to be sealed")
    sealed = _sealed(scene, step.number)
    version = sealed["version"]
    scene.wait(lambda: _served(subscribed, version), f"version {version} to be served")
    committed = _served(subscribed, version)
    return Row(
        version=version,
        step=step.number,
        reward=step.reward,
        changed=sealed["changed"] / sealed["elements"],
        payload=sealed["bytes"],
        dense=sealed["dense_bytes"],
        publish_to_serving=max(0.0, committed["monotonic"] - saved),
        pause=committed["pause_seconds"],
    )


def _sealed(scene: Scene, step: int) -> Any:
    return scene.published.first("Sealed", step=step)


def _served(subscribed: EventTail, version: int) -> Any:
    return next((e for e in subscribed.of("Committed") if e["version"] >= version), None)


def _prove(scene: Scene, served: VllmServer) -> Proof:
    out = scene.work / "materialised"
    scene.run("materialize", scene.stream, "--out", str(out))
    fresh = scene.vllm(out, name="fresh")
    scene.wait(fresh.socket_open, "the fresh engine's socket")
    # The fresh server is proved like any other: its own subscriber finds it at the newest version, and lets it serve.
    scene.subscriber(fresh.engine, name="prover")
    scene.wait(fresh.healthy, "the fresh server's public port")
    fresh.complete("Hello", max_tokens=2, timeout=_FIRST_ANSWER)
    return compare(served, fresh)
