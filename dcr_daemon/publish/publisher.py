"""`Publisher`: a training process publishes its own weights; one call of `publish` is one update.

In a process group every rank makes a `Publisher` and calls `publish` for the same steps. Each rank publishes the
elements it was assigned, and no tensor is gathered. Rank 0 leads. The ranks communicate through the bucket.

`publish` returns when the weights may change again: everything is compared and encoded. Uploads, the seal and anchors
go on in the background, on an event loop in a thread of their own. A slow bucket can delay the return
(`PublishOptions.upload_backlog`). One update is undecided at a time: the next call waits for its fate (must P7). An
error of the background work is raised once: by `wait_sealed`, or else by the next call. Between updates the publisher
looks for a newer claim and for damage of the baseline.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Never, Self

from dcr_daemon.checkpoint.blocks import block_bytes
from dcr_daemon.errors import DcrError, Fenced, StoreUnavailable, UsageError
from dcr_daemon.events import Degraded, Emit, Retrying, Rounded, TensorFollowed, Waiting
from dcr_daemon.publish.event_log import EventLog
from dcr_daemon.publish.group.coordinator import CLOSE_PATIENCE, Coordinator
from dcr_daemon.publish.group.opening import open_coordinator
from dcr_daemon.publish.group.projected import RankProjection, Trainer
from dcr_daemon.publish.group.update_inputs import RankShards, UpdateInput, whole_tensors
from dcr_daemon.publish.group.update_steps import HandOver, diff_update, run_on_thread
from dcr_daemon.publish.inputs.model_config import read_config
from dcr_daemon.publish.inputs.tensors import check_kind, needs_projection
from dcr_daemon.publish.inputs.tied import TiedTensors, declared_tied, find_tied, has_pairs
from dcr_daemon.publish.options import KEEP_VERSIONS, SCRUB_RATE, PublishOptions, default_state, parse_codec
from dcr_daemon.publish.rank import Rank, find_rank
from dcr_daemon.publish.version.attempt import Attempt
from dcr_daemon.publish.version.fate import reason_of
from dcr_daemon.publish.version.update import Update
from dcr_daemon.publish.version.versions import checked_metadata, checked_step
from dcr_daemon.runtime import LoopThread
from dcr_daemon.store import Store, open_store
from dcr_daemon.tracing.recorder import traced

__all__ = ["Publisher", "Trainer", "Update"]

_ONE_PROCESS = "make and use it in the process that has the weights"


class Publisher:
    """Publishes to one stream; a context manager. Not to be used from several threads at once.

        with Publisher("s3://bucket/run1", base="/models/base", create=True) as publisher:
            for step in range(1000):
                train(model)
                update = publisher.publish(model, step=step)    # the weights may change from here on
            update.wait_sealed()

    `torch.distributed`, where it is initialised, says which rank of how many this process is: make the publisher after
    that, on every rank, with the same arguments.

    Args:
        stream: `file:///directory` or `s3://bucket/prefix`.
        base: the checkpoint that is version 0; needed with `create`.
        create: make the stream if there is none; on an existing one it does nothing.
        name: publisher name; None for one drawn at random and kept in `state`.
        take_over: claim the stream from a publisher of another name that has not released it.
        state: root directory of the state (a dense copy of the model among it); None for the usual place.
        endpoint_url, region, profile: of an S3-compatible service.
        trainer: facts about the layout that cannot be read from the tensors; needed for Megatron, torchtitan's adapters
            and custom frameworks. DTensors and transformers models need nothing.
        rank, world: of this process among those that publish together, where `torch.distributed` does not tell it: one
            rank that gathers all weights and publishes alone is `rank=0, world=1`.
        group: an id that exactly these processes agreed on for this start, without `torch.distributed`.
        codec: `auto`, `ulp`, `xor` or `overwrite`.
        ignore: globs of tensor names outside the base checkpoint to drop.
        upload_base: upload version 0 as an anchor when the stream is created.
        anchor_every, anchor_share, keep_versions, keep_hours: see `PublishOptions`.
        scrub_rate: bytes of the baseline that are checked per second between updates; 0 for none.
        lag: after the next update has begun, rank 0 gives up the missing ranks when none of them has put an object for
            this many seconds.
        patience: seconds that an unreachable bucket is tried before an update is given up. If the fate of a record
            that was sent is open even then, the error says so, and the next call finds out before it begins (must L1).
        emit: listens to events, on the publisher's own thread; default: Python's logging (`publish.event_log`). With
            `DCR_TRACE=FILE` in the environment a trace is written beside it (docs/OPERATIONS.md, *Traces*).

    Raises:
        Fenced: another publisher holds the stream.
        Incompatible, UsageError, NotFound, ResourceExhausted, StoreUnavailable: with what to do next.
    """

    def __init__(
        self,
        stream: str,
        *,
        base: str | Path | None = None,
        create: bool = False,
        name: str | None = None,
        take_over: bool = False,
        state: str | Path | None = None,
        endpoint_url: str | None = None,
        region: str | None = None,
        profile: str | None = None,
        trainer: Trainer | None = None,
        rank: int | None = None,
        world: int | None = None,
        group: str | None = None,
        codec: str = "auto",
        ignore: Sequence[str] = (),
        upload_base: bool = True,
        anchor_every: int | None = None,
        anchor_share: float | None = 1.0,
        keep_versions: int | None = KEEP_VERSIONS,
        keep_hours: float | None = None,
        scrub_rate: float = SCRUB_RATE,
        lag: float = 30.0,
        patience: float = 600.0,
        emit: Emit | None = None,
    ) -> None:
        self._options = PublishOptions(
            state=Path(state) if state else default_state(),
            base=Path(base) if base else None,
            create=create,
            name=name,
            take_over=take_over,
            codec=parse_codec(codec),
            ignore=tuple(ignore),
            upload_base=upload_base,
            anchor_every=anchor_every,
            anchor_share=anchor_share,
            keep_versions=keep_versions,
            keep_hours=keep_hours,
            scrub_rate=scrub_rate,
            lag=lag,
            patience=patience,
        )
        self._rank = find_rank(group, rank, world)
        self._trainer = trainer or Trainer()
        self._projection: RankProjection | None = None
        self._calls = 0
        listener = EventLog() if emit is None else emit
        self._emit = traced(listener, rank=self._rank.number, world=self._rank.world, stream=stream)
        self._update: Update | None = None  #: of the call before, until its error was raised
        self._background: Future[None] | None = None  #: what runs behind that call
        self._sealing: asyncio.Task[Any] | None = None
        self._idle_checks: asyncio.Task[None] | None = None
        self._rounded: set[tuple[str, str]] = set()  #: pairs of dtypes of which an event was emitted
        self._followed: set[str] = set()  #: likewise tensors that follow others
        self._loop: LoopThread | None = LoopThread("dcr-publisher")

        async def open_all() -> tuple[Store, Coordinator, TiedTensors]:
            store = await open_store(stream, endpoint_url=endpoint_url, region=region, profile=profile, emit=self._emit)
            try:
                coordinator = await open_coordinator(self._options, store, emit=self._emit, rank=self._rank)
                tied = await _tied(coordinator, self._options, self._rank)
                return store, coordinator, tied
            except BaseException:
                await store.close()
                raise

        try:
            self._store, self._coordinator, self._tied = self._loop.call(open_all())
            self._loop.call(self._start_idle_checks())
        except BaseException:
            self._loop.close()
            raise

    @property
    def version(self) -> int:
        """The newest version that this publisher knows to be sealed."""
        return self._coordinator.head

    def publish(
        self,
        weights: Any | Mapping[str, Any] | Iterable[tuple[str, Any]],
        *,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Update:
        """Publish one update; returns when the weights may be changed again.

        Args:
            weights: a module, a mapping, or an iterable of `(name, tensor)`; every tensor of the base checkpoint. On
                many ranks what each of them holds: DTensors, shards, Megatron's model chunks.
            step: the trainer's own label; it may go back.
            metadata: JSON-like data for the version's record.

        Raises:
            Incompatible: tensors added, missing, retyped or reshaped, all named; nothing is published.
            Fenced: another publisher owns the stream.
            StoreUnavailable: the bucket does not answer, now or for the update before.
            UpdateAborted: another rank cannot take part; no rank publishes this update.
        """
        self._check_usable()
        self._calls += 1
        try:
            check_kind(weights)
            step, data = checked_step(step), checked_metadata(metadata)
            self._coordinator.start_lag_timer()
            self._wait_background()
            self._running.call(self._stop_idle_checks())
            self._running.call(self._coordinator.abort_unless_sealed("the next update began"))
        except Exception as error:
            self._skip(error)
            raise
        attempt = self._diff(self._input(weights, step), step)
        self._update = update = Update(attempt.fate, lambda: self._loop is None or self._loop.here)
        self._background = self._running.start(self._complete(attempt, data))
        self._background.add_done_callback(update.background_ended)
        return update

    def _skip(self, error: Exception) -> None:
        """This call has failed before it opened an attempt: other ranks must not wait for it (must P2)."""
        with contextlib.suppress(DcrError):
            self._running.call(self._coordinator.skip(call=self._calls, reason=reason_of(error)))

    def _input(self, weights: Any, step: int | None) -> UpdateInput:
        """The weights on their way into an attempt. They have to be projected if there are several ranks, or if their
        names are not the checkpoint's."""
        layout, options = self._coordinator.layout, self._options
        if self._rank.alone and not (self._trainer.says or self._projection) and not needs_projection(weights, layout):
            subject = f"step {step}" if step is not None else "the update"
            return whole_tensors(weights, layout, subject=subject, ignore=options.ignore, tied=self._tied)
        self._projection = self._projection or RankProjection(
            self._trainer, self._rank, layout=layout, ignore=options.ignore, limit=block_bytes(options.chunk_bytes),
            emit=self._emit, tied=self._tied,
        )  # fmt: skip
        return RankShards(self._projection, weights)

    def _diff(self, weights: UpdateInput, step: int | None) -> Attempt:
        steps = diff_update(self._coordinator, weights, step=step, call=self._calls, on_loop=HandOver)
        try:
            attempt = run_on_thread(steps, self._running.call)
        except BaseException as error:
            self._abort(error)
            raise
        self._report(weights)
        return attempt

    def _abort(self, error: BaseException) -> None:
        """The update failed: abort and undo now if the bucket answers, else before the next one begins."""
        # End soon after Ctrl-C or an exit, and when the bucket did not answer for all the patience of `open` already.
        silent = isinstance(error, StoreUnavailable) and self._coordinator.context.attempt is None
        patience = CLOSE_PATIENCE if silent or not isinstance(error, Exception) else None
        try:
            self._running.call(self._coordinator.abort_unless_sealed(error, patience=patience))
        except Fenced:  # it explains the error, such as a collective call whose peers have been replaced (must P6)
            if isinstance(error, Exception):
                raise
        except DcrError as later:
            self._emit(Retrying(what=f"the abort, before the next update begins: {later.message}"))

    async def _complete(self, attempt: Attempt, metadata: dict[str, Any]) -> None:
        """Behind `publish`: seal, then an anchor if one is due. The attempt's fate has the outcome."""
        self._sealing = asyncio.current_task()
        try:
            await self._coordinator.seal(attempt, metadata=metadata)
        except DcrError as error:
            with contextlib.suppress(DcrError):  # the ledger alone says whether this is a failure (must L1)
                await self._coordinator.abort_unless_sealed(error)
        else:
            try:
                await self._coordinator.anchor_if_due()
            except StoreUnavailable as error:
                self._emit(
                    Degraded(
                        what=f"version {attempt.version} has no anchor; a later version tries again: {error.message}"
                    )
                )
        await self._start_idle_checks()

    async def _start_idle_checks(self) -> None:
        self._idle_checks = asyncio.create_task(self._run_idle_checks())

    async def _run_idle_checks(self) -> None:
        """Until the next update begins, or until there is something that only the next update can deal with."""
        try:
            while True:
                await self._coordinator.run_idle_checks()
                await self._coordinator.repair()
        except Fenced:
            pass  # said by an event; the next call raises it
        except DcrError as error:
            self._emit(Retrying(what=f"the repair of the baseline, before the next update begins: {error.message}"))

    async def _stop_idle_checks(self) -> None:
        if self._idle_checks:
            ended, self._idle_checks = self._idle_checks, None
            ended.cancel()
            await asyncio.wait([ended])
            if not ended.cancelled() and (error := ended.exception()):
                raise error

    def _wait_background(self, timeout: float | None = None) -> None:
        """Wait for the fate of the call before, and raise its error unless it was raised."""
        if self._background:
            background, update = self._background, self._update
            if not background.done() and update:
                self._running.start(self._say(f"version {update.version}: its seal, or the anchor after it"))
            error = background.exception(timeout)
            self._background = self._update = None
            if update:
                update.raise_once()
            if error:
                raise error

    async def _say(self, what: str) -> None:
        self._emit(Waiting(what=what))

    def _report(self, weights: UpdateInput) -> None:
        """Tell once what was made of the weights."""
        for (given, canonical), tensors in weights.rounded.items():
            if (given, canonical) not in self._rounded:
                self._rounded.add((given, canonical))
                self._emit(Rounded(tensors=tensors, given=given, canonical=canonical))
        for name, source in weights.followed.items() if self._rank.leads else ():
            if name not in self._followed:
                self._followed.add(name)
                self._emit(TensorFollowed(name=name, source=source))

    @property
    def _running(self) -> LoopThread:
        return self._check_usable()

    def _check_usable(self) -> LoopThread:
        if self._loop is None:
            raise UsageError("the publisher is closed", hint="make a new one")
        if not self._loop.here:
            raise UsageError("this process is a fork of the publisher's, and cannot use it", hint=_ONE_PROCESS)
        return self._loop

    def __reduce__(self) -> Never:
        raise UsageError("a publisher cannot be copied or pickled", hint=_ONE_PROCESS)

    def close(self) -> None:
        """Wait for the update under way, release the stream, and stop. Raises an error that was not raised before.

        In a fork of the publisher's process it does nothing: the stream is not the fork's to release.
        """
        self._close(None)

    def _close(self, timeout: float | None) -> None:
        if self._loop is None or not self._loop.here:
            return
        try:
            self._coordinator.start_lag_timer()
            with contextlib.suppress(TimeoutError):
                self._wait_background(timeout)
        finally:
            loop, self._loop = self._loop, None
            try:
                loop.call(self._close_all())
            finally:
                loop.close()

    async def _close_all(self) -> None:
        """What is still under way ends first: a coordinator is used by one task at a time."""
        try:
            if self._sealing:
                self._sealing.cancel()
                await asyncio.wait([self._sealing])
            await self._stop_idle_checks()
        finally:
            try:
                await self._coordinator.close()
            finally:
                await self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Closes. After Ctrl-C, or an exit asked for, the update under way is given some seconds and no more."""
        try:
            self._close(None if error is None or isinstance(error, Exception) else CLOSE_PATIENCE)
        except DcrError:
            if error is None:
                raise


async def _tied(coordinator: Coordinator, options: PublishOptions, rank: Rank) -> TiedTensors:
    """The tied tensors of the layout, as far as this rank needs to know them: a rank that has not all of the layout
    compares what it owns of them before it diffs."""
    layout, context = coordinator.layout, coordinator.context
    if not (rank.leads and has_pairs(layout)):
        return TiedTensors()
    config = await read_config(coordinator.ledger, options.base)
    if not rank.alone:
        return declared_tied(layout, config)
    return await context.workers.run(lambda: find_tied(layout, config, read=coordinator.read))
