"""`dcr materialize`: builds a plain Hugging Face checkpoint of one version in a new directory, proved by its
fingerprint.

It uses the directory engine, so that the result passes the same checks as a served replica. It builds in a directory
beside the target, which gets the target's name when it is proved; what was fetched is kept there if the store fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dcr_daemon import runtime
from dcr_daemon.canonical.layout import Layout, describe_difference
from dcr_daemon.checkpoint.directory import Checkpoint, tensor_files
from dcr_daemon.checkpoint.reader import CheckpointReader
from dcr_daemon.disk import is_at, sync_directory, try_lock
from dcr_daemon.engine.directory.engine import DirectoryEngine
from dcr_daemon.engine.port import Swapped, TensorClass, Transaction, Verdict
from dcr_daemon.errors import (
    Corrupt,
    DcrError,
    EngineRefused,
    Incompatible,
    NotFound,
    ResourceExhausted,
    StoreUnavailable,
    UsageError,
)
from dcr_daemon.events import Alarm, Committed, Emit, Retrying, discard
from dcr_daemon.ledger.holes import MissingRecords
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.objects import BelowFloor, ObjectPending, Objects
from dcr_daemon.ledger.records import Seal, total_of, version_of
from dcr_daemon.ledger.route import NoRoute, Route
from dcr_daemon.ledger.routes import Routes
from dcr_daemon.store.port import Store
from dcr_daemon.subscribe.fetch.anchors import AnchorFiles
from dcr_daemon.subscribe.fetch.files import write_staged
from dcr_daemon.subscribe.fetch.stage import Stage
from dcr_daemon.subscribe.locate import LiveWeights, locate

BUDGET = 1 << 30  #: bytes of chunks staged and composed at a time


@dataclass(frozen=True, slots=True)
class Materialized:
    """What was built: `out`, its `version`, the trainer's `step`, tensors, dense bytes, fingerprint total (hex)."""

    out: Path
    version: int
    step: int | None
    tensors: int
    bytes: int
    total: str


async def materialize(
    store: Store, *, version: int | None = None, out: Path, base: Path | None = None, emit: Emit = discard
) -> Materialized:
    """Build version `version` (None: the newest sealed) in `out`, from the cheapest anchor or `base` and the chain.

    `out` appears complete and proved, or not at all. No subscriber state is read or written. If the store stops
    answering, what has arrived is kept beside `out`, and the next call goes on there.

    Raises:
        UsageError: `out` exists and is not empty, or another process builds it.
        StoreUnavailable: the store does not answer.
        NotFound: no such stream or version, or nothing to start from and no `base` given.
        Incompatible: `base` is not a version this can start from.
        Corrupt: objects of the stream do not give the fingerprint of the seal, or a damaged record hides which version
            is the newest.
        ResourceExhausted: no room on disk.
    """
    out = _new_directory(out)
    ledger = Ledger(store, emit=emit)
    await ledger.read_up_to(version or 0)
    hidden = version is None or version > ledger.state.seal.version  # by whatever keeps the ledger from being read on
    try:
        await ledger.read_whole()
    except Corrupt as error:
        if hidden and isinstance(error, MissingRecords) and error.seqs[-1] > ledger.tip.seq:
            raise
        # Below the state that two records prove: the version can be built all the same.
        emit(Alarm(must="L2", what=error.message))
    if hidden:
        ledger.check_undoubted()
    record = await ledger.version_record(ledger.state.seal.version if version is None else version)
    workers = runtime.Workers()
    try:
        with _workshop(out) as shop:
            builder = _Builder(ledger, shop, workers=workers, emit=emit)
            while True:
                try:
                    await builder.build(version_of(record), base)
                    break
                except NotFound as error:
                    if version is not None or version_of(record) >= ledger.state.floor:
                        raise
                    # What was newest at the start has been collected; nobody asked for that one in particular.
                    emit(Retrying(what=f"{error.message}; building the newest"))
                    record = await ledger.version_record(ledger.state.seal.version)
            _give_name(shop / "out", out)
            layout = Layout.decode((shop / "layout.json").read_bytes())
    finally:
        workers.close()
    step = record.step if isinstance(record, Seal) else None
    return Materialized(out, version_of(record), step, len(layout), layout.nbytes, total_of(record))


def _new_directory(out: Path) -> Path:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is not empty", hint="name a new directory")
    return out.absolute()


