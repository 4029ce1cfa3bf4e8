"""Old weights, old caches, old answers that looked new."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from support.events import RecordedEvents
from support.streams.trainer import Gate, Trainer, until
from support.vllm.toy_engine import ToyHost
from support.vllm.unusual_loaders import FieldEngine, attach_model

from dcr_daemon.engine import messages
from dcr_daemon.engine.port import Swapped, Verdict
from dcr_daemon.errors import EngineRefused
from dcr_daemon.events import Event, Serving
from dcr_daemon.observe.health import Health
from dcr_daemon.observe.metrics import Metrics
from dcr_daemon.observe.server import ProbeServer
from dcr_daemon.vllm_plugin.core import hooks
from dcr_daemon.vllm_plugin.loader import place_model
from dcr_daemon.vllm_plugin.settings import Settings


class Observed(RecordedEvents):
    """Events that health and metrics hear too, as in the daemon."""

    def __init__(self) -> None:
        super().__init__()
        self.health, self.metrics = Health("subscriber"), Metrics()

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        self.health(event)
        self.metrics(event)


async def ask(port: int, path: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2]


async def test_a_replica_that_comes_back_is_alive_at_once_and_ready_when_it_is_current(
    make_trainer: Callable[..., Trainer],
) -> None:
    """A recovered engine took requests before it had the present weights; health said only that a process lived."""
    trainer = make_trainer(3)
    await trainer.publish(1)
    first = trainer.replica(at=0)
    await first.once()
    await trainer.publish(2, 3)
    events = Observed()
    replica = trainer.replica(first.directory, events=events)
    late = Gate(lambda operation, key: operation == "get" and key.startswith("data/3/") and key.endswith(".dcr"))
    replica.store = trainer.line(late)
    probes = ProbeServer("127.0.0.1:0", events.health, metrics=events.metrics)
    await probes.start()
    async with replica.running() as task:
        await asyncio.wait_for(late.reached.wait(), 60)
        assert (await ask(probes.port, "/livez"))[0] == 200
        status, body = await ask(probes.port, "/readyz")
        assert (status, json.loads(body)["ready"]) == (503, False)
        assert not events.of(Serving)
        late.opened.set()
        await until(lambda: events.of(Serving), task)
        assert (await ask(probes.port, "/readyz"))[0] == 200
        assert [event.version for event in events.of(Serving)] == [3]
    await probes.close()


# -- caches ---------------------------------------------------------------------------------------------------------


class Scheduler:
    def __init__(self, paused: Any) -> None:
        self.pause_state = paused


class VllmCore:
    """What a pause asks of vLLM's EngineCore, written down; with `fault` its reset of the caches fails."""

    def __init__(self) -> None:
        from vllm.v1.core.sched.interface import PauseState

        self.scheduler = Scheduler(PauseState.UNPAUSED)
        self.asked: list[tuple[str, bool]] = []

    def pause_scheduler(self, mode: str, clear_cache: bool) -> None:
        self.asked.append((mode, clear_cache))


@pytest.mark.parametrize(("caches", "cleared"), [("reset", True), ("keep", False)])
def test_the_policy_for_caches_is_the_users_and_is_kept(caches: str, cleared: bool) -> None:
    """Users want to choose: the reset as the only behaviour was taken back."""
    pytest.importorskip("vllm")
    engine = VllmCore()
    host = hooks.EngineHost(engine, Settings.read({"DCR_CACHES": caches}))
    assert host.pause() is None
    assert engine.asked == [("keep", cleared)]


def test_the_caches_are_reset_unless_somebody_says_otherwise() -> None:
    """A cache of prefixes was kept over updates, up to 17 steps, and outputs mixed policies."""
    assert Settings.read({}).caches == "reset"


def test_a_salt_by_version_keeps_prefixes_of_other_versions_apart() -> None:
    """With `keep`, a client that sends the version as its salt never meets a prefix of another one."""
    pytest.importorskip("vllm")
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)

    def blocks(salt: str | None) -> list[bytes]:
        prompt, sampling = list(range(64)), SamplingParams(max_tokens=1)
        return list(Request("r", prompt, sampling, None, cache_salt=salt, block_hasher=hasher).block_hashes)

    assert len(blocks("v1")) == 4
    assert blocks("v1") == blocks("v1")
    assert not set(blocks("v1")) & (set(blocks("v2")) | set(blocks(None)))


