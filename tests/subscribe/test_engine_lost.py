"""Engines that die, come back, or are changed by somebody else under a subscriber."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dcr_daemon.checkpoint.safetensors import SafetensorsFile
from dcr_daemon.engine.directory.engine import DirectoryEngine
from dcr_daemon.engine.port import EngineGone
from dcr_daemon.events import (
    Committed,
    EngineLost,
    Repaired,
    Serving,
)


class Mortal(DirectoryEngine):
    """An engine that dies at chosen calls: its answers are lost, before or after the work."""

    def __init__(self, path: Path, deaths: list[tuple[str, str]]) -> None:
        super().__init__(path)
        self.deaths = deaths

    async def _maybe(self, call: str, when: str) -> None:
        if (call, when) in self.deaths:
            self.deaths.remove((call, when))
            raise EngineGone(f"{call}: gone {when}")

    async def attach(self, facts):
        await self._maybe("attach", "before")
        answer = await super().attach(facts)
        await self._maybe("attach", "after")
        return answer

    async def prove(self, version, vector, label, loaded=""):
        await self._maybe("prove", "before")
        await super().prove(version, vector, label, loaded)
        await self._maybe("prove", "after")

    async def prepare(self, txn):
        await self._maybe("prepare", "before")
        answer = await super().prepare(txn)
        await self._maybe("prepare", "after")
        return answer

    async def swap(self, txn):
        await self._maybe("swap", "before")
        answer = await super().swap(txn)
        await self._maybe("swap", "after")
        return answer

    async def load(self, version, files, vector, label):
        await self._maybe("load", "before")
        answer = await super().load(version, files, vector, label)
        await self._maybe("load", "after")
        return answer

    async def serve(self):
        await self._maybe("serve", "before")
        await super().serve()
        await self._maybe("serve", "after")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", ["attach", "prove", "prepare", "swap", "load", "serve"])
async def test_an_engine_that_dies_at_any_step_is_attached_to_again(make_stream, make_replica, call, when):
    stream = await make_stream(3)
    await stream.publish(1)
    await stream.anchor(1)
    await stream.publish(2, 3)
    replica = make_replica(stream)
    if call != "load":
        stream.versions.save(replica.directory, 0)
    engine = Mortal(replica.directory, [(call, when)])
    async with replica.serving(engine):
        pass  # it serves before it ends
    assert len(replica.events.of(EngineLost)) == 1
    assert replica.events.of(Serving)[-1].version == 3
    assert replica.events.of(Committed)[-1].version == 3
    assert stream.versions.version_of(replica.directory) == 3


class Restarted(DirectoryEngine):
    """An engine that can be away, and come back as another incarnation, which nobody owns yet."""

    away = False
    lives = 0

    async def status(self):
        if self.away:
            raise EngineGone("away")
        return await super().status()

    async def attach(self, facts):
        if self.away:
            raise EngineGone("away")
        return await super().attach(facts)

    def restart(self):
        self.lives += 1
        self._state.nonce, self._state.facts = f"life-{self.lives}", None


async def test_an_engine_that_goes_away_or_comes_back_is_noticed_without_a_new_version(make_stream, make_replica):
    stream = await make_stream(1)
    await stream.publish(1)
    replica = make_replica(stream).at_base(stream)
    engine = Restarted(replica.directory)
    async with replica.serving(engine) as task:
        engine.away = True
        await replica.until(lambda: replica.events.of(EngineLost), task)
        engine.away = False
        served = len(replica.events.of(Serving))
        await replica.until(lambda: len(replica.events.of(Serving)) > served, task)
        served = len(replica.events.of(Serving))
        engine.restart()
        await replica.until(lambda: len(replica.events.of(Serving)) > served, task)
    assert any("restarted" in event.reason for event in replica.events.of(EngineLost))


async def test_once_does_not_wait_for_an_absent_engine_for_ever(make_stream, make_replica):
    stream = await make_stream()
    replica = make_replica(stream)
    engine = Mortal(replica.directory, [("attach", "before")] * 1000)
    with pytest.raises(EngineGone):
        await replica.run(engine, once=True, patience=0.2)


async def test_weights_that_somebody_changes_are_noticed_and_repaired_by_an_anchor(make_stream, make_replica):
    stream = await make_stream(2)
    await stream.publish(1)
    await stream.anchor(1)
    replica = make_replica(stream).at_base(stream)
    async with replica.serving() as task:
        shard = sorted(replica.directory.glob("*.safetensors"))[0]
        with SafetensorsFile(shard, writable=True) as file:
            name = file.specs[0].name
            file.write_elements(name, np.array([3]), values=file.bits(name)[3:4] ^ 1)
            file.sync()
        shard.touch()
        await replica.until(lambda: replica.events.of(Repaired), task)
        await stream.publish(2)
        await replica.until_serving(2, task)
    assert stream.versions.version_of(replica.directory) == 2
    assert replica.events.of(EngineLost)
