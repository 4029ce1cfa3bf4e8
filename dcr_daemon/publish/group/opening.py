"""How a publisher opens a stream (must P5): read ─► (create) ─► claim ─► baseline (group of one only)."""

from __future__ import annotations

import contextlib
from typing import Protocol, Self

from dcr_daemon import runtime
from dcr_daemon.canonical.fingerprint import Vector, total
from dcr_daemon.canonical.layout import Layout, describe_difference
from dcr_daemon.checkpoint.blocks import BlockSet, block_bytes
from dcr_daemon.checkpoint.directory import Checkpoint, read_side_files
from dcr_daemon.checkpoint.reader import CheckpointReader
from dcr_daemon.errors import DcrError, Fenced, Incompatible, NotFound, UsageError
from dcr_daemon.events import Alarm, Degraded, Emit, Waiting
from dcr_daemon.ledger.objects import Objects
from dcr_daemon.ledger.records import Stream, show_u64
from dcr_daemon.publish.baseline.baseline import Baseline
from dcr_daemon.publish.group.anchors import write_anchor
from dcr_daemon.publish.group.context import RankContext
from dcr_daemon.publish.group.coordinator import CLOSE_PATIENCE, Coordinator
from dcr_daemon.publish.group.leader import Leader
from dcr_daemon.publish.group.member import Member
from dcr_daemon.publish.options import PublishOptions
from dcr_daemon.publish.rank import Rank
from dcr_daemon.publish.resources import RankResources
from dcr_daemon.publish.timeouts import with_timeout
from dcr_daemon.store.poller import Poller
from dcr_daemon.store.port import Store
from dcr_daemon.store.probe import probe
from dcr_daemon.task_limiter import TaskLimiter, run_limited
from dcr_daemon.wording import shorten

CREATION = 7200.0  #: seconds that members wait for a stream: rank 0 reads the whole base before it creates one


async def open_coordinator(options: PublishOptions, store: Store, *, emit: Emit, rank: Rank) -> Coordinator:
    """`open_leader` on rank 0, `open_member` on every other rank."""
    if rank.leads:
        return await open_leader(options, store, emit=emit, rank=rank)
    return await open_member(options, store, emit=emit, rank=rank)


async def open_leader(options: PublishOptions, store: Store, *, emit: Emit, rank: Rank | None = None) -> Leader:
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
    async with _Opening(options, store, emit=emit, rank=rank) as opening:
        start = _StartAlone(opening) if rank.alone else _StartOfMany(opening)
        ledger = opening.resources.ledger
        known = ledger.high_water_mark is not None and ledger.high_water_mark.mark is not None
        for warning in await probe(store, again=known):
            emit(Alarm(must="L6", what=warning))
        try:
            await ledger.read()
        except NotFound:
            await _create(opening.resources, start)
        context = await opening.context()
        async with TaskLimiter(None) as beside:
            await beside.start(context.compile_kernels)
            await _claim(opening.resources)
            leader = Leader(context, emit)
            await start.finish(leader)
        return leader


async def open_member(options: PublishOptions, store: Store, *, emit: Emit, rank: Rank) -> Member:
    """Read the stream that rank 0 claims, or is about to create.

    Raises:
        as `open_leader`, but for what only rank 0 decides.
        NotFound: rank 0 has not created it in `CREATION` seconds.
    """
    async with _Opening(options, store, emit=emit, rank=rank) as opening:
        poller = Poller(first=0.1, longest=2.0)
        while True:
            try:
                await opening.resources.ledger.read()
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
        context = await opening.context()
        member = Member(context, emit)
        await run_limited([context.compile_kernels, member.catch_up], 2)
        return member


