"""A real publishing session on a tiny model and a store in memory, any request of which can be made to fail.

Nothing here decides anything: sessions, ledgers and verdicts are the product's. Byte work runs inline and no time
passes, so a run is the same every time, and a loop over all of its requests is quick.
"""

from __future__ import annotations

import asyncio
import gc
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcr_daemon import runtime
from dcr_daemon.canonical.dtypes import bits_dtype
from dcr_daemon.canonical.fingerprint import Bits, fingerprint
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.directory import write_checkpoint
from dcr_daemon.checkpoint.pieces import read_pieces
from dcr_daemon.checkpoint.safetensors import SafetensorsBytes
from dcr_daemon.codec.decode import open_chunk
from dcr_daemon.errors import StoreUnavailable
from dcr_daemon.ledger.fold import begin, fold
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.objects import Objects
from dcr_daemon.ledger.records import AnyRecord
from dcr_daemon.publish.group.leader import Leader
from dcr_daemon.publish.group.opening import open_leader
from dcr_daemon.publish.options import PublishOptions
from dcr_daemon.store.port import Outcome, Store
from support.events import RecordedEvents
from support.stores.memory import MemoryStore
from support.virtual_time import VirtualTimeRuntime

Weights = dict[str, Bits]
SPECS = [TensorSpec("a", "BF16", (12, 8)), TensorSpec("b", "F32", (7,)), TensorSpec("c", "U8", ())]


