"""The private socket and the gate: permissions, a live socket never replaced, calls that outlive their clients."""

# ruff: noqa: ASYNC240  these tests look at the local file of the socket, which takes no time

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.vllm.toy_engine import ToyEngine, failing

from dcr_daemon.engine import messages
from dcr_daemon.engine.port import EngineGone, Swapped, Verdict
from dcr_daemon.engine.vllm_client import VllmEngine
from dcr_daemon.errors import EngineRefused, Fenced, UsageError
from dcr_daemon.vllm_plugin.compat import UnsupportedVllm
from dcr_daemon.vllm_plugin.core import hooks
from dcr_daemon.vllm_plugin.endpoint import CONNECTIONS, Endpoint, EngineGroup, SocketServer
from dcr_daemon.vllm_plugin.settings import Settings
from dcr_daemon.vllm_plugin.weights import faults

exceptions = pytest.importorskip("vllm.v1.engine.exceptions")


pytestmark = pytest.mark.usefixtures("toy_loader")


class CoreClient:
    """vLLM's client of its engines, without the processes: a utility call per engine."""

    def __init__(self, *engines: ToyEngine, client_index: int = 0) -> None:
        self.client_index = client_index
        self.cores = [SimpleNamespace(dcr=engine.core) for engine in engines]
        self.dead = False
        self.gate: asyncio.Event | None = None

    async def call_utility_all_async(self, method: str, record: bytes) -> list[bytes]:
        assert method == hooks.METHOD
        if self.dead:
            raise exceptions.EngineDeadError
        if self.gate is not None:
            await self.gate.wait()
        answers = [hooks.dcr_core(core, record) for core in self.cores]
        return [one if isinstance(one, bytes) else await asyncio.wrap_future(one) for one in answers]


