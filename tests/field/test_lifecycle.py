"""Parts that come and go in the wrong order: whoever comes next finds out what was left, and goes on."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from support.streams.trainer import Gate, Trainer, until
from support.streams.versions import Versions
from support.vllm.toy_engine import failing
from support.vllm.unusual_loaders import FieldEngine, Model, attach_model

from dcr_daemon.engine.vllm_client import VllmEngine
from dcr_daemon.events import Committed, Serving
from dcr_daemon.ledger.records import Floor
from dcr_daemon.vllm_plugin.core import hooks
from dcr_daemon.vllm_plugin.endpoint import EngineGroup, SocketServer
from dcr_daemon.vllm_plugin.loader import place_model

# -- a reader that is slower than retention -------------------------------------------------------------------------


async def test_a_slow_reader_whose_version_is_deleted_falls_back_to_an_anchor(
    make_trainer: Callable[..., Trainer],
) -> None:
    """A trainer deleted an old broadcast while a slow reader was about to load it."""
    trainer = make_trainer(16)
    keep = {"keep_versions": 2, "anchor_every": 4, "anchor_share": None}
    await trainer.publish(1, 2, **keep)
    slow = Gate(lambda operation, key: operation == "get" and key.startswith("data/2/") and key.endswith(".dcr"))
    replica = trainer.replica(at=0)
    replica.store = trainer.line(slow)
    async with replica.running() as task:
        await asyncio.wait_for(slow.reached.wait(), 60)
        async with trainer.publishing(**keep) as publisher:
            for version in range(3, 17):
                trainer.save(version)
            await until(lambda: len(trainer.sealed) == 16, publisher)
            await until(lambda: not _data_of(trainer, 1, 2), publisher)
        assert max(record.floor for record in trainer.records() if isinstance(record, Floor)) > 2
        slow.opened.set()
        await until(lambda: [e for e in replica.events.of(Serving) if e.version == 16], task)
    assert trainer.versions.version_of(replica.directory) == 16
    assert "anchor" in [event.route for event in replica.events.of(Committed)]


def _data_of(trainer: Trainer, *versions: int) -> list[str]:
    return [key for key in trainer.bucket.objects if key.startswith(tuple(f"data/{v}/" for v in versions))]


# -- an engine whose driver died in the middle ----------------------------------------------------------------------


class Died(BaseException):
    """The subscriber is killed here."""


class Dying(VllmEngine):
    """A subscriber's client that dies before or after one call to the engine."""

    def __init__(self, path: Path, call: str, when: str) -> None:
        super().__init__(path)
        self._fatal = (call, when)

    async def _around(self, name: str, *arguments: Any) -> Any:
        if (name, "before") == self._fatal:
            raise Died
        answer = await getattr(super(), name)(*arguments)
        if (name, "after") == self._fatal:
            raise Died
        return answer

    async def attach(self, *arguments: Any) -> Any:
        return await self._around("attach", *arguments)

    async def prove(self, *arguments: Any) -> Any:
        return await self._around("prove", *arguments)

    async def prepare(self, *arguments: Any) -> Any:
        return await self._around("prepare", *arguments)

    async def swap(self, *arguments: Any) -> Any:
        return await self._around("swap", *arguments)

    async def serve(self, *arguments: Any) -> Any:
        return await self._around("serve", *arguments)


class CoreClient:
    """vLLM's client of its engine, without the process."""

    client_index = 0

    def __init__(self, engine: FieldEngine) -> None:
        self._core = SimpleNamespace(dcr=engine.core)

    async def call_utility_all_async(self, method: str, record: bytes) -> list[bytes]:
        assert method == hooks.METHOD
        answer = hooks.dcr_core(self._core, record)
        return [answer if isinstance(answer, bytes) else await asyncio.wrap_future(answer)]


class Served:
    """A stream of the field's model, and an engine of two ranks behind its private socket."""

    def __init__(self, home: Path) -> None:
        (home / "versions").mkdir()
        versions = Versions(home / "versions")
        self.engine = FieldEngine(home / "e")
        versions.layout = Model.layout
        versions.values = [self._named(self.engine.lanes[0])]
        for _ in range(4):
            versions.put(self._named(self.engine.lanes[self.engine.step()]))
        self.trainer, self.socket = Trainer(home, versions), home / "run" / "e.sock"

    @staticmethod
    def _named(lanes: list[np.ndarray]) -> dict[str, np.ndarray]:
        return {spec.name: bits for spec, bits in zip(Model.layout, lanes, strict=True)}

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        server = SocketServer(self.socket, EngineGroup(CoreClient(self.engine)))
        await server.open()
        try:
            yield
        finally:
            await server.close()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.setattr(place_model, "attach_model", attach_model)  # vLLM's loader is another test's
    return Served(tmp_path)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", ["attach", "prove", "prepare", "swap", "serve"])
async def test_an_engine_that_a_dead_driver_left_in_the_middle_is_taken_over(
    served: Served, call: str, when: str
) -> None:
    """A failed transfer left the server in the middle of an update, and the next run could not start."""
    trainer, engine = served.trainer, served.engine
    await trainer.publish(1, 2)
    replica = trainer.replica()
    async with served.listening():
        with pytest.raises(Died):
            await replica.run(Dying(served.socket, call, when))
        assert engine.status().version in (None, 0, 2)
        assert not engine.host.running or engine.status().version == 2
        await replica.run(VllmEngine(served.socket), once=True)
        assert (engine.status().version, engine.host.running) == (2, True)
        assert engine.holds(2)
        await trainer.publish(3)
        await replica.run(VllmEngine(served.socket), once=True)
        assert engine.holds(3)
    served_versions = [event.version for event in replica.events.of(Serving)]
    assert served_versions == sorted(served_versions)


async def test_an_update_that_one_rank_did_not_end_is_ended_by_whoever_comes_next(served: Served) -> None:
    """The recovery path went to dead shards; a partial write lay outside of what was to fail closed."""
    trainer, engine = served.trainer, served.engine
    await trainer.publish(1)
    faults = iter([True, True])
    engine.wire.edit = lambda rank, sent, answer: (
        failing(answer) if rank == 1 and sent["op"] == "commit" and next(faults, False) else answer
    )
    replica = trainer.replica()
    async with served.listening():
        task = asyncio.create_task(replica.run(VllmEngine(served.socket)))
        await until(lambda: replica.events.of(Serving), task)
        assert (engine.status().version, engine.host.running) == (1, True)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert engine.holds(1)


async def test_a_restarted_engine_serves_nothing_before_it_is_proved_again(served: Served) -> None:
    """A recovered engine took requests before it had the present weights."""
    trainer = served.trainer
    await trainer.publish(1, 2)
    replica = trainer.replica()
    async with served.listening():
        await replica.run(VllmEngine(served.socket), once=True)
        assert served.engine.host.running
    lanes = served.engine.lanes
    shutil.rmtree(served.socket.parent)
    served.engine = FieldEngine(trainer.home / "e")  # a new process, from the base model
    served.engine.lanes = lanes
    assert not served.engine.host.running
    with pytest.raises(RuntimeError, match="not proved"):
        served.engine.host.resume()
    assert served.engine.status().version is None
    await trainer.publish(3)
    async with served.listening():
        await replica.run(VllmEngine(served.socket), once=True)
        assert (served.engine.status().version, served.engine.host.running) == (3, True)
    assert served.engine.holds(3)
