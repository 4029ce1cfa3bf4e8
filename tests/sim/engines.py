"""A vLLM server as the plugin sees it: the real core, judge and ranks over two toy workers, in a process that can die.

Real: `VllmEngine` (the subscriber's client), the socket's records, `Core` and everything below it, the workers'
transactions. Not real: vLLM, its scheduler (`Host`), the endpoint's socket (`serve_call` polls as it does), and the
workers' threads: a job runs in place when it is first polled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from sim.clock import Crashed, Process, running
from support.vllm.toy_engine import ToyHost, ToyTransport, ToyWorker
from support.vllm.toy_model import loaded, placed

from dcr_daemon.engine import messages
from dcr_daemon.engine.messages import AnyAnswer, Attach, Pending
from dcr_daemon.engine.vllm_client import VllmEngine
from dcr_daemon.vllm_plugin.calls import JobKind, Op
from dcr_daemon.vllm_plugin.core import staged_summary
from dcr_daemon.vllm_plugin.core.engine_core import Core
from dcr_daemon.vllm_plugin.core.worker_group import WorkerGroup
from dcr_daemon.vllm_plugin.loader import place_model
from dcr_daemon.vllm_plugin.settings import Settings
from dcr_daemon.vllm_plugin.weights import faults
from dcr_daemon.vllm_plugin.worker import session as rank_module
from dcr_daemon.vllm_plugin.worker.jobs import BackgroundThread, Job

if TYPE_CHECKING:
    from sim.disk import Machine
    from sim.world import World

RANKS = 2
ANSWER_TIMEOUT = 60.0  #: virtual seconds after which a subscriber gives up on one answer
_LENGTH = 4


class InlineBackground(BackgroundThread):
    """The worker's thread without a thread: the job runs when somebody first looks for it."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self._set_flag = None  # the simulated workers are polled

    def use_cpus(self, cpus: list[int] | None) -> None:
        pass

    def start(self, job: Job) -> None:
        assert self.job is None or not self.job.live, "one job at a time"
        self.job = job

    def run(self) -> None:
        """The thread gets its turn."""
        job = self.job
        if job is not None and job.live:
            job.state = self._work(job)
            job.done.set()

    def quiesce(self) -> None:
        if self.job is not None and self.job.live:
            self.job.cancelled.set()
            self.run()


