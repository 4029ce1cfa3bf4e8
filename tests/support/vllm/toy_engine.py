"""A whole engine in one process: two toy workers behind queues like vLLM's, a scheduler that only remembers.

What is real: the core, its judge, both workers with their threads, the chunks. What is not: vLLM. `ToyTransport` keeps
one reply queue per rank and gives up at the first error it reads, leaving the rest behind, as vLLM's executor does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from dcr_daemon.checkpoint.safetensors import write_safetensors
from dcr_daemon.engine import messages
from dcr_daemon.engine.messages import AnyCall
from dcr_daemon.engine.port import Attached, StreamFacts, Swapped, Transaction, VersionDelta
from dcr_daemon.vllm_plugin.core.engine_core import Core
from dcr_daemon.vllm_plugin.core.worker_group import WorkerGroup
from dcr_daemon.vllm_plugin.job_flags import JobFlags
from dcr_daemon.vllm_plugin.settings import Settings
from dcr_daemon.vllm_plugin.worker import extension
from dcr_daemon.vllm_plugin.worker.session import WorkerSession
from support.vllm.toy_model import LAYOUT, heldless, loaded
from support.vllm.worker_rig import Stub, random_lanes, step, vector, write_version

Answers = Callable[[int, dict[str, Any], dict[str, Any]], Any]


class ToyWorker(Stub, extension.WorkerExtension):
    """One rank of the toy, with guards and wraps as in vLLM's worker."""

    model = staticmethod(loaded)
    config: Any = None  #: of vLLM

    def __init__(self, lanes: list[np.ndarray], rank: int, of: int) -> None:
        import torch

        self.toy = self.model(lanes, rank, of)
        super().__init__(self.toy, self.config, rank)
        self._dcr_session = WorkerSession(
            rank=rank, model=self.toy, config=self.config, platform="cpu", device=torch.device("cpu")
        )
        extension.guard(self, self._dcr_session)

    def flip(self, parameter: str) -> None:
        """Other bits in every element, as failing memory leaves them."""
        import torch

        getattr(self.toy, parameter).data.view(torch.int16).bitwise_xor_(1)


class ToyTransport:
    """`edit(rank, call, reply)` may change a reply on its way; `left` are the queues, `sent` the operations."""

    def __init__(self, workers: list[ToyWorker]) -> None:
        self.workers = workers
        self.left: list[deque[Any]] = [deque() for _ in workers]
        self.sent: list[str] = []
        self.edit: Answers = lambda rank, call, reply: reply

    unsupported = ""

    def send(self, call: dict[str, Any]) -> list[Any] | None:
        self.sent.append(call["op"])
        for rank, one in enumerate(self.workers):
            self.left[rank].append(self.answer(rank, call, one))
        answers = []
        for queue in self.left:
            answer = queue.popleft()
            if isinstance(answer, Exception):
                return None
            answers.append(answer)
        return answers

    def answer(self, rank: int, call: dict[str, Any], one: ToyWorker) -> Any:
        return self.edit(rank, call, one.dcr_call(call))

    def next_reply(self, rank: int) -> Any:
        return self.left[rank].popleft()


class Ended(Exception):
    """The core ended its process."""


class ToyHost:
    """A scheduler's pause state. With `busy`, a pause is reached only when `rest` is called. `rests` counts pauses that
    handle the caches."""

    def __init__(self) -> None:
        self.paused = "no"
        self.rests = 0
        self.busy = False
        self.shown = ""
        self.guard: Callable[[], str] = lambda: ""
        self._rest: Future[None] | None = None

    @property
    def running(self) -> bool:
        return self.paused == "no"

    def pause(self) -> Future[None] | None:
        self.paused = "all"
        self.rests += 1
        self._rest = Future() if self.busy else None
        return self._rest

    def rest(self, error: Exception | None = None) -> None:
        """The engine came to rest, or failed to."""
        assert self._rest is not None
        if error is None:
            self._rest.set_result(None)
        else:
            self._rest.set_exception(error)

    def state(self) -> str:
        return self.paused

    def restore(self, state: str) -> None:
        if state == "no":
            self.resume()
        else:
            self.paused = state

    def resume(self) -> None:
        if reason := self.guard():
            raise RuntimeError(reason)
        self.paused = "no"

    def halt(self) -> None:
        self.paused = "all"

    def label(self, text: str) -> None:
        self.shown = text

    def end(self, reason: str) -> None:
        raise Ended(reason)