def _give_name(built: Path, out: Path) -> None:
    try:
        built.rename(out)
        sync_directory(out.parent, site="checkpoint")
    except OSError as error:  # somebody filled it meanwhile, or took it away
        raise UsageError(f"{out} cannot be made: {error.strerror}", hint="name a new directory") from error


@contextlib.contextmanager
def _workshop(out: Path) -> Iterator[Path]:
    """A directory beside `out`, on its file system; one process at a time uses it.

    It is gone afterwards, unless the store did not answer or this process was ended: then what has arrived stays, and
    the next build of `out` goes on there. Everything in it is verified when it is used.
    """
    shop = kept_directory(out)
    lock = _lock(shop, out)
    try:
        try:
            yield shop
        except (StoreUnavailable, KeyboardInterrupt, asyncio.CancelledError):
            raise
        except BaseException:
            shutil.rmtree(shop, ignore_errors=True)
            raise
        shutil.rmtree(shop, ignore_errors=True)
    finally:
        os.close(lock)


def kept_directory(out: Path) -> Path:
    """Where an interrupted build of `out` has kept what had arrived."""
    return out.absolute().parent / f".{out.name}.dcr-partial"


def _lock(shop: Path, out: Path) -> int:
    """Make the directory and lock it, until the descriptor is closed."""
    try:
        while True:
            shop.mkdir(parents=True, exist_ok=True)
            lock = os.open(shop, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if not try_lock(lock, shop):
                    raise UsageError(f"another process builds {out}", hint="wait for it, or name another --out")
                if is_at(lock, shop):  # the process that had it removes it when it has built `out`
                    return lock
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)
    except OSError as error:
        raise ResourceExhausted(f"cannot write beside {out}: {error.strerror}", hint="name another --out") from error