class Stubborn(ToyHost):
    """A host whose caches cannot be reset: `at_once`, or only when the engine has come to rest."""

    at_once = True
    faults = 0

    def pause(self) -> Future[None] | None:
        rest = super().pause()
        if not self.faults:
            return rest
        self.faults -= 1
        if self.at_once:
            raise RuntimeError("failed to reset the cache")
        failed: Future[None] = Future()
        failed.set_exception(RuntimeError("failed to reset the cache"))
        return failed


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FieldEngine:
    monkeypatch.setattr(place_model, "attach_model", attach_model)  # vLLM's loader is another test's
    engine = FieldEngine(tmp_path / "e").ready()
    engine.host = engine.core.state.host = Stubborn()
    engine.host.guard = engine.core.state.why_not_resume
    return engine


@pytest.mark.parametrize("at_once", [True, False])
def test_a_reset_that_did_not_happen_is_no_update(engine: FieldEngine, at_once: bool) -> None:
    """Nobody looked whether the reset had happened."""
    version = engine.step()
    engine.prepare(version)
    engine.host.faults, engine.host.at_once = 1, at_once
    call = engine.make(messages.Swap, txn="txn")
    with pytest.raises(RuntimeError, match="reset the cache"):
        engine.finish(call, engine.send(call))
    assert engine.holds(0)
    assert (engine.status().version, engine.host.running) == (0, True)
    engine.prepare(version, name="again")
    assert engine.swap("again").verdict is Verdict.COMMITTED
    assert engine.holds(version)


def test_caches_are_handled_before_every_version_that_is_new_to_the_engine(engine: FieldEngine) -> None:
    """By a delta, by a dense load, and when somebody else wrote the weights and they are only proved again."""
    rests = engine.host.rests
    engine.refit(engine.step(), name="delta")
    assert engine.host.rests == rests + 1
    version = engine.step()
    file = {"files": [engine.anchor(version)], "vector": engine.vector_file(version)}
    engine.ask(messages.Load, Swapped, version=version, label="v2", **file)
    assert engine.host.rests == rests + 2
    fresh = engine.step()
    for one in engine.workers:
        one.reload_weights()
        for name, bits in zip([s.name for s in engine.layout], engine.lanes[fresh], strict=True):
            one.toy.load_one(name, _tensor(engine, name, bits))
    engine.attach()
    assert engine.core.state.why_not_resume()
    assert engine.host.rests == rests + 2
    engine.ask(messages.Prove, version=fresh, vector=engine.vector_file(fresh), label="v3")
    assert engine.host.rests == rests + 3, "somebody else's weights, and the caches of ours"
    engine.ask(messages.Serve)
    assert engine.holds(fresh)
    engine.attach()
    engine.ask(messages.Prove, version=fresh, vector=engine.vector_file(fresh), label="v3")
    assert engine.host.rests == rests + 3, "known weights cost no pause"


def _tensor(engine: FieldEngine, name: str, bits: Any) -> Any:
    import torch

    from dcr_daemon.vllm_plugin.loader.recorder import DTYPES

    spec = engine.layout[engine.layout.index(name)]
    return torch.from_numpy(bits.view("u1").copy()).view(DTYPES[spec.dtype]).reshape(spec.shape)


def test_weights_that_a_reload_brought_back_are_not_taken_for_those_on_disk(engine: FieldEngine) -> None:
    """A reload returned cached weights and not those on disk, and the version went up."""
    engine.refit(engine.step())
    for one in engine.workers:
        one.reload_weights()  # ends, says nothing, changes nothing
    fresh = engine.step()
    engine.attach()
    with pytest.raises(EngineRefused, match="not version 2"):
        engine.ask(messages.Prove, version=fresh, vector=engine.vector_file(fresh), label="v2")
    assert engine.core.state.why_not_resume(), "whoever wrote may have written what the caches do not know"
    assert not engine.host.running
    engine.ask(messages.Prove, version=1, vector=engine.vector_file(1), label="v1")
    engine.ask(messages.Serve)
    assert (engine.status().version, engine.host.running) == (1, True)
