"""How a publisher comes to hold a stream: make it if asked, claim it, read everything, load the baseline (must P5)."""

from __future__ import annotations

import contextlib
from typing import Self

from dcr_daemon import runtime
from dcr_daemon.canonical.fingerprint import total
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.blocks import BlockSet, block_bytes
from dcr_daemon.checkpoint.directory import Checkpoint, read_side_files
from dcr_daemon.checkpoint.reader import CheckpointReader
from dcr_daemon.errors import DcrError, Fenced, Incompatible, NotFound, UsageError
from dcr_daemon.events import Alarm, Emit, Waiting
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.objects import Objects
from dcr_daemon.ledger.records import show_u64
from dcr_daemon.publish.baseline.baseline import Baseline
from dcr_daemon.publish.group.anchors import write_whole
from dcr_daemon.publish.group.context import RankContext
from dcr_daemon.publish.group.coordinator import CLOSE_PATIENCE, Coordinator
from dcr_daemon.publish.group.leader import Leader
from dcr_daemon.publish.group.member import Member
from dcr_daemon.publish.inputs.validator import differences
from dcr_daemon.publish.options import PublishOptions, stream_state
from dcr_daemon.publish.rank import Rank
from dcr_daemon.publish.state import StateDirectory
from dcr_daemon.publish.timeouts import with_timeout
from dcr_daemon.runtime import Workers
from dcr_daemon.store.poller import Poller
from dcr_daemon.store.port import Store
from dcr_daemon.store.probe import probe

CREATION = 7200.0  #: seconds that members wait for a stream: rank 0 reads the whole base before it creates one


async def open_coordinator(options: PublishOptions, store: Store, emit: Emit, rank: Rank) -> Coordinator:
    """`open_leader` on rank 0, `open_member` on every other rank."""
    if rank.leads:
        return await open_leader(options, store, emit, rank)
    return await open_member(options, store, emit, rank)


async def open_leader(options: PublishOptions, store: Store, emit: Emit, rank: Rank | None = None) -> Leader:
    """Claim the stream in `store`, or create it, as rank 0 (must P5).

    A group of one holds all of the layout, and its baseline is brought to the head here; a rank of many does that when
    it knows what it holds.

    Raises:
        Fenced: another publisher holds the stream and has not released it; `take_over` is needed.
        NotFound: there is no stream and `create` was not asked for, or nothing to build the baseline from.
        Incompatible: the store, the base or the layout does not fit.
        UsageError: options that do not go together, or a state directory in use.
        ResourceExhausted: no room for the baseline.
    """
    rank = rank or Rank()
    async with _Opening(options, store, emit, rank) as opening:
        ledger = opening.ledger
        for warning in await probe(store):
            emit(Alarm(must="L6", what=warning))
        try:
            await ledger.read()
        except NotFound:
            await _create(opening)
        context = await opening.context()
        await _claim(ledger, opening.state, options)
        session = Leader(context, emit)
        if rank.world == 1:
            context.hold(opening.baseline or BlockSet.whole(context.layout, block_bytes(options.chunk_bytes)))
            await context.restore()
            runtime.failpoint("publish.restored")
            # Due as well if an earlier process died with an anchor half put, or owed one (must P4).
            await session.anchor_if_due(at_once=options.create and options.upload_base and session.head == 0)
        elif options.create and options.upload_base and session.head == 0 and ledger.state.anchor is None:
            await _anchor_base(opening, context.layout)
        return session


async def open_member(options: PublishOptions, store: Store, emit: Emit, rank: Rank) -> Member:
    """Read the stream that rank 0 claims, or is about to create.

    Raises:
        as `open_leader`, but for what only rank 0 decides.
        NotFound: rank 0 has not created it in `CREATION` seconds.
    """
    async with _Opening(options, store, emit, rank) as opening:
        poller = Poller(first=0.1, longest=2.0)
        while True:
            try:
                await opening.ledger.read()
                break
            except NotFound as error:
                if not options.create:
                    raise
                if poller.waited > CREATION:
                    hint = "rank 0 was to create it, and says why it has not"
                    raise NotFound(error.message, hint=hint) from error
            if poller.report_due():
                emit(Waiting(what=f"the stream at {store.url}, which rank 0 creates"))
            await poller.pause()
        member = Member(await opening.context(), emit)
        await member.catch_up()
        return member