@pytest.fixture
def engine(tmp_path: Path) -> ToyEngine:
    home = tmp_path / "engine"
    home.mkdir()
    return ToyEngine(home)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The socket; its directory does not exist yet."""
    return tmp_path / "run" / "e.sock"


@asynccontextmanager
async def listening(path: Path, *engines: ToyEngine) -> AsyncIterator[CoreClient]:
    client = CoreClient(*engines)
    server = SocketServer(path, EngineGroup(client))
    await server.open()
    try:
        yield client
    finally:
        await server.close()


@asynccontextmanager
async def serving(path: Path, *engines: ToyEngine) -> AsyncIterator[tuple[VllmEngine, CoreClient]]:
    """Engines that serve version 0 behind a socket, and their owner."""
    async with listening(path, *engines) as client:
        owner = VllmEngine(path)
        await prove_and_serve(owner, engines[0])
        yield owner, client


async def prove_and_serve(owner: VllmEngine, engine: ToyEngine) -> None:
    await owner.attach(engine.facts)
    await owner.prove(0, engine.vector_file(0), "v0")
    await owner.serve()


async def test_the_whole_port_over_the_socket(path: Path, engine: ToyEngine) -> None:
    version = engine.step()
    async with serving(path, engine) as (owner, _):
        assert (await owner.prepare(engine.transaction(version))).fits == 1
        assert (await owner.status()).prepared == "txn"
        await owner.drop()
        await owner.prepare(engine.transaction(version))
        swapped = await owner.swap("txn")
        assert swapped.verdict is Verdict.COMMITTED
        assert await owner.outcome("txn") == swapped
        report = await owner.inspect()
        assert (report.version, len(report.tensors)) == (version, len(engine.vector(0)))
        assert len(await owner.checksums()) == 2
        loaded = await owner.load(0, [engine.anchor(0)], engine.vector_file(0), "v0")
        assert loaded.verdict is Verdict.COMMITTED
        await owner.close()


async def test_socket_and_directory_are_private(path: Path, engine: ToyEngine) -> None:
    async with listening(path, engine):
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not path.exists()


async def test_a_directory_open_to_others_is_refused(tmp_path: Path, engine: ToyEngine) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    with pytest.raises(UnsupportedVllm, match="open to others"):
        await SocketServer(shared / "e.sock", EngineGroup(CoreClient(engine))).open()


async def test_a_live_socket_is_never_replaced_and_a_dead_one_is(path: Path, engine: ToyEngine) -> None:
    async with listening(path, engine):
        with pytest.raises(UnsupportedVllm, match="another live server"):
            await SocketServer(path, EngineGroup(CoreClient(engine))).open()
        assert (await VllmEngine(path).status()).serving is False
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()  # as a killed server leaves it
    async with listening(path, engine):
        assert (await VllmEngine(path).status()).serving is False


async def test_what_is_no_socket_is_not_removed(path: Path, engine: ToyEngine) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_text("mine")
    with pytest.raises(UnsupportedVllm, match="not a socket"):
        await SocketServer(path, EngineGroup(CoreClient(engine))).open()
    assert path.read_text() == "mine"


async def test_a_swap_runs_on_when_its_client_hangs_up(path: Path, engine: ToyEngine) -> None:
    version = engine.step()
    async with serving(path, engine) as (owner, client):
        await owner.prepare(engine.transaction(version))
        client.gate = asyncio.Event()
        waiting = asyncio.create_task(owner.swap("txn"))
        await asyncio.sleep(0.05)
        waiting.cancel()
        client.gate.set()
        other = VllmEngine(path)
        for _ in range(200):
            if (await other.outcome("txn")).verdict is Verdict.COMMITTED:
                break
            await asyncio.sleep(0.01)
        assert engine.holds(version)


async def test_status_answers_while_a_prepare_runs(path: Path, engine: ToyEngine) -> None:
    version = engine.step()
    async with serving(path, engine) as (owner, _):
        faults.inject("slow", times=1000, seconds=0.01)
        preparing = asyncio.create_task(owner.prepare(engine.transaction(version)))
        await asyncio.sleep(0.02)
        assert (await VllmEngine(path).status()).serving
        assert not preparing.done()
        faults.inject("slow", times=0)
        await preparing


async def test_patience_ends_the_wait_and_not_the_call(path: Path, engine: ToyEngine) -> None:
    async with listening(path, engine) as client:
        client.gate = asyncio.Event()
        with pytest.raises(EngineGone, match="no answer to status within"):
            await VllmEngine(path, timeout=0.05).status()
        client.gate.set()


async def test_a_dead_engine_is_gone_and_an_unforeseen_failure_is_told(path: Path, engine: ToyEngine) -> None:
    async with listening(path, engine) as client:
        client.dead = True
        with pytest.raises(EngineGone, match="dead"):
            await VllmEngine(path).status()
        client.dead = False
        client.cores = [SimpleNamespace(dcr=None)]
        with pytest.raises(EngineGone, match="the engine failed"):
            await VllmEngine(path).status()


async def exchange(path: Path, body: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(body)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


async def test_nonsense_gets_a_refusal_or_a_closed_connection_and_never_more(path: Path, engine: ToyEngine) -> None:
    async with listening(path, engine):
        for record in (b"", b"\xc1", os.urandom(40), messages.encode(messages.Poll(id="x"))):
            answer = messages.decode_answer((await exchange(path, messages.frame(record)))[4:])
            assert isinstance(answer, messages.Refused)
            assert answer.kind == "Misuse"
        assert await exchange(path, struct.pack(">I", messages.FRAME_LIMIT + 1)) == b""
        assert await exchange(path, struct.pack(">I", 100) + b"cut off") == b""
        other = messages.encode(messages.Status(id="x", protocol=99))
        answer = messages.decode_answer((await exchange(path, messages.frame(other)))[4:])
        with pytest.raises(UsageError, match="protocol 99"):
            messages.result_of(answer, dict)
        assert (await VllmEngine(path).status()).serving is False


async def stuck_clients(path: Path, count: int, sent: bytes) -> list[asyncio.StreamWriter]:
    """Connections that never say the rest of what they began, or never read."""
    writers = []
    for _ in range(count):
        _, writer = await asyncio.open_unix_connection(str(path))
        writer.write(sent)
        await writer.drain()
        writers.append(writer)
    return writers


STUCK = {
    "silent": b"",
    "half a length": b"\0\0",
    "half a call": struct.pack(">I", 100) + b"half",
    "a whole limit announced": struct.pack(">I", messages.FRAME_LIMIT) + b"x",
    "answers not read": messages.frame(messages.encode(messages.Status(id="x"))) * 3,
}


@pytest.mark.parametrize("sent", STUCK.values(), ids=STUCK)
async def test_clients_that_are_stuck_hold_nobody_up(path: Path, engine: ToyEngine, sent: bytes) -> None:
    version = engine.step()
    async with listening(path, engine):
        owner = VllmEngine(path, timeout=20)
        writers = await stuck_clients(path, 80, sent)
        await prove_and_serve(owner, engine)
        writers += await stuck_clients(path, 80, sent)
        await owner.prepare(engine.transaction(version))
        assert (await owner.swap("txn")).verdict is Verdict.COMMITTED
        for writer in writers:
            writer.close()


async def test_a_call_that_is_under_way_is_never_dropped_for_others(path: Path, engine: ToyEngine) -> None:
    version = engine.step()
    async with serving(path, engine) as (owner, client):
        await owner.prepare(engine.transaction(version))
        client.gate = asyncio.Event()
        swapping = asyncio.create_task(owner.swap("txn"))
        await asyncio.sleep(0.05)
        writers = await stuck_clients(path, 200, b"")
        await asyncio.sleep(0.05)
        assert not swapping.done()
        client.gate.set()
        assert (await swapping).verdict is Verdict.COMMITTED
        for writer in writers:
            writer.close()


async def test_when_every_client_has_a_call_under_way_another_is_turned_away(path: Path, engine: ToyEngine) -> None:
    async with listening(path, engine) as client:
        client.gate = asyncio.Event()
        waiting = [asyncio.create_task(VllmEngine(path).status()) for _ in range(CONNECTIONS)]
        await asyncio.sleep(0.3)
        with pytest.raises(EngineGone):
            await VllmEngine(path).status()
        client.gate.set()
        assert len(await asyncio.gather(*waiting)) == CONNECTIONS
        assert (await VllmEngine(path).status()).serving is False


@pytest.mark.parametrize("call", ["attach", "prove", "prepare", "swap", "load", "scrub"])
async def test_a_client_that_vanishes_in_the_middle_of_a_call_leaves_nothing_stuck(
    path: Path, engine: ToyEngine, call: str
) -> None:
    version = engine.step()
    async with serving(path, engine) as (owner, _):
        if call == "swap":
            await owner.prepare(engine.transaction(version))
        faults.inject("slow", times=100_000, seconds=0.01)
        calls = {
            "attach": lambda: owner.attach(engine.facts),
            "prove": lambda: owner.prove(0, engine.vector_file(0), "v0"),
            "prepare": lambda: owner.prepare(engine.transaction(version)),
            "swap": lambda: owner.swap("txn"),
            "load": lambda: owner.load(version, [engine.anchor(version)], engine.vector_file(version), "v1"),
            "scrub": lambda: owner.scrub(1.0),
        }
        gone = asyncio.create_task(calls[call]())
        await asyncio.sleep(0.05)
        gone.cancel()
        faults.inject("slow", times=0)
        other = VllmEngine(path)
        attached = await other.attach(engine.facts)
        if attached.adopted is not None:
            await other.finish_adopted(attached.adopted)
            attached = await other.attach(engine.facts)
        (at,) = [n for n in (0, version) if attached.vector == engine.live_vector(n)]
        await other.prove(at, engine.vector_file(at), f"v{at}")
        await other.serve()
        for newer in range(at + 1, engine.step() + 1):
            await other.prepare(engine.transaction(newer, name=f"t{newer}"))
            assert (await other.swap(f"t{newer}")).verdict is Verdict.COMMITTED
        assert engine.holds(2)


# -- several engines --------------------------------------------------------------------------------------------------


async def test_dense_data_parallel_engines_move_together(path: Path, pair: tuple[ToyEngine, ToyEngine]) -> None:
    one, two = pair
    version = 1
    async with serving(path, one, two) as (owner, _):
        await owner.prepare(one.transaction(version))
        swapped = await owner.swap("txn")
        assert swapped.verdict is Verdict.COMMITTED
        assert list(swapped.phases) == ["commit", "resume", "rest", "begin", "apply", "sums"], "of both rounds"
        assert sum(swapped.phases.values()) <= swapped.pause
        assert one.holds(version)
        assert two.holds(version)
        first = owner
        owner = VllmEngine(path)
        await owner.attach(one.facts)
        with pytest.raises(Fenced):
            await first.drop()
        assert len((await owner.inspect()).tensors[0].held) == 4


@pytest.fixture
def pair(tmp_path: Path) -> tuple[ToyEngine, ToyEngine]:
    """Two data parallel engines of two ranks each, with one version to come."""
    engines = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        engines.append(ToyEngine(tmp_path / name))
        engines[-1].step()
    return engines[0], engines[1]


def together(pair: tuple[ToyEngine, ToyEngine], version: int, serving: bool) -> None:
    for engine in pair:
        assert engine.holds(version)
        assert (engine.status().version, engine.host.running, engine.status().begun) == (version, serving, None)


@pytest.mark.parametrize("bad", [0, 1])
async def test_if_one_engine_cannot_go_forward_none_does(
    path: Path, pair: tuple[ToyEngine, ToyEngine], bad: int
) -> None:
    async with serving(path, *pair) as (owner, _):
        await owner.prepare(pair[0].transaction(1))
        pair[bad].wire.edit = lambda rank, call, reply: failing(reply) if call["op"] == "apply" else reply
        swapped = await owner.swap("txn")
        assert (swapped.verdict, swapped.version, swapped.serving) == (Verdict.ROLLED_BACK, 0, True)
        assert f"engine {1 - bad}: rolled back another engine could not" in swapped.reason
        together(pair, 0, serving=True)
        pair[bad].wire.edit = lambda rank, call, reply: reply
        await owner.prepare(pair[0].transaction(1, name="again"))
        assert (await owner.swap("again")).verdict is Verdict.COMMITTED
        together(pair, 1, serving=True)


async def test_engines_take_a_version_without_changes_together_and_without_a_pause(
    path: Path, pair: tuple[ToyEngine, ToyEngine]
) -> None:
    for engine in pair:
        engine.lanes[1] = [lanes.copy() for lanes in engine.lanes[0]]
    async with serving(path, *pair) as (owner, _):
        await owner.prepare(pair[0].transaction(1))
        rests = [engine.host.rests for engine in pair]
        swapped = await owner.swap("txn")
        assert (swapped.verdict, swapped.version, swapped.pause) == (Verdict.COMMITTED, 1, 0.0)
        assert [engine.host.rests for engine in pair] == rests
        together(pair, 1, serving=True)


@pytest.mark.parametrize("bad", [0, 1])
async def test_an_engine_that_refuses_a_version_without_changes_is_told_and_nothing_is_begun(
    path: Path, pair: tuple[ToyEngine, ToyEngine], bad: int
) -> None:
    for engine in pair:
        engine.lanes[1] = [lanes.copy() for lanes in engine.lanes[0]]
    async with serving(path, *pair) as (owner, _):
        await owner.prepare(pair[0].transaction(1))
        pair[bad].core.state.forget_prepared()
        with pytest.raises(EngineRefused, match=f"engine {bad}: transaction txn is not prepared"):
            await owner.swap("txn")
        again = VllmEngine(path)
        attached = await again.attach(pair[0].facts)
        assert (attached.adopted, attached.vector) == (None, pair[0].live_vector(1))
        await again.prove(1, pair[0].vector_file(1), "v1")
        await again.serve()
        together(pair, 1, serving=True)


@pytest.mark.parametrize("bad", [0, 1])
async def test_an_engine_that_refuses_a_swap_takes_the_others_back(
    path: Path, pair: tuple[ToyEngine, ToyEngine], bad: int
) -> None:
    async with serving(path, *pair) as (owner, _):
        await owner.prepare(pair[0].transaction(1))
        pair[bad].core.state.forget_prepared()
        swapped = await owner.swap("txn")
        assert (swapped.verdict, swapped.version) == (Verdict.ROLLED_BACK, 0)
        together(pair, 0, serving=True)


@pytest.mark.parametrize("bad", [False, True])
async def test_a_joint_change_whose_judge_died_is_settled_jointly_by_the_next_owner(
    path: Path, pair: tuple[ToyEngine, ToyEngine], bad: bool
) -> None:
    """Both have written and hold when the one who was to decide is gone; later one of them is `bad`."""
    async with serving(path, *pair) as (owner, _):
        await owner.prepare(pair[0].transaction(1))
        for one in pair:
            one.owner = {"token": owner._token, "incarnation": one.core.state.incarnation}
            held = one.ask(messages.Swap, Swapped, txn="txn", hold=True)
            assert (held.verdict, held.serving) == (Verdict.BEGUN, False)
        if bad:
            pair[1].wire.edit = lambda rank, call, reply: failing(reply) if call["op"] == "apply" else reply
        other = VllmEngine(path)
        assert (await other.attach(pair[0].facts)).adopted == "txn"
        settled = await other.finish_adopted("txn")
        assert settled.verdict is (Verdict.ROLLED_BACK if bad else Verdict.COMMITTED)
        together(pair, 0 if bad else 1, serving=True)


async def test_engines_that_differ_are_of_no_version_and_repaired_by_a_load(
    path: Path, pair: tuple[ToyEngine, ToyEngine]
) -> None:
    async with listening(path, *pair):
        pair[0].attach()
        one = pair[1]
        one.attach()
        one.ask(messages.Load, Swapped, version=1, files=[one.anchor(1)], vector=one.vector_file(1), label="v1")
        owner = VllmEngine(path)
        attached = await owner.attach(pair[0].facts)
        assert attached.version is None
        assert attached.vector not in (pair[0].live_vector(0), pair[0].live_vector(1))
        with pytest.raises(EngineRefused):
            await owner.prove(0, pair[0].vector_file(0), "v0")
        loaded = await owner.load(1, [pair[0].anchor(1)], pair[0].vector_file(1), "v1")
        assert loaded.verdict is Verdict.COMMITTED
        await owner.serve()
        together(pair, 1, serving=True)


async def test_damage_in_one_of_several_engines_is_found_and_told_by_its_number(
    path: Path, pair: tuple[ToyEngine, ToyEngine]
) -> None:
    async with serving(path, *pair) as (owner, _):
        assert (await owner.scrub(0)).differing == []
        pair[1].workers[0].dcr_call({"op": "fault", "call": "x", "token": 0, "arg": {"damage": "k"}})
        found = await owner.scrub(0)
        assert [(one.tensor, one.engine, one.ranks) for one in found.differing] == [("k", 1, [0])]
        assert (await owner.status()).serving is False


# -- the gate ---------------------------------------------------------------------------------------------------------


class Health:
    """What vLLM's API server asks of an endpoint plugin, and what a load balancer asks of it."""

    def __init__(self, settings: Settings, client: CoreClient) -> None:
        from fastapi import FastAPI

        self.endpoint = Endpoint(settings)
        self.app = FastAPI()
        self.client = SimpleNamespace(engine_core=client, check_health=self._check)
        self.app.state.engine_client = self.client
        self.endpoint.attach_router(self.app)

    async def _check(self) -> None:
        if self.client.engine_core.dead:
            raise exceptions.EngineDeadError

    async def init(self) -> None:
        await self.endpoint.init_state(self.client, self.app.state, SimpleNamespace())

    async def status(self) -> int:
        (route,) = [route for route in self.app.routes if getattr(route, "path", "") == "/health"]
        answer = await route.endpoint()
        return int(answer.status_code)

    async def becomes(self, status: int) -> bool:
        for _ in range(100):
            if await self.status() == status:
                return True
            await asyncio.sleep(0.02)
        return False


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "dcr,dcr_endpoint")


