"""A toy engine as a server: the real client in front of the real core and workers, for a subscriber to drive.

What is left out is vLLM and the socket's bytes on a wire. As behind the socket, a call that arrived runs to its end
whether or not its client waits, and a restarted server is another incarnation, born paused.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from dcr_daemon.engine import messages
from dcr_daemon.engine.vllm_client import VllmEngine
from dcr_daemon.store import open_store
from support.streams.versions import Versions
from support.streams.writer import StreamWriter
from support.vllm.toy_engine import Ended, ToyEngine
from support.vllm.toy_model import LAYOUT, loaded

Lanes = list[np.ndarray]


class ToyVersions(Versions):
    """Versions of the toy model. The tied head, which no rank looks at, stays zero."""

    def __init__(self, home: Path, seed: int = 0) -> None:
        super().__init__(home, seed)
        self.layout = LAYOUT
        self.values = [{spec.name: self._draw(spec) for spec in self.layout}]
        self.values[0]["head"][:] = 0

    def step(self, rate: float = 0.2) -> int:
        fresh = {name: bits.copy() for name, bits in self.values[-1].items()}
        for name, bits in fresh.items():
            if name != "head":
                at = np.flatnonzero(self._random.random(bits.size) < rate)
                bits[at] ^= self._random.integers(1, 200, at.size).astype(bits.dtype)
        return self.put(fresh)

    def lanes(self, version: int) -> Lanes:
        return [self.values[version][spec.name] for spec in self.layout]


class _Engine(ToyEngine):
    def __init__(self, home: Path, lanes: Lanes, cap: int) -> None:
        self._lanes = lanes
        super().__init__(home, cap=cap)

    def first(self) -> Lanes:
        return self._lanes


class ToyServer:
    """Two ranks. `engine` is the present incarnation, None while it is down; `asked` are the calls it got."""

    def __init__(self, home: Path, versions: ToyVersions, *, cap: int = 1 << 22) -> None:
        self.home, self.versions, self.cap = home, versions, cap
        self.engine: _Engine | None = None
        self.asked: list[str] = []
        self.deaths: list[str] = []  #: calls that the engine dies of, once each
        self._calls: set[asyncio.Task[bytes]] = set()

    def start(self, lanes: Lanes | int) -> ToyServer:
        """Anew, with the weights of a version or any others."""
        self.engine = _Engine(self.home, self.versions.lanes(lanes) if isinstance(lanes, int) else lanes, self.cap)
        return self

    def stop(self) -> None:
        self.engine = None

    @property
    def running(self) -> bool:
        return self.engine is not None and self.engine.host.running

    @property
    def proved(self) -> int | None:
        return self.engine.core.state.proved if self.engine else None

    def holds(self, version: int) -> bool:
        """Every byte of every rank is that of a fresh load of the version."""
        assert self.engine is not None
        lanes = self.versions.lanes(version)
        return all(one.toy.state() == loaded(lanes, one.rank, 2).state() for one in self.engine.workers)

    def client(self) -> ToyPort:
        return ToyPort(self)

    async def call(self, body: bytes) -> bytes:
        task = asyncio.ensure_future(self._carry_out(messages.decode_call(body)))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return await asyncio.shield(task)

    async def _carry_out(self, call: Any) -> bytes:
        engine, name = self.engine, type(call).__name__.lower()
        self.asked.append(name)
        if name in self.deaths:
            self.deaths.remove(name)
            self.stop()
        try:
            answer: Any = self._alive(engine).core.handle(call)
            while isinstance(answer, Future | messages.Pending):
                if isinstance(answer, Future):
                    answer = await asyncio.wrap_future(answer)
                    continue
                await asyncio.sleep(0.002)
                answer = self._alive(engine).core.handle(messages.Poll(id=call.id))
        except Ended as error:
            self.stop()
            raise ConnectionResetError(f"the engine ended: {error}") from error
        return messages.encode(answer)

    def _alive(self, engine: _Engine | None) -> _Engine:
        if engine is None or engine is not self.engine:
            raise ConnectionResetError("the server is down")
        return engine


class ToyPort(VllmEngine):
    """A client of a `ToyServer`."""

    def __init__(self, server: ToyServer) -> None:
        super().__init__(server.home / "socket")
        self._server = server

    async def _exchange(self, body: bytes) -> bytes:
        return await self._server.call(body[4:])


async def toy_stream(home: Path, count: int) -> StreamWriter:
    """A stream of the toy model, with `count` versions to publish."""
    (home / "versions").mkdir(parents=True)
    versions = ToyVersions(home / "versions")
    for _ in range(count):
        versions.step()
    url = f"file://{home}/stream"
    writer = StreamWriter(url, versions, await open_store(url))
    await writer.create()
    return writer