class _Builder:
    """Builds one version in `shop/out`, with everything that it needs below `shop`."""

    def __init__(self, ledger: Ledger, shop: Path, *, workers: runtime.Workers, emit: Emit) -> None:
        self._ledger, self._shop, self._workers, self._emit = ledger, shop, workers, emit
        self._objects = Objects(
            ledger.store, floor=lambda: ledger.state.floor, refresh=ledger.read, emit=emit, workers=workers
        )
        self._anchors = AnchorFiles(shop, self._objects, workers=workers)
        self._transactions = 0
        self._reached: int | None = None  # the version that the engine holds by now
        self._failed: DcrError | None = None  # the first damage met
        self._left: int | None = None  # the version that an interrupted build left in `shop/out`
        # set by `build`
        self._stage: Stage
        self._routes: Routes
        self._base: Path | None

    async def build(self, target: int, base: Path | None) -> None:
        """Build `target` by the cheapest route; where that is damaged, by any other that the bucket still has."""
        layout = await self._objects.read_layout(self._ledger.stream)
        write_staged(self._shop / "layout.json", layout.encoded)
        self._stage = Stage(
            self._shop / "staging",
            limit=BUDGET,
            objects=self._objects,
            stream=self._ledger.stream,
            layout=layout,
            workers=self._workers,
            emit=self._emit,
        )
        self._failed = None
        found = None if base is None else await self._version_of(base, layout)
        start = found if found is not None and found <= target else None
        self._left = await self._left_over(target)
        self._base, self._routes = base, Routes(self._ledger.history, target, held=self._left, base=start)
        try:
            await self._try_routes(target)
        except NoRoute as error:
            hint = "give --base with the checkpoint that the stream was created from"
            below = target < self._ledger.state.floor
            if self._failed and not below:
                raise self._failed from error
            raise NotFound(error.message, hint=error.hint if below else hint) from error

    async def _try_routes(self, target: int) -> None:
        async for route in self._routes:
            self._failed = self._failed or self._routes.damage
            if self._failed:
                self._emit(Retrying(what=f"{self._failed.message}; trying {route}"))
            try:
                await self._try(route, target)
                return
            except (Corrupt, NotFound, ObjectPending) as error:
                self._failed = self._failed or error
        assert self._failed is not None, "a route was tried"
        raise self._failed

    async def _try(self, route: Route, target: int) -> None:
        facts = await self._stage.stream_facts()
        start = route.hops[0] - 1 if route.hops else target
        self._reached = self._left if route.anchor is None and start == self._left else None
        self._left = None  # only the first try goes on with it
        if self._reached is None:
            shutil.rmtree(self._shop / "out", ignore_errors=True)
        engine = DirectoryEngine(self._shop / "out", budget=BUDGET)
        try:
            await engine.attach(facts)
            await self._fill(engine, route)
            if (await engine.attach(facts)).version != target:
                raise Corrupt(f"what was built does not read back as version {target}", hint="check this disk")
        except EngineRefused as error:
            raise Corrupt(error.message, hint="`dcr verify` tells which objects are damaged") from error
        finally:
            await engine.close()
        shutil.rmtree(self._shop / "out" / ".dcr")

    async def _left_over(self, target: int) -> int | None:
        """The version, up to `target`, that an interrupted build has reached; None if there is none that is proved."""
        if not (self._shop / "out").exists():
            return None
        engine = DirectoryEngine(self._shop / "out", budget=BUDGET)
        try:
            version = (await engine.attach(await self._stage.stream_facts())).version
        except DcrError:
            return None
        finally:
            await engine.close()
        return version if version is not None and version <= target else None

    async def _fill(self, engine: DirectoryEngine, route: Route) -> None:
        """Apply a route to an empty engine. When the floor rises over it, what is left is planned again (must L6)."""
        while True:
            floor = self._ledger.state.floor
            try:
                await self._apply_route(engine, route)
                return
            except BelowFloor as error:
                if self._ledger.state.floor == floor:  # the same route again would end the same way
                    raise NotFound(error.message, hint="`dcr verify` tells what is missing") from error
                self._emit(Retrying(what=f"{error.message}; planning again"))
            route = await self._routes.cheapest(self._reached)

    async def _apply_route(self, engine: DirectoryEngine, route: Route) -> None:
        if route.anchor is not None:
            anchor = await self._ledger.history.anchor(route.anchor)
            await self._load(engine, route.anchor, await self._anchors.fetch(anchor), "anchor")
            self._anchors.forget()
        elif self._reached is None:
            assert self._base is not None, "a chain starts from the base"
            assert self._routes.base is not None
            await self._load(engine, self._routes.base, [str(path) for path in tensor_files(self._base)], "base")
        hops = list(route.hops)
        while hops:
            try:
                reached = await self._apply(engine, hops)
            except (Corrupt, ObjectPending):
                self._routes.damaged_deltas.add(hops[0])
                raise
            hops = [version for version in hops if version > reached]

    async def _load(self, engine: DirectoryEngine, version: int, files: list[str], how: str) -> None:
        began = runtime.monotonic()
        vector = await self._stage.vector_file(await self._ledger.version_record(version))
        ended = await engine.load(version, files, vector, str(version))
        self._committed(version, ended, how, began)

    async def _apply(self, engine: DirectoryEngine, hops: list[int]) -> int:
        """Apply one transaction of as many of these deltas as fit; returns the version that it leads to."""
        began = runtime.monotonic()
        seals = await self._ledger.history.between(hops[0], hops[-1])
        staged = await self._stage.stage_deltas(seals, await self._ledger.version_record(hops[0] - 1))
        self._transactions += 1
        txn = Transaction(id=f"build-{self._transactions}", hops=staged, label=str(staged[-1].version))
        await engine.prepare(txn)
        ended = await engine.swap(txn.id)
        if ended.verdict is not Verdict.COMMITTED or ended.version is None:
            raise EngineRefused(f"version {txn.version} cannot be applied: {ended.reason}")
        self._stage.forget_up_to(ended.version)
        self._committed(txn.base, ended, "chain", began)
        return ended.version

    def _committed(self, base: int, ended: Swapped, route: str, began: float) -> None:
        assert ended.version is not None
        self._reached = ended.version
        seconds = runtime.monotonic() - began
        self._emit(Committed(base=base, version=ended.version, route=route, pause_seconds=ended.pause, seconds=seconds))

    async def _version_of(self, base: Path, layout: Layout) -> int | None:
        """Which version of the stream `base` is, by content; None if a damaged record hides it."""
        with Checkpoint(base) as checkpoint:
            if difference := describe_difference(checkpoint.layout, layout):
                raise Incompatible(f"{base} does not hold the stream's tensors: {difference}")
            vector = await CheckpointReader(checkpoint).fingerprint(self._workers.run)
        try:
            found = await locate(
                self._ledger,
                LiveWeights(vector, [TensorClass.EXACT] * len(layout)),
                objects=self._objects,
                layout=layout,
                highest=self._ledger.state.seal.version,
                thorough=True,
                emit=self._emit,
            )
        except Corrupt as error:
            # No newer version is the base, so each chain from it would pass the record.
            self._failed = error
            return None
        if found is None:
            raise Incompatible(
                f"{base} is no version of {self._ledger.store.url}",
                hint="give the checkpoint that the stream was created from, or a materialised version",
            )
        return found