async def test_without_the_guards_in_the_engine_the_server_does_not_start(
    tmp_path: Path, engine: ToyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "dcr_endpoint")
    with pytest.raises(UnsupportedVllm, match="VLLM_PLUGINS=dcr,dcr_endpoint"):
        await Health(Settings(socket=tmp_path / "run" / "e.sock"), CoreClient(engine)).init()
    assert not (tmp_path / "run").exists()


async def test_the_port_is_held_until_the_engine_serves(path: Path, engine: ToyEngine) -> None:
    server = Health(Settings(socket=path), CoreClient(engine))
    opening = asyncio.create_task(server.init())
    while not path.exists():  # noqa: ASYNC110  the server makes it
        await asyncio.sleep(0.005)
    owner = VllmEngine(path)
    await owner.attach(engine.facts)
    await owner.prove(0, engine.vector_file(0), "v0")
    await asyncio.sleep(0.3)
    assert not opening.done()
    await owner.serve()
    await opening
    assert await server.becomes(200)


async def test_a_second_api_server_waits_too_and_opens_no_socket(path: Path, engine: ToyEngine) -> None:
    server = Health(Settings(socket=path), CoreClient(engine, client_index=1))
    opening = asyncio.create_task(server.init())
    await asyncio.sleep(0.3)
    assert not opening.done()
    assert not path.exists()
    engine.ready()
    await opening


