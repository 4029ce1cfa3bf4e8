"""`dcr subscribe`: one replica kept at the newest sealed version, until told to stop.

In durable order: high-water mark, staged and verified, prepared, swapped, status. This module makes the parts and runs
them together; `driver` has the steps of one version.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

from dcr_daemon import runtime
from dcr_daemon.disk import disk_error, disk_full, try_lock
from dcr_daemon.engine.port import Engine
from dcr_daemon.errors import DcrError, Fenced, NotFound, StoreUnavailable, UsageError
from dcr_daemon.events import Emit, FencedOut, LedgerRead, Retrying, Waiting
from dcr_daemon.ledger.follow import jittered
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.objects import Objects
from dcr_daemon.store.port import Store
from dcr_daemon.subscribe.context import SubscriberContext
from dcr_daemon.subscribe.driver import Driver
from dcr_daemon.subscribe.fetch.anchors import AnchorFiles
from dcr_daemon.subscribe.fetch.loader_computed import LoaderComputed
from dcr_daemon.subscribe.fetch.stage import Stage
from dcr_daemon.subscribe.fetch.staging import default_staging, open_staging
from dcr_daemon.subscribe.follower import LedgerFollower
from dcr_daemon.subscribe.options import STAGING_LIMIT, SubscribeOptions, subscriber_state
from dcr_daemon.subscribe.scrub import Scrub
from dcr_daemon.subscribe.status import StatusWriter

__all__ = ["STAGING_LIMIT", "SubscribeOptions", "run_subscribe"]

T = TypeVar("T")
REPORT_PAUSE = 10  #: times the longest pause between two polls: between two reports of a replica that has no news


async def run_subscribe(options: SubscribeOptions, store: Store, *, engine: Engine, emit: Emit) -> None:
    """Keep `engine` at the newest sealed version of the stream in `store` (or reach it once).

    Returns when cancelled, or with `once` when the newest seal read at the start is served.

    Raises:
        Fenced: another subscriber has attached to this engine since; do not restart.
        EngineRefused: with `once`, the engine cannot take this stream, with every reason named.
        Incompatible: the stream has another format or layout than engine or state know.
        NotFound: with `once`, there is no stream.
        Corrupt: the ledger does not extend the one remembered here (must T1); with `once`, it has a damaged record, and
            the engine serves the newest version below.
        UsageError: another subscriber runs with the same state and replica id, or the state directory cannot be used.
    """
    home = subscriber_state(options.state, store.url, replica=options.replica)
    workers = runtime.Workers()
    try:
        with _only_one(home), _staging(options, home) as staging:
            ledger = Ledger(store, mark=home / "seen.json", emit=emit, polling=options.polling)
            await _wait_until_read(options, emit, ledger.read)
            if ledger.doubt is None:  # else the ledger says when it was read to its end
                emit(LedgerRead(head=ledger.state.seal.version))
            runtime.failpoint("subscribe.found")
            staged = staging / ledger.stream.stream
            await _run(options, ledger, home=home, staging=staged, engine=engine, workers=workers, emit=emit)
            ledger.check_undoubted()
    finally:
        workers.close()


async def _run(
    options: SubscribeOptions,
    ledger: Ledger,
    *,
    home: Path,
    staging: Path,
    engine: Engine,
    workers: runtime.Workers,
    emit: Emit,
) -> None:
    objects = Objects(
        ledger.store,
        floor=lambda: ledger.state.floor,
        refresh=ledger.read,
        emit=emit,
        patience=options.patience,
        workers=workers,
    )
    layout = await _wait_until_read(options, emit, lambda: objects.read_layout(ledger.stream))
    stage = Stage(
        open_staging(staging),
        limit=options.staging_limit,
        objects=objects,
        stream=ledger.stream,
        layout=layout,
        workers=workers,
        emit=emit,
    )
    status = StatusWriter(
        ledger.store,
        options.replica,
        stream=ledger.stream.stream,
        emit=emit,
        refresh=REPORT_PAUSE * options.polling.longest,
    )
    scrub = Scrub(
        engine, every=0 if options.once else options.scrub_every, rate=options.scrub_rate, status=status, emit=emit
    )
    computed = LoaderComputed(
        home, ledger=ledger, objects=objects, layout=layout, base=options.base, workers=workers, emit=emit
    )
    context = SubscriberContext(
        options=options,
        ledger=ledger,
        objects=objects,
        layout=layout,
        stage=stage,
        anchors=AnchorFiles(home, objects, workers=workers),
        computed=computed,
        follower=LedgerFollower(ledger, stage, polling=options.polling, emit=emit),
        status=status,
        scrub=scrub,
    )
    driver = Driver(context, engine, emit)
    async with status.running():
        try:
            await runtime.run_until_first(driver.run(), context.follower.run(), scrub.run())
        except Fenced as error:
            emit(FencedOut(what="the engine", by="another subscriber"))
            status.set(state="fenced", serving=False, detail=error.message)
            raise
        except DcrError as error:
            status.set(state="failed", detail=error.message)
            raise
        except asyncio.CancelledError:
            status.set(state="stopped", detail="told to stop; the engine goes on with what it has")
            raise
        else:
            status.set(state="stopped", detail="reached the newest version")


async def _wait_until_read(options: SubscribeOptions, emit: Emit, read: Callable[[], Awaitable[T]]) -> T:
    """What `read` returns. Unless `once`, waits for a stream that is not there yet or a store that does not answer."""
    began = runtime.monotonic()
    while True:
        try:
            return await read()
        except (NotFound, StoreUnavailable) as error:
            if options.once:
                raise
            emit(Waiting(what=error.message) if isinstance(error, NotFound) else Retrying(what=error.message))
            await runtime.sleep(jittered(options.polling.pause(runtime.monotonic() - began)))


def _staging(options: SubscribeOptions, home: Path) -> contextlib.AbstractContextManager[Path]:
    """The directory with the staging of each stream."""
    return default_staging(home) if options.staging is None else contextlib.nullcontext(options.staging)


@contextlib.contextmanager
def _only_one(home: Path) -> Iterator[None]:
    """Lock the state directory against a second subscriber of this replica id; the lock ends with the process."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if disk_full(error):
            raise disk_error(error, home) from error
        raise UsageError(
            f"state directory {home} cannot be used: {error.strerror}", hint="name one with --state"
        ) from error
    try:
        if not try_lock(descriptor, home / "lock"):
            raise UsageError(
                f"another subscriber runs as replica {home.name} on {home}",
                hint="give each engine a subscriber of its own --replica id",
            )
        yield
    finally:
        os.close(descriptor)