class ToyEngine:
    """Core, workers and the versions of their model. `call` waits for the answer as the endpoint would."""

    layout = LAYOUT

    def __init__(self, home: Path, *, ranks: int = 2, cap: int = 1 << 22, flags: JobFlags | None = None) -> None:
        self.home = home
        self.lanes = [self.first()]
        self.cuts: dict[int, Any] = {}  #: by version, how its trainer cuts tensors; whole ones else
        self.workers = [self.worker(rank, ranks) for rank in range(ranks)]
        self.wire = ToyTransport(self.workers)
        self.host = ToyHost()
        self.core = Core(self.host, WorkerGroup(self.wire, flags=flags), Settings(stage_cap=cap))
        self.host.guard = self.core.state.why_not_resume
        self.core.start_paused()
        self.owner = {"token": 0, "incarnation": ""}
        self._calls = 0
        path = home / "layout.json"
        path.write_bytes(self.layout.encoded)
        self.facts = StreamFacts(stream="s", layout=str(path), layout_digest=self.layout.digest)

    # -- versions ------------------------------------------------------------------------------------------------

    def first(self) -> list[np.ndarray]:
        return heldless(random_lanes(LAYOUT, 1))

    def worker(self, rank: int, of: int) -> ToyWorker:
        return ToyWorker(self.lanes[0], rank, of)

    def step(self, share: float = 0.2) -> int:
        self.lanes.append(heldless(step(self.lanes[-1], share, len(self.lanes))))
        return len(self.lanes) - 1

    def vector(self, version: int) -> np.ndarray:
        return vector(self.layout, self.lanes[version])

    def live_vector(self, version: int) -> bytes:
        """What attach tells when a version is live: nothing for the tensor that no loader reads."""
        found = self.vector(version)
        for index, spec in enumerate(self.layout):
            if spec.name == "head":
                found[index] = 0
        return found.astype("<u8").tobytes()

    def vector_file(self, version: int) -> str:
        path = self.home / f"vector-{version}.bin"
        path.write_bytes(self.vector(version).astype("<u8").tobytes())
        return str(path)

    def hop(self, version: int) -> VersionDelta:
        made = write_version(
            self.home / "chunks",
            self.layout,
            self.lanes[version - 1],
            self.lanes[version],
            version=version,
            target=2000,
            boxes=self.cuts.get(version),
        ).hop
        return VersionDelta(
            version=version,
            base=version - 1,
            attempt=made.attempt,
            chunks=made.chunks,
            before=self.vector_file(version - 1),
            after=self.vector_file(version),
        )

    def transaction(self, *versions: int, name: str = "txn") -> Transaction:
        return Transaction(id=name, hops=[self.hop(version) for version in versions], label=f"v{versions[-1]}")

    def anchor(self, version: int) -> str:
        path = self.home / f"anchor-{version}.safetensors"
        if not path.exists():
            write_safetensors(path, list(zip(self.layout, self.lanes[version], strict=True)))
        return str(path)

    def holds(self, version: int) -> bool:
        """Every byte of every rank is that of a fresh load of the version."""
        return all(
            one.toy.state() == loaded(self.lanes[version], one.rank, len(self.workers)).state() for one in self.workers
        )

    # -- calls ---------------------------------------------------------------------------------------------------

    def make(self, kind: type[AnyCall], **fields: Any) -> AnyCall:
        """A call of the present owner, under a fresh id."""
        self._calls += 1
        owner = self.owner if issubclass(kind, messages.Owned) else {}
        return kind(id=f"c{self._calls}", **{**owner, **fields})

    def send(self, call: AnyCall) -> Any:
        """Answer, or future of one, to a single call; no polling."""
        return self.core.handle(messages.decode_call(messages.encode(call)))

    def finish(self, call: AnyCall, answer: Any) -> Any:
        for _ in range(2000):
            if isinstance(answer, Future):
                answer = answer.result(timeout=10)
            if not isinstance(answer, messages.Pending):
                return messages.decode_answer(messages.encode(answer))
            time.sleep(0.002)
            answer = self.send(messages.Poll(id=call.id))
        raise AssertionError(f"{call} does not end")

    def ask(self, kind: type[AnyCall], result: Any = None, **fields: Any) -> Any:
        """The result of a call as `result`, or its error raised."""
        call = self.make(kind, **fields)
        return messages.result_of(self.finish(call, self.send(call)), result)

    def attach(self) -> Attached:
        attached = self.ask(messages.Attach, Attached, facts=self.facts)
        self.owner = {"token": attached.token, "incarnation": attached.incarnation}
        return attached

    def ready(self) -> ToyEngine:
        """Attached, proved at version 0, serving."""
        self.attach()
        self.ask(messages.Prove, version=0, vector=self.vector_file(0), label="v0")
        self.ask(messages.Serve)
        return self

    def refit(self, version: int, *, name: str = "txn") -> Swapped:
        self.prepare(version, name=name)
        return self.swap(name)

    def prepare(self, *versions: int, name: str = "txn") -> Any:
        from dcr_daemon.engine.port import Prepared

        return self.ask(messages.Prepare, Prepared, txn=self.transaction(*versions, name=name))

    def swap(self, name: str = "txn") -> Swapped:
        return self.ask(messages.Swap, Swapped, txn=name)

    def status(self) -> Any:
        return self.core.status()


def spoiled(answer: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A reply with other fields."""
    return {**answer, **fields}


def failing(answer: dict[str, Any], text: str = "failed by a test") -> dict[str, Any]:
    return spoiled(answer, ok=False, code="failed", error=text, result=None)
