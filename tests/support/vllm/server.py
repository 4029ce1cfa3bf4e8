"""A real vLLM server that tests share, the versions of its model, and an owner for each test."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dcr_daemon.canonical.fingerprint import Vector
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.engine import messages
from dcr_daemon.engine.port import Attached, StreamFacts, Verdict
from dcr_daemon.engine.vllm_client import VllmEngine
from dcr_daemon.errors import EngineRefused
from dcr_daemon.vllm_plugin import calls
from dcr_demo.processes import VllmServer, vllm_server
from support.streams.versions import Versions


class ModelVersions(Versions):
    """Versions of a real BF16 checkpoint. A step moves low mantissa bits, so that no value becomes wild."""

    def __init__(self, home: Path, model: Path, seed: int = 0) -> None:
        self.home = home
        self._random = np.random.default_rng(seed)
        self.cuts = {}
        with Checkpoint(model) as found:
            self.layout = found.layout
            self.values = [{spec.name: np.array(found.bits(spec.name)).reshape(-1) for spec in self.layout}]

    def step(self, rate: float = 0.03, *, base: int = -1) -> int:
        fresh = {name: bits.copy() for name, bits in self.values[base].items()}
        for bits in fresh.values():
            at = np.flatnonzero(self._random.random(bits.size) < rate)
            bits[at] ^= self._random.integers(1, 32, at.size).astype(bits.dtype)
        return self.put(fresh)

    @property
    def newest(self) -> int:
        return len(self.values) - 1

    def forget_after(self, version: int) -> None:
        """As if nothing later had been published: for a server that starts from its checkpoint again."""
        del self.values[version + 1 :]
        for anchor in self.home.glob("anchor-*"):
            shutil.rmtree(anchor)

    def claim(self, before: Vector, version: int) -> str:
        """A vector file that says: `before`, plus what this delta says it adds."""
        added = [0] * len(self.layout)
        for chunk in self.encode(version):
            for segment in chunk.segments:
                added[segment.tensor] += segment.after - segment.before
        after = np.array([(int(one) + more) % (1 << 64) for one, more in zip(before, added, strict=True)], dtype="<u8")
        path = self.home / f"claim-{version}.bin"
        path.write_bytes(after.astype("<u8").tobytes())
        return str(path)

    def facts_without(self, name: str) -> StreamFacts:
        """Facts of a stream whose layout lacks one tensor of the model."""
        layout = Layout(spec for spec in self.layout if spec.name != name)
        path = self.home / "short-layout.json"
        path.write_bytes(layout.encoded)
        return StreamFacts(stream="short", layout=str(path), layout_digest=layout.digest)

    def anchor(self, version: int) -> list[str]:
        """Files of a dense checkpoint of `version`."""
        out = self.home / f"anchor-{version}"
        if not out.exists():
            self.save(out, version)
        return [str(path) for path in sorted(out.glob("*.safetensors"))]

    def truncated_anchor(self, version: int) -> str:
        path = self.home / f"short-{version}.safetensors"
        path.write_bytes(Path(self.anchor(version)[0]).read_bytes()[:-4096])
        return str(path)


class Rig:
    """One server kept for the session. `own` brings it to a known state, whatever a test before left behind."""

    def __init__(self, server: VllmServer, versions: ModelVersions) -> None:
        self.server = server
        self.versions = versions
        self.engine = VllmEngine(server.socket)
        self.port = int(server.url.rsplit(":", 1)[1])
        self.birth: dict[str, Any] = {}
        self._numbers = itertools.count(100)

    def start(self) -> None:
        """Start the server and wait for its socket; the port may still be shut."""
        self.server.process.start()
        self.server.process.wait_ready(self.server.socket_open)

    def restart(self, model: Path | None = None) -> None:
        """A new server on the original checkpoint, or on another one; its port is shut until it is proved."""
        process = self.server.process
        process.stop()
        process.argv = [*process.argv[:2], str(model or self.server.model), *process.argv[3:]]
        self.versions.forget_after(0)
        self.start()

    async def observe_birth(self) -> dict[str, Any]:
        """What a server is like before anybody has proved it."""
        engine = VllmEngine(self.server.socket)
        born: dict[str, Any] = {"healthy": self.server.healthy(), "status": await engine.status()}
        born["attached"] = await engine.attach(self.versions.facts())
        try:
            await engine.serve()
        except EngineRefused as error:
            born["refusal"] = str(error)
        return born

    @property
    def alive(self) -> bool:
        return self.server.process.poll() is None

    async def own(self) -> VllmEngine:
        """A new owner, with the engine at the newest version and serving."""
        if not self.alive:
            self.restart()
        return await self.own_at(self.versions.newest)

    async def own_at(self, newest: int) -> VllmEngine:
        """A new owner, with the engine at that version and serving."""
        versions, label = self.versions, f"v{newest}"
        self.engine = VllmEngine(self.server.socket)
        attached = await self.engine.attach(versions.facts())
        if attached.adopted is not None:
            await self.engine.finish_adopted(attached.adopted)
            attached = await self.engine.attach(versions.facts())
        if attached.adopted is not None or attached.vector != versions.vector(newest).tobytes():
            loaded = await self.engine.load(newest, versions.anchor(newest), versions.vector_file(newest), label)
            assert loaded.verdict is Verdict.COMMITTED, loaded
        await self.engine.prove(newest, versions.vector_file(newest), label)
        await self.engine.serve()
        self.server.process.wait_ready(self.server.healthy)
        return self.engine

    async def live(self) -> bytes:
        """The vector of the live weights, summed by a new owner over everything."""
        return await self.live_of(self.versions)

    async def live_of(self, versions: ModelVersions) -> bytes:
        """The same, by an owner who follows another stream of this model."""
        attached: Attached = await VllmEngine(self.server.socket).attach(versions.facts())
        assert attached.adopted is None
        return attached.vector

    async def refit(self, version: int) -> Any:
        """Prepare and swap one version as the present owner."""
        await self.engine.prepare(self.versions.transaction(version))
        return await self.engine.swap(f"to-{version}")

    async def stranger(self, seed: int) -> tuple[ModelVersions, int]:
        """Another history of the same model, one version longer than ours, and our newest version, which is not 0."""
        await self.own()  # first: a server that has to be restarted begins again at version 0
        if self.versions.newest == 0:
            self.versions.step()
            await self.own()
        other = ModelVersions(self.fresh_home(), self.server.model, seed=seed)
        while other.newest <= self.versions.newest:
            other.step()
        return other, self.versions.newest

    def draft(self, rate: float = 0.03) -> ModelVersions:
        """The same history with one version more, which this rig's own versions do not have."""
        draft = ModelVersions(self.fresh_home(), self.server.model, seed=next(self._numbers))
        draft.values = list(self.versions.values)
        draft.step(rate)
        return draft

    def fresh_home(self) -> Path:
        home = self.versions.home / f"other-{next(self._numbers)}"
        home.mkdir()
        return home

    def weight_version(self) -> str:
        return str(json.loads(self.get("/weight_info")[1])["weight_version"])

    async def becomes_unhealthy(self) -> bool:
        """/health is 503 as soon as the API server has looked; false if it never is."""
        for _ in range(100):
            if self.get("/health")[0] == 503:
                return True
            await asyncio.sleep(0.1)
        return False

    async def hang_up_after_swap(self, txn: str) -> None:
        """Send a swap as the present owner and close the connection at once."""
        engine = self.engine
        call = messages.Swap(id="hung-up", txn=txn, token=engine._token, incarnation=engine._incarnation)
        _, writer = await asyncio.open_unix_connection(str(self.server.socket))
        writer.write(messages.frame(messages.encode(call)))
        await writer.drain()
        writer.close()

    def plant(self, fault: str, **how: Any) -> None:
        """Let something fail in every worker (or in one `rank`), through vLLM's development routes; see `faults`."""
        self._fault({"name": fault, **how})

    def flip(self, tensor: str, **where: Any) -> None:
        """A bit of a canonical tensor flips in every worker's memory, or in that of one `rank`."""
        self._fault({"damage": tensor, **where})

    def workers(self) -> list[calls.Status]:
        """What each worker says of itself."""
        return [calls.parse(reply["result"], calls.Status) for reply in self._ask_workers("status", {})]

    def _fault(self, argument: dict[str, Any]) -> None:
        self._ask_workers("fault", argument)

    def _ask_workers(self, op: str, argument: dict[str, Any]) -> list[dict[str, Any]]:
        status, body = self.post("/collective_rpc", {"method": "dcr_call", "args": [_call(op, argument)]})
        assert status == 200, body
        replies: list[dict[str, Any]] = json.loads(body)["results"]
        assert all(reply["ok"] for reply in replies), body
        return replies

    def post(self, path: str, body: Any = None) -> tuple[int, str]:
        """Status and text of a POST; an HTTP error is an answer too."""
        request = urllib.request.Request(
            self.server.url + path,
            json.dumps(body).encode() if body is not None else b"",
            {"Content-Type": "application/json"},
        )
        return _answer(request)

    def get(self, path: str) -> tuple[int, str]:
        return _answer(urllib.request.Request(self.server.url + path))

    async def complete(self, prompt: str, **fields: Any) -> dict[str, Any]:
        return await asyncio.to_thread(self.server.complete, prompt, **fields)


def _answer(request: urllib.request.Request) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _call(op: str, arg: dict[str, Any]) -> dict[str, Any]:
    return {"op": op, "call": "test", "token": 0, "arg": arg}


@contextmanager
def rig(
    model: Path,
    work: Path,
    name: str,
    *,
    tensor_parallel: int = 1,
    extra: Sequence[str] = (),
    without: Sequence[str] = (),
    env: dict[str, str] | None = None,
) -> Iterator[Rig]:
    """A server of `model`, started with `extra` options and `without` some of the usual ones, and stopped. Faults may
    be planted, and vLLM's own routes may attack it."""
    home = work / "stage"
    home.mkdir(parents=True)
    test_only = {"DCR_TEST_FAULTS": "1", "VLLM_SERVER_DEV_MODE": "1", **(env or {})}
    server = vllm_server(model, work, name=name, tensor_parallel=tensor_parallel, extra=extra, env=test_only)
    server.process.argv = [part for part in server.process.argv if part not in without]
    made = Rig(server, ModelVersions(home, model))
    try:
        made.start()
        made.birth = asyncio.run(made.observe_birth())
        yield made
    finally:
        server.process.stop()