class _Opening:
    """What is taken while a publisher opens, and given back if that fails."""

    def __init__(self, options: PublishOptions, store: Store, emit: Emit, rank: Rank) -> None:
        self.options, self.store, self.emit, self.rank = options, store, emit, rank
        path = stream_state(
            options.state, store.url
        )  # rank 0's does not move when the world grows: the name lies there
        self.state = StateDirectory(path if rank.leads else path / f"rank-{rank.number}")
        self.workers = Workers(options.workers)
        self.ledger = Ledger(store, mark=self.state.mark, emit=emit)
        self.baseline: Baseline | None = None

    async def context(self) -> RankContext:
        """For a ledger that was read."""
        ledger = self.ledger
        objects = Objects(
            self.store, floor=lambda: ledger.state.floor, refresh=ledger.read, emit=self.emit, workers=self.workers
        )  # fmt: skip
        layout = await objects.read_layout(ledger.stream)
        _check_base(self.options, layout, self.store.url)
        return RankContext(self.options, ledger, objects, layout, self.rank, self.state, self.workers, self.emit)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        if error is None:
            return
        try:
            if self.ledger.epoch is not None:
                with contextlib.suppress(DcrError):  # whoever comes next need not take over from one that never began
                    patience = min(self.options.patience, CLOSE_PATIENCE)
                    what = f"the release of {self.store.url}"
                    await with_timeout(patience, self.ledger.release(), what=what, emit=self.emit)
        finally:
            if self.baseline:
                self.baseline.close()
            self.state.close()
            self.workers.close()


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


async def _create(opening: _Opening) -> None:
    """Make the stream from the base checkpoint, unless somebody else is faster. A group of one keeps the baseline."""
    options, ledger = opening.options, opening.ledger
    if not options.create:
        raise NotFound(
            f"there is no stream at {ledger.store.url}", hint="make it with --create and --base, or correct the URL"
        )
    if options.base is None:
        raise UsageError("a stream is created from a base checkpoint", hint="give --base DIR with --create")
    with Checkpoint(options.base) as checkpoint:
        layout, baseline = checkpoint.layout, None
        if opening.rank.world == 1:
            blocks = BlockSet.whole(layout, block_bytes(options.chunk_bytes))
            baseline = opening.baseline = Baseline(opening.state.path, blocks, "", opening.workers)
            await baseline.load(checkpoint)
            vector = await baseline.fingerprint()
        else:
            vector = await CheckpointReader(checkpoint).fingerprint(opening.workers.run)
    runtime.failpoint("publish.base.loaded")
    stream = await ledger.create_stream(layout, vector, model=options.base.absolute().name)
    if (stream.layout.sha256, stream.total) != (layout.digest, show_u64(total(vector))):
        if baseline:
            baseline.close()
        opening.baseline = None
        return
    runtime.failpoint("publish.created")
    if baseline:
        baseline.stream = stream.stream
        await baseline.prove((0, vector))


async def _anchor_base(opening: _Opening, layout: Layout) -> None:
    """The anchor of version 0, from the checkpoint: no rank of many holds it, and the seal says what it must be."""
    options, ledger = opening.options, opening.ledger
    if options.base is None:
        return
    with Checkpoint(options.base) as checkpoint:
        source = CheckpointReader(checkpoint)
        side_files = read_side_files(options.base) if options.base.is_dir() else {}
        vector = await (await opening.context()).objects.read_vector(ledger.stream, layout)
        await write_whole(ledger, source, 0, vector, side_files, opening.workers, options.patience, opening.emit)


def _check_base(options: PublishOptions, layout: Layout, url: str) -> None:
    """A base of another layout is a mistake that should not wait for the first update to show."""
    if options.base and options.base.exists():
        with Checkpoint(options.base) as checkpoint:
            if checkpoint.layout != layout:
                raise Incompatible(
                    f"base {options.base} has another layout than {url}: {differences(layout, checkpoint.layout)}",
                    hint="give the checkpoint that the stream was created from, or another stream",
                )