class InlineReader:
    """Reads the tables of a transaction in place."""

    def start(self, hops: Any, layout: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(staged_summary.read_summaries(hops, layout))
        except Exception as error:  # noqa: BLE001  as an executor hands over whatever its work raises
            future.set_exception(error)
        return future


class Host(ToyHost):
    """A scheduler whose pause takes a while when requests are in flight, and whose end is that of its process."""

    def __init__(self, engine: SimEngine) -> None:
        super().__init__()
        self._engine = engine

    def end(self, reason: str) -> None:
        self._engine.world.note(f"engine ends: {reason}", self._engine.process)
        self._engine.world.kill(self._engine.process)
        raise Crashed(reason)


class SimTransport(ToyTransport):
    """Ranks that fail, or say that they did."""

    def __init__(self, engine: SimEngine) -> None:
        super().__init__(engine.workers)
        self._engine = engine

    def answer(self, rank: int, call: dict[str, Any], one: ToyWorker) -> Any:
        if call["op"] == Op.START and call["arg"]["kind"] == JobKind.FINGERPRINT:
            self._engine.summed = len(self._engine.flips)
        fault = self._engine.world.rank_fault(self._engine, rank, str(call["op"]))
        if fault == "half" and call["op"] == "apply":
            faults.inject("apply")
            return one.dcr_call(call)
        if fault in ("balks", "half"):
            call = {**call, "op": "status", "arg": {}}
        reply = one.dcr_call(call)
        return (
            {**reply, "ok": False, "code": "failed", "error": f"the rank {fault}", "result": None} if fault else reply
        )


class SimEngine:
    """One replica's engine: boots from weights, answers calls, dies and boots again."""

    def __init__(self, world: World, role: str, machine: Machine, lanes: list[np.ndarray]) -> None:
        self.world, self.role, self.machine = world, role, machine
        self.caller = ""  #: the process whose call the newest step worked on
        self.served = -1  #: the highest version that was ever served here
        self.foreign: tuple[int | None] | None = None  #: somebody wrote to the weights, and this was proved then
        self.flips: list[tuple[int, str, int, int]] = []  #: rank, parameter, byte and mask of bits that flipped
        self.summed = 0  #: how many of them were there when everything was last summed
        self.boots = 0
        self.boot(lanes)

    def boot(self, lanes: list[np.ndarray]) -> None:
        """A new process that has loaded these weights, and is paused."""
        self.boots += 1
        self.process = self.world.process(self.role, self.machine)
        self.workers = [ToyWorker(lanes, rank, RANKS) for rank in range(RANKS)]
        self.wire = SimTransport(self)
        self.host = Host(self)
        self.core = Core(self.host, WorkerGroup(self.wire), Settings(stage_cap=self.world.stage_cap))
        self.core.coordinator._reader = InlineReader()  # type: ignore[assignment]
        self.host.guard = self.core.state.why_not_resume
        self.host.busy = self.world.rng.random() < 0.5
        self.tokens = 0
        self.foreign = None
        self.forget_flips(len(self.flips))
        self.core.start_paused()

    @property
    def alive(self) -> bool:
        return not self.process.dead

    @property
    def serving(self) -> bool:
        return self.alive and self.host.running

    def states(self) -> list[dict[str, bytes]]:
        """Every byte of every rank."""
        return [worker.toy.state() for worker in self.workers]

    async def serve_call(self, body: bytes, caller: Process | None) -> bytes:
        """What the endpoint does with a record from its socket, and EngineCore with what it passes on."""
        call = messages.decode_call(body[_LENGTH:])
        if isinstance(call, Attach):
            self.tokens += 1
            call = msgspec.structs.replace(call, at_least=self.tokens)
        answer = await self._step(call, caller)
        while isinstance(answer, Pending):
            await asyncio.sleep(self.world.rng.uniform(0.005, 0.5))
            for worker in self.workers:
                worker._dcr_session._background.run()
            answer = await self._step(messages.Poll(id=call.id), caller)
        return messages.encode(answer)

    async def _step(self, call: messages.AnyCall, caller: Process | None) -> AnyAnswer:
        answer = self.core.handle(messages.decode_call(messages.encode(call)))
        self._looked_at(caller)
        if isinstance(answer, Future):
            await asyncio.sleep(self.world.rng.uniform(0.0, 0.3))
            if not answer.done():
                self.host.rest()
            answer = answer.result()
            self._looked_at(caller)
        return messages.decode_answer(messages.encode(answer))

    def _looked_at(self, caller: Process | None) -> None:
        self.caller = caller.name if caller else ""
        self.world.looked_at(self)

    def write_foreign(self) -> None:
        """Somebody reloads other weights behind the plugin's back, through an entry point of vLLM."""
        worker = self.workers[self.world.rng.randrange(RANKS)]
        self.foreign = (self.core.state.proved,)
        worker.reload_weights()
        worker.flip("norm")

    def flip(self) -> None:
        """A bit of one rank's memory flips by itself: no entry point, no word."""
        rng = self.world.rng
        rank, name = rng.randrange(RANKS), rng.choice(("qk", "o", "norm"))
        memory = getattr(self.workers[rank].toy, name).data.reshape(-1).view(torch.uint8).numpy()
        place, mask = rng.randrange(memory.size), 1 << rng.randrange(8)
        memory[place] ^= mask
        self.flips.append((rank, name, place, mask))
        self.world.outcome.faults["bit flipped"] += 1

    def forget_flips(self, count: int) -> None:
        """The first so many are gone, or known of."""
        del self.flips[:count]
        self.summed = 0

    def with_flips(self, states: list[dict[str, bytes]]) -> list[dict[str, bytes]]:
        """The same, with the bits that flipped and that nobody can have found yet."""
        fresh = [dict(state) for state in states]
        for rank, name, place, mask in self.flips:
            body = bytearray(fresh[rank][name])
            body[place] ^= mask
            fresh[rank][name] = bytes(body)
        return fresh


def expected_states(lanes: list[np.ndarray]) -> list[dict[str, bytes]]:
    """What every rank holds right after loading these values."""
    return [loaded(lanes, rank, RANKS).state() for rank in range(RANKS)]


class SimVllmEngine(VllmEngine):
    """The real client over a simulated socket: the call runs on in the server, whatever becomes of the caller."""

    def __init__(self, engine: SimEngine) -> None:
        super().__init__(f"/sim/{engine.role}", timeout=ANSWER_TIMEOUT)
        self._engine = engine

    async def _exchange(self, body: bytes) -> bytes:
        engine, world = self._engine, self._engine.world
        name = messages.decode_call(body[_LENGTH:]).__struct_config__.tag
        fault = world.engine_fault(engine, str(name))
        answer: asyncio.Future[bytes] = world.loop.create_future()
        if fault == "request lost":
            raise ConnectionResetError("lost on its way")
        world.loop.world_later(world.latency() / 10, self._arrive, body, str(name), fault, answer, running.get())
        return await answer

    def _arrive(
        self, body: bytes, name: str, fault: str, answer: asyncio.Future[bytes], caller: Process | None
    ) -> None:
        engine, world = self._engine, self._engine.world
        if not engine.alive:
            _fail(answer, "no server behind the socket")
            return
        process = engine.process
        world.note(f"engine {engine.role} {name}", caller)
        task = world.loop.spawn(process, engine.serve_call(body, caller))

        def watch() -> None:
            if process.dead or task.done():
                if fault == "answer lost" or process.dead:
                    _fail(answer, "it closed the connection")
                elif fault != "no answer":
                    error = task.exception()
                    if error is not None and not isinstance(error, Crashed):
                        world.bug(error, f"engine {engine.role} {name}")
                    elif not answer.done():
                        answer.set_result(task.result())

        task.add_done_callback(lambda _: world.loop.world_later(0.001, watch))
        process.on_death.append(lambda: world.loop.world_later(0.001, watch))


def _fail(answer: asyncio.Future[bytes], text: str) -> None:
    if not answer.done():
        answer.set_exception(ConnectionResetError(text))


@contextmanager
def toy_workers() -> Iterator[None]:
    """Workers attach to the toy model without vLLM's loader, and have no threads."""

    def attach(model: Any, config: Any, layout: Any, platform: str) -> Any:
        placement, homes = placed(model)
        return placement, homes.live

    before = place_model.attach_model, rank_module.BackgroundThread
    place_model.attach_model, rank_module.BackgroundThread = attach, InlineBackground  # type: ignore[misc]
    faults.ENABLED = True
    try:
        yield
    finally:
        place_model.attach_model, rank_module.BackgroundThread = before  # type: ignore[misc]
        faults.ENABLED = False
        faults.inject("apply", times=0)