class _Opening:
    """What is taken while a publisher opens, and given back if that fails.

    Attributes:
        baseline: of a group of one that has read it from the base checkpoint.
    """

    def __init__(self, options: PublishOptions, store: Store, *, emit: Emit, rank: Rank) -> None:
        self.resources = RankResources.take(options, store, emit=emit, rank=rank)
        self.baseline: Baseline | None = None

    async def context(self) -> RankContext:
        """For a ledger that was read."""
        resources, ledger = self.resources, self.resources.ledger
        objects = Objects(
            resources.store, floor=lambda: ledger.state.floor, refresh=ledger.read, emit=resources.emit,
            workers=resources.workers,
        )  # fmt: skip
        layout = await objects.read_layout(ledger.stream)
        _check_base(resources.options, layout, resources.store.url, emit=resources.emit)
        return RankContext(resources, objects, layout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        if error is None:
            return
        resources, ledger = self.resources, self.resources.ledger
        try:
            if ledger.epoch is not None:
                with contextlib.suppress(DcrError):  # the next publisher need not take over from one that never began
                    patience = min(resources.options.patience, CLOSE_PATIENCE)
                    what = f"the release of {resources.store.url}"
                    await with_timeout(patience, ledger.release(), what=what, emit=resources.emit)
        finally:
            if self.baseline:
                self.baseline.close()
            resources.close()


async def _claim(resources: RankResources) -> None:
    """Claim under the name given or kept. The name is kept before the claim is sent, so that a claim whose answer is
    lost is known for ours."""
    ledger, state, options = resources.ledger, resources.state, resources.options
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


async def _create(resources: RankResources, start: _Start) -> None:
    """Make the stream from the base checkpoint, unless another process is faster."""
    options, ledger = resources.options, resources.ledger
    if not options.create:
        raise NotFound(
            f"there is no stream at {ledger.store.url}", hint="make it with --create and --base, or correct the URL"
        )
    if options.base is None:
        raise UsageError("a stream is created from a base checkpoint", hint="give --base DIR with --create")
    with Checkpoint(options.base) as checkpoint:
        layout, vector = checkpoint.layout, await start.read_base(checkpoint)
    runtime.failpoint("publish.base.loaded")
    stream = await ledger.create_stream(layout, vector, model=options.base.absolute().name)
    if (stream.layout.sha256, stream.total) != (layout.digest, show_u64(total(vector))):
        start.base_is_another()
        return
    runtime.failpoint("publish.created")
    await start.created(stream, vector)


class _Start(Protocol):
    """What differs between a group of one and other groups when rank 0 opens a stream."""

    async def read_base(self, checkpoint: Checkpoint) -> Vector:
        """The fingerprint of the base checkpoint, from which the stream is created."""
        ...

    def base_is_another(self) -> None:
        """Another process was faster, and the stream begins with another checkpoint."""
        ...

    async def created(self, stream: Stream, vector: Vector) -> None:
        """The stream begins with the base checkpoint."""
        ...

    async def finish(self, leader: Leader) -> None:
        """The stream is claimed: make ready for the first update, and write the anchor that is due."""
        ...


class _StartAlone:
    """A group of one holds all of the layout, so its baseline is at the head before the first update."""

    def __init__(self, opening: _Opening) -> None:
        self._opening, self._resources = opening, opening.resources

    async def read_base(self, checkpoint: Checkpoint) -> Vector:
        baseline = Baseline(self._resources.state.path, self._all_of(checkpoint.layout), "", self._resources.workers)
        self._opening.baseline = baseline
        await baseline.load(checkpoint)
        return await baseline.fingerprint()

    def base_is_another(self) -> None:
        if self._opening.baseline:
            self._opening.baseline.close()
        self._opening.baseline = None

    async def created(self, stream: Stream, vector: Vector) -> None:
        if baseline := self._opening.baseline:
            baseline.stream = stream.stream
            await baseline.prove((0, vector))

    async def finish(self, leader: Leader) -> None:
        options, context = self._resources.options, leader.context
        context.hold(self._opening.baseline or self._all_of(leader.layout))
        self._opening.baseline = context.baseline  # closed if the opening fails
        await context.restore()
        if context.baseline.save_due:
            await context.baseline.save()
        runtime.failpoint("publish.restored")
        # An anchor is due as well if an earlier process died while it wrote one, or owed one (must P4).
        await leader.anchor_if_due(at_once=options.create and options.upload_base and leader.head == 0)

    def _all_of(self, layout: Layout) -> BlockSet:
        return BlockSet.whole(layout, block_bytes(self._resources.options.chunk_bytes))


class _StartOfMany:
    """A rank of many builds its baseline when it knows what it holds. The anchor of version 0 is written from the base
    checkpoint: no rank holds all of it."""

    def __init__(self, opening: _Opening) -> None:
        self._resources = opening.resources

    async def read_base(self, checkpoint: Checkpoint) -> Vector:
        return await CheckpointReader(checkpoint).fingerprint(self._resources.workers.run)

    def base_is_another(self) -> None:
        pass

    async def created(self, stream: Stream, vector: Vector) -> None:
        pass

    async def finish(self, leader: Leader) -> None:
        options, ledger = self._resources.options, leader.ledger
        wanted = options.create and options.upload_base and leader.head == 0 and ledger.state.anchor is None
        if not wanted or options.base is None:
            return
        with Checkpoint(options.base) as checkpoint:
            source = CheckpointReader(checkpoint)
            side_files = read_side_files(options.base) if options.base.is_dir() else {}
            vector = await leader.context.objects.read_vector(ledger.stream, leader.layout)
            await write_anchor(self._resources, source, version=0, vector=vector, side_files=side_files)


def _check_base(options: PublishOptions, layout: Layout, url: str, *, emit: Emit) -> None:
    """A base of another layout is a mistake that should not wait for the first update to show."""
    if options.base and options.base.exists():
        with Checkpoint(options.base) as checkpoint:
            if checkpoint.passed_by:
                emit(Degraded(what=f"base {options.base}: not read is {shorten(checkpoint.passed_by)}"))
            if difference := describe_difference(checkpoint.layout, layout):
                raise Incompatible(
                    f"base {options.base} has another layout than {url}: {difference}",
                    hint="give the checkpoint that the stream was created from, or another stream",
                )