class InlineExecutor(Executor):
    """Runs a job when it is submitted."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - it is the caller's, and raised there
            future.set_exception(error)
        return future


class InlineRuntime(VirtualTimeRuntime):
    """No time passes and no thread runs."""

    def executor(self, count: int) -> Executor:
        return InlineExecutor()


class Dead(BaseException):
    """The process ends at this instant: nothing of it runs any more, no `except` of its own either."""


class FaultyStore(MemoryStore):
    """Calls `spoil(number, operation, key)` at each request, probes aside; what that answers befalls the request.

    `lost`: the request never arrives; `unheard`: it takes effect and its answer is lost; `ghost`: it arrives three
    requests later; `dead before`, `dead after`: the process ends before or after it took effect.
    """

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        super().__init__()
        self.objects = dict(objects or {})
        self.spoil: Callable[[int, str, str], str | Awaitable[None] | None] = lambda number, operation, key: None
        self.number = 0
        self.dead = False  #: nothing of the process reaches the bucket any more; whoever starts the next one resets it
        self.log: list[str] = []
        self._late: list[tuple[int, str, bytes]] = []

    async def _befalls(self, operation: str, key: str) -> str:
        if self.dead:
            raise Dead
        self.number += 1
        self.log.append(f"{operation} {key}")
        for at, late, body in [ghost for ghost in self._late if ghost[0] <= self.number]:
            self._late.remove((at, late, body))
            self._put(late, body)
        fate = self.spoil(self.number, operation, key)
        if fate is not None and not isinstance(fate, str):
            await fate
            return ""
        self.dead = str(fate).startswith("dead")
        if fate == "dead before":
            raise Dead
        return fate or ""

    async def get(self, key: str, *, limit: int, keep: Any = None) -> bytes:
        fate = "" if key.startswith("probe/") else await self._befalls("get", key)
        if fate in ("lost", "unheard", "ghost"):
            raise StoreUnavailable(f"no answer to a read of {key}")
        try:
            return await super().get(key, limit=limit)
        finally:
            if fate == "dead after":
                raise Dead

    async def create(self, key: str, body: bytes | memoryview) -> Outcome:
        fate = "" if key.startswith("probe/") else await self._befalls("create", key)
        if fate == "ghost":
            self._late.append((self.number + 3, key, bytes(body)))
        if fate in ("lost", "ghost"):
            return Outcome.UNKNOWN
        outcome = await super().create(key, body)
        if fate == "dead after":
            raise Dead
        return Outcome.UNKNOWN if fate == "unheard" else outcome


@dataclass(frozen=True)
class ArraySource:
    given: TensorSpec
    bits: Bits

    def read(self, start: int, count: int, dtype: str) -> Bits:
        return self.bits[start : start + count]


class SmallWorld:
    """A layout, a base checkpoint, and state directories by publisher name, all below `root`."""

    def __init__(self, root: Path) -> None:
        self.root, self.layout = root, Layout(SPECS)
        self.events = RecordedEvents()
        self.base = self.draw(0)
        write_checkpoint(
            root / "base",
            self.layout,
            bits_of=self.base.__getitem__,
            side_files={"config.json": b"{}"},
            shard_bytes=1 << 20,
        )

    def draw(self, seed: int) -> Weights:
        rng = np.random.default_rng(seed)
        return {s.name: rng.integers(0, 256, s.nbytes, dtype=np.uint8).view(bits_dtype(s.width)) for s in self.layout}

    def options(self, **more: Any) -> PublishOptions:
        name = more.get("name", "one")
        chosen: dict[str, Any] = {
            "state": self.root / name, "base": self.root / "base", "create": True, "name": name, "workers": 1,
            "uploads": 1, "patience": 1.0, "chunk_bytes": 64, "anchor_every": 2, "scrub_rate": 0.0,
        }  # fmt: skip
        return PublishOptions(**chosen | more)

    async def open(self, store: Store, **more: Any) -> Leader:
        return await open_leader(self.options(**more), store, emit=self.events)

    def forget(self, *names: str) -> None:
        """Wipe state directories and events."""
        for name in names:
            shutil.rmtree(self.root / name, ignore_errors=True)
        self.events.clear()

    async def diff(self, session: Leader, weights: Weights, *, step: int | None = None) -> Any:
        attempt = await session.begin(step=step)
        await attempt.diff([(n, ArraySource(spec, weights[spec.name])) for n, spec in enumerate(session.layout)])
        await attempt.finish()
        return attempt

    async def publish(self, session: Leader, weights: Weights) -> None:
        """Until it is a version, as a watcher does it; whatever the bucket does meanwhile."""
        for _ in range(20):
            try:
                attempt = await self.diff(session, weights)
                await session.seal(attempt)
                return
            except StoreUnavailable:
                if await self.settle(session):
                    return
        raise AssertionError("it was not published in 20 tries")

    async def settle(self, session: Leader) -> Any:
        for _ in range(20):
            try:
                return await session.abort_unless_sealed("the bucket did not answer")
            except StoreUnavailable:
                pass
        raise AssertionError("it was not settled in 20 tries")

    async def proved(self, session: Leader) -> bool:
        """Whether the baseline is the newest sealed version, by its bytes."""
        return session.context.baseline.version == session.head and np.array_equal(
            await session.context.baseline.fingerprint(), session.context.baseline.vector
        )

    async def versions(self, store: MemoryStore) -> list[Weights]:
        """Every version rebuilt by a stranger from version 0 and the chain; vectors and anchors checked on the way."""
        history(store)
        ledger = Ledger(store)
        await ledger.read()
        objects = Objects(store, floor=lambda: 0, patience=0)
        arrays = {name: bits.copy() for name, bits in self.base.items()}
        found = [{name: bits.copy() for name, bits in arrays.items()}]
        for seal in await ledger.history.between(1):
            for part in await objects.read_parts(seal):
                for ref in part.chunks:
                    chunk = open_chunk(await objects.read_chunk(ref, seal.version), self.layout)
                    for n, segment in enumerate(chunk.segments):
                        changes, bits = chunk.changes(n), arrays[self.layout[segment.tensor].name]
                        where = segment.box.canonical(changes.positions)
                        bits[where] = changes.resolve(bits[where])
            assert np.array_equal(self.vector(arrays), await objects.read_vector(seal, self.layout))
            found.append({name: bits.copy() for name, bits in arrays.items()})
        for anchor in await ledger.history.anchors():
            assert same(await self.anchor(store, anchor), found[anchor.version])
        return found

    def vector(self, weights: Weights) -> Any:
        return fingerprint(self.layout, [weights[spec.name] for spec in self.layout])

    async def anchor(self, store: Store, anchor: Any) -> Weights:
        objects = Objects(store, floor=lambda: 0, patience=0)
        weights = {name: np.zeros_like(bits) for name, bits in self.base.items()}
        for ref in (await objects.read_anchor_index(anchor)).files:
            file = SafetensorsBytes(await objects.read_file(ref, anchor.version), ref.key)
            for tensor, box, bits in read_pieces(file, self.layout):
                if box is not None:
                    weights[self.layout[tensor].name][box.dst : box.dst + box.elements] = bits
        return weights


def history(store: MemoryStore) -> list[AnyRecord]:
    """All records, read one by one; none may be void: an honest publisher writes none that does not count."""
    tip, stream = begin(store.objects["ledger/0000000000000000.json"])
    records: list[AnyRecord] = [stream]
    while (key := f"ledger/{tip.seq + 1:016d}.json") in store.objects:
        step = fold(tip, store.objects[key])
        assert step.record is not None, step.void
        records.append(step.record)
        tip = step.tip
    assert sum(key.startswith("ledger/") for key in store.objects) == len(records)
    return records


def same(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def kill(session: Leader) -> None:
    """What the kernel does for a process that is killed: its lock goes."""
    session.context.state.close()


@pytest.fixture
def small_world() -> Iterator[SmallWorld]:
    """In memory where there is such a place: these tests write little, and durably, many thousand times."""
    shm = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="dcr-small-", dir=shm if shm.is_dir() else None))
    before = runtime._current
    runtime.install(InlineRuntime())
    try:
        yield SmallWorld(root)
    finally:
        runtime.install(before)
        shutil.rmtree(root)


def parts(of: int, quick: int) -> Any:
    """Cut a loop over all requests into `of` parts: part `quick` always runs, the others in `make faults`."""
    marked = [pytest.param(n, marks=[] if n == quick else pytest.mark.faults) for n in range(of)]
    return [pytest.param((part.values[0], of), marks=part.marks, id=f"{part.values[0]}/{of}") for part in marked]


def each_request(log: list[str], part: tuple[int, int], one: Callable[[int], Awaitable[Any]]) -> None:
    """Call `one(number)` for the requests of a part; a failure names the request."""

    async def every() -> None:
        for number in range(1 + part[0], len(log) + 1, part[1]):
            try:
                await one(number)
            except BaseException as error:
                error.add_note(f"request {number}: {log[number - 1]}")
                raise

    run(every())


def run(work: Awaitable[Any]) -> Any:
    """As `asyncio.run`. No task may die unheard, but of the end of its process."""
    unheard: list[dict[str, Any]] = []

    async def main() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unheard.append(context))
        return await work

    result = asyncio.run(main())
    gc.collect()
    assert not [context for context in unheard if not isinstance(context.get("exception"), Dead)]
    return result