async def test_health_follows_proof_and_death_but_not_a_pause(tmp_path: Path, engine: ToyEngine) -> None:
    server = Health(Settings(socket=tmp_path / "run" / "e.sock", gate="health"), CoreClient(engine))
    await server.init()
    assert await server.status() == 503
    engine.ready()
    assert await server.becomes(200)
    engine.host.halt()  # an operator's pause, or a swap
    await asyncio.sleep(0.4)
    assert await server.status() == 200
    engine.core.state.unprove("a test says so")
    assert await server.becomes(503)
    engine.ready()
    assert await server.becomes(200)
    server.client.engine_core.dead = True
    assert await server.status() == 503


async def test_a_dead_engine_ends_the_wait_at_the_gate(tmp_path: Path, engine: ToyEngine) -> None:
    server = Health(Settings(socket=tmp_path / "run" / "e.sock"), CoreClient(engine))
    opening = asyncio.create_task(server.init())
    await asyncio.sleep(0.05)
    server.client.engine_core.dead = True
    with pytest.raises(EngineGone):
        await opening


async def test_without_a_socket_or_an_engine_the_plugin_does_nothing(tmp_path: Path, engine: ToyEngine) -> None:
    off = Health(Settings(), CoreClient(engine))
    await off.init()
    assert not [route for route in off.app.routes if getattr(route, "path", "") == "/health"]
    render = Endpoint(Settings(socket=tmp_path / "run" / "e.sock"))
    await render.init_state(None, SimpleNamespace(), SimpleNamespace())
    assert not (tmp_path / "run").exists()
