"""How a publisher comes to hold a stream: make it if asked, claim it, read everything, load the baseline (must P5)."""

from __future__ import annotations

import contextlib

from dcr_daemon import runtime
from dcr_daemon.canonical.fingerprint import total
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.errors import DcrError, Fenced, Incompatible, Misuse, NotFound
from dcr_daemon.events import Alarm, Emit
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.objects import Objects
from dcr_daemon.ledger.records import show_u64
from dcr_daemon.publish.baseline import Baseline
from dcr_daemon.publish.intake import differences
from dcr_daemon.publish.options import PublishOptions, stream_state
from dcr_daemon.publish.restore import Restorer
from dcr_daemon.publish.session import CLOSE_PATIENCE, Session
from dcr_daemon.publish.share import Share, block_bytes
from dcr_daemon.publish.state import StateDirectory
from dcr_daemon.publish.waits import within
from dcr_daemon.runtime import Workers
from dcr_daemon.store.port import Store
from dcr_daemon.store.probe import probe


async def open_session(options: PublishOptions, store: Store, emit: Emit) -> Session:
    """Claim the stream in `store`, or create it, and bring the baseline to its head (must P5).

    Raises:
        Fenced: another publisher holds the stream and has not released it; `take_over` is needed.
        NotFound: there is no stream and `create` was not asked for, or nothing to build the baseline from.
        Incompatible: the store, the base or the layout does not fit.
        Misuse: options that do not go together, or a state directory in use.
        Exhausted: no room for the baseline.
    """
    state = StateDirectory(stream_state(options.state, store.url))
    workers = Workers(options.workers)
    baseline: Baseline | None = None
    ledger: Ledger | None = None
    try:
        ledger = Ledger(store, memory=state.mark, emit=emit)
        for warning in await probe(store):
            emit(Alarm(must="L6", what=warning))
        try:
            await ledger.read()
        except NotFound:
            baseline = await _create(options, ledger, state, workers)
        objects = Objects(store, floor=lambda: ledger.state.floor, refresh=ledger.read, emit=emit, workers=workers)
        layout = await objects.read_layout(ledger.stream)
        _check_base(options, layout, store.url)
        await _claim(ledger, state, options)
        if baseline is None:
            share = Share.whole(layout, block_bytes(options.chunk_bytes))
            baseline = Baseline(state.path, share, ledger.stream.stream, workers)
        restorer = Restorer(ledger, objects, baseline, options.base, workers, emit)
        await restorer.restore()
        runtime.failpoint("publish.restored")
        session = Session(options, ledger, baseline, restorer, state, workers, emit)
        # Due as well if an earlier process died with an anchor half put, or owed one (must P4).
        await session.anchor_if_due(at_once=options.create and options.upload_base and session.head == 0)
        return session
    except BaseException:
        try:
            if ledger and ledger.epoch is not None:
                with contextlib.suppress(DcrError):  # whoever comes next need not take over from one that never began
                    patience = min(options.patience, CLOSE_PATIENCE)
                    await within(patience, ledger.release(), what=f"the release of {store.url}", emit=emit)
        finally:
            if baseline:
                baseline.close()
            state.close()
            workers.close()
        raise


async def _claim(ledger: Ledger, state: StateDirectory, options: PublishOptions) -> None:
    """Claim under the name given or kept. It is kept before the claim leaves: one that lands is then known for ours."""
    name = state.name(options.name)
    try:
        await ledger.claim(name, take_over=options.take_over)
    except Fenced as error:
        holder = ledger.state.epoch.name if ledger.state.epoch else "nobody"
        raise Fenced(
            error.message,
            hint=f"this publisher is {name}, as {state.path} says: if it is {holder} restarted without its state, give "
            f"--name {holder}; else stop {holder} first, or claim with --take-over",
        ) from error


async def _create(options: PublishOptions, ledger: Ledger, state: StateDirectory, workers: Workers) -> Baseline | None:
    """Make the stream from the base checkpoint; the baseline that holds it, unless somebody else was faster."""
    if not options.create:
        raise NotFound(
            f"there is no stream at {ledger.store.url}", hint="make it with --create and --base, or correct the URL"
        )
    if options.base is None:
        raise Misuse("a stream is created from a base checkpoint", hint="give --base DIR with --create")
    with Checkpoint(options.base) as checkpoint:
        share = Share.whole(checkpoint.layout, block_bytes(options.chunk_bytes))
        baseline = Baseline(state.path, share, "", workers)
        await baseline.load(checkpoint)
    runtime.failpoint("publish.base.loaded")
    vector = await baseline.fingerprint()
    stream = await ledger.create_stream(baseline.layout, vector, model=options.base.absolute().name)
    if (stream.layout.sha256, stream.total) != (baseline.layout.digest, show_u64(total(vector))):
        baseline.close()
        return None
    baseline.stream = stream.stream
    runtime.failpoint("publish.created")
    await baseline.prove((0, vector))
    return baseline


def _check_base(options: PublishOptions, layout: Layout, url: str) -> None:
    """A base of another layout is a mistake that should not wait for the first update to show."""
    if options.base and options.base.exists():
        with Checkpoint(options.base) as checkpoint:
            if checkpoint.layout != layout:
                raise Incompatible(
                    f"base {options.base} has another layout than {url}: {differences(layout, checkpoint.layout)}",
                    hint="give the checkpoint that the stream was created from, or another stream",
                )
