"""Keeps one engine at a stream's newest version: attach, locate, prove, catch up, serve, then version after version.

It decides: the engine serves only when it is at the newest seal read at attach (must E2); several versions behind are
one transaction (must E6); a refusal is answered with a full fingerprint, and a version that healthy weights refuse
twice is poisoned and passed by way of an anchor (must P4); an engine that can never be served, as it was started, is
asked again when it is another one, else every quarter of an hour; nothing that a bucket holds or an engine answers ends
it, except another owner (must E3) and what only an operator can correct.

Others decide: whether the engine may run at all (the engine, must E1), what is in the ledger (`follower`), what is
staged (`stage`), when something that failed is tried again (`backoff`).

`version` is the last proved version; `_detach` sets it to None, until an attach or a load proves one.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import numpy as np

from dcr_daemon import runtime
from dcr_daemon.checkpoint.directory import tensor_files
from dcr_daemon.engine.port import Attached as EngineAttached
from dcr_daemon.engine.port import (
    Engine,
    EngineGone,
    EngineUnsupported,
    StreamFacts,
    Swapped,
    Transaction,
    Verdict,
    VersionDelta,
)
from dcr_daemon.errors import Corrupt, DcrError, EngineRefused, NotFound, ResourceExhausted, StoreUnavailable
from dcr_daemon.events import Alarm, Attached, Degraded, Emit, Prepared, Refused, Repaired, Retrying, RolledBack
from dcr_daemon.ledger.objects import BelowFloor, ObjectPending
from dcr_daemon.ledger.route import NoRoute, Route
from dcr_daemon.subscribe.backoff import BACK_OFF, FailureBackoff, back_off
from dcr_daemon.subscribe.context import SubscriberContext
from dcr_daemon.subscribe.engine_monitor import EngineMonitor
from dcr_daemon.subscribe.locate import LiveWeights, locate
from dcr_daemon.subscribe.status_publisher import StatusPublisher

HEARTBEAT = 5  #: times `poll`, between checks of an engine that has nothing to do
#: errors that are reported and retried, unless `once`
RETRIED = (StoreUnavailable, Corrupt, ResourceExhausted, EngineRefused, NotFound)


class Driver:
    """Drives one engine. `run` is all that a caller needs."""

    def __init__(self, context: SubscriberContext, engine: Engine, emit: Emit) -> None:
        self._context = context
        self._engine = engine
        self._emit = emit
        self._heartbeat = context.options.poll * HEARTBEAT
        self._status = StatusPublisher(context.ledger, context.status, emit=emit)
        self._backoff = FailureBackoff(context.options.poll)
        self._monitor = EngineMonitor(engine, context.scrub, heartbeat=self._heartbeat, notice=self._note_serving)
        self.version: int | None = None
        self._newest_at_attach = 0  #: `_newest()` when `run` last began to attach
        # What the last attach found, and what has become of it since.
        self._incarnation = ""
        self._attached = False  #: it is known what the engine holds
        self._told_to_serve = False  #: it was told to serve since the attach: if it is paused now, somebody else did it
        self._blank = False  #: its weights are all zero
        self._stuck = ""  #: why a begun transaction can be neither committed nor rolled back
        self._computed_lost: DcrError | None = None  #: why the loader-computed tensors' bytes are not known
        # Transactions.
        self._nonce = runtime.nonce()
        self._transactions = 0
        self._unanswered: Transaction | None = None  #: one whose outcome is not known
        self._one_by_one = False  #: one version in a transaction, after a refusal
        self._outdated: Route | None = None  #: the last route that the floor has risen over

    # The outer loop: attach, follow, and after a failure attach again.

    async def run(self) -> None:
        """Run until cancelled; with `once`, until the newest seal read at the start is served.

        Raises:
            Fenced: another subscriber has attached to this engine.
            Incompatible, UsageError: what only an operator can correct.
            With `once`, whatever prevents it; without, that is reported and retried.
        """
        began, absent, once = runtime.monotonic(), 0, self._context.options.once
        self._newest_at_attach = self._newest()
        while True:
            try:
                await self._attach()
                await self._follow_stream()
                return
            except EngineGone as error:
                self._status.lost(error.message)
                if once and runtime.monotonic() - began > self._context.options.patience:
                    raise
                absent = 0 if self._attached else absent + 1
                pause = back_off(self._context.options.poll, absent, longest=self._heartbeat)
                if self._attached:  # it may die of what it is asked to do, again and again
                    pause = self._backoff.note_failure()
            except EngineUnsupported as error:
                if once:
                    raise
                self._status.unsupported(str(error))
                pause = 0.0
                if await self._monitor.wait_restarted(self._backoff.note_unsupported()):
                    self._backoff.note_new_engine()
            except RETRIED as error:
                if once:
                    raise
                if isinstance(error, EngineRefused):
                    self._status.lost(error.message)  # its weights are not proved, whatever they are
                self._report_failure(error)
                pause = self._backoff.note_failure()
            self._detach()
            await runtime.sleep(pause)
            if not once:
                await self._read_on()
                self._newest_at_attach = self._newest()

    async def _read_on(self) -> None:
        try:
            await self._context.ledger.read()
        except (StoreUnavailable, ResourceExhausted) as error:
            self._emit(Retrying(what=f"reading the ledger: {error.message}"))

    def _newest(self) -> int:
        """The newest sealed version that the operator allows."""
        newest, pin = self._context.ledger.state.seal.version, self._context.options.pin
        return newest if pin is None else min(newest, pin)

    def _target(self) -> int:
        """The version to bring the engine to: a fixed one with `once`, else whatever is newest."""
        # A fixed version below the floor may be deleted: then the newest is taken with `once` too.
        fixed = self._context.options.once and self._newest_at_attach >= self._context.ledger.state.floor
        return self._newest_at_attach if fixed else max(self._newest(), self._newest_at_attach)

    async def _follow_stream(self) -> None:
        """Bring the engine to the target whenever there is a newer one; with `once`, once."""
        while True:
            try:
                await self._step()
            except RETRIED as error:
                if self._context.options.once or self._stuck or not self._attached:
                    raise
                self._report_failure(error)
                await self._wait_for_record(self._backoff.next_pause())
                continue
            if self._context.options.once:
                return
            await self._wait_for_record(BACK_OFF)

    async def _step(self) -> None:
        """To the target, and serve."""
        while self.version is None or self.version < self._target():
            await self._advance(self._target())
            if self.version is not None and self.version >= self._newest_at_attach and not self._told_to_serve:
                await self._serve()
        if not self._told_to_serve:
            await self._serve()
        self._backoff.note_progress(self.version)
        self._status.report("serving" if self._status.serving else "paused")

    async def _serve(self) -> None:
        assert self.version is not None
        mark = self._context.ledger.high_water_mark
        served = mark.served if mark else None
        if self._context.options.pin is None and served is not None and self.version < served:
            raise EngineRefused(
                f"the engine is at version {self.version}; this replica has served version {served} before",
                hint="wait for a newer version, or pin this one",
            )
        await self._engine.serve()
        self._told_to_serve = True
        runtime.failpoint("subscribe.serving")
        self._note_serving(True)

    async def _wait_for_record(self, seconds: float) -> None:
        """Until there is a new record, `seconds` at most."""
        await self._while_healthy(self._context.follower.wait_change(seconds))

    async def _while_healthy(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Await work that asks nothing of the engine, while the engine is monitored."""
        return await self._monitor.run_while_healthy(work, self._incarnation, version=self.version)

    def _note_serving(self, serving: bool) -> None:
        """The engine says whether it generates. If it was told to serve and does not, somebody else has paused it."""
        if self.version is None or not self._told_to_serve:
            return
        if serving:
            self._status.serves(self.version)
        else:
            self._status.paused(self.version)

    def _report_failure(self, error: DcrError) -> None:
        """Report what prevents progress; the engine goes on with what it has."""
        blocked = self._backoff.blocked
        self._emit(Retrying(what=str(error)))
        if isinstance(error, StoreUnavailable) and blocked is None:
            self._status.report("serving" if self._status.serving else "waiting", str(error))
        else:
            self._status.blocked(error, blocked if blocked and blocked.error is error else None)

    # Attach: which version are the engine's weights?

    def _detach(self) -> None:
        """From here on, only an attach says what the engine holds."""
        self.version, self._attached, self._told_to_serve = None, False, False
        self._context.scrub.suspend()

    async def _attach(self) -> None:
        began, context = runtime.monotonic(), self._context
        self._detach()
        self._status.attaching()
        attached = await self._take_over(await context.stage.stream_facts())
        if attached.incarnation != self._incarnation:
            self._backoff.note_new_engine()
        self._incarnation = attached.incarnation
        runtime.failpoint("subscribe.attached")
        context.computed.set_classes(attached.classes)
        await self._report_unanswered()
        if not self._stuck:
            await self._locate_and_prove(attached)
            seconds = runtime.monotonic() - began
            self._emit(Attached(version=self.version, tensors=len(attached.classes), seconds=seconds))
        self._status.attached(attached.incarnation, self.version)
        self._attached = True
        if self.version is not None:
            self._backoff.forget_up_to(self.version)
            context.scrub.resume()
            self._told_to_serve = attached.serving
            self._note_serving(attached.serving)

    async def _take_over(self, facts: StreamFacts) -> EngineAttached:
        """Become the owner. A transaction that another owner left begun is ended first (must E6)."""
        attached, self._stuck = await self._engine.attach(facts), ""
        if attached.adopted is None:
            return attached
        ended = await self._engine.finish_adopted(attached.adopted)
        if ended.version is not None:
            how = f"finished {attached.adopted}: {ended.verdict.value}"
            self._emit(Repaired(version=ended.version, how=how))
        attached = await self._engine.attach(facts)
        if attached.adopted is not None:  # it goes neither forward nor back: only a dense load ends it
            self._stuck = f"{attached.adopted} was begun and cannot be ended ({ended.reason})"
        return attached

    async def _report_unanswered(self) -> None:
        """Report what became of the transaction whose answer was lost."""
        unanswered, self._unanswered = self._unanswered, None
        if unanswered is None:
            return
        ended = await self._engine.outcome(unanswered.id)
        if ended.verdict is Verdict.COMMITTED:
            await self._status.committed(unanswered.base, ended, 0.0, route="chain")
        elif ended.verdict is Verdict.ROLLED_BACK:
            self._emit(RolledBack(txn=unanswered.id, version=unanswered.base, reason=ended.reason))

    async def _locate_and_prove(self, attached: EngineAttached) -> None:
        """Find the version by content, and have the engine prove it. `version` stays None if there is none."""
        context, self._computed_lost = self._context, None
        vector = np.frombuffer(attached.vector, dtype="<u8").astype(np.uint64)
        self._blank = not vector.any()
        if attached.version is not None and attached.version > context.ledger.state.seal.version:
            # Another subscriber has brought it further than this process has read.
            await context.ledger.read_up_to(attached.version)
        live = LiveWeights(vector, attached.classes)
        version = await locate(
            context.ledger,
            live,
            objects=context.objects,
            layout=context.layout,
            highest=context.ledger.state.seal.version,
            hint=attached.version,
            thorough=bool(self._backoff.bad_anchors),
            below_floor=attached.unverified,
            emit=self._emit,
        )
        if version is None:
            return
        try:
            computed = await context.computed.file_of(version)
        except (NoRoute, BelowFloor, Corrupt) as error:
            # What the loader computed cannot be told from live memory: only an anchor brings it to a known state.
            self._computed_lost = error
            return
        try:
            await self._prove(version, live, computed)
        except BelowFloor as error:  # the floor has risen since it was located: an anchor is the way on
            self._emit(Degraded(what=f"the engine's version {version} cannot be verified: {error.message}"))
            return
        self.version = version

    async def _prove(self, version: int, live: LiveWeights, computed: str) -> None:
        pin = self._context.options.pin
        if pin is not None and version > pin:
            raise EngineRefused(
                f"the engine is at version {version}, above the pinned {pin}",
                hint="restart the engine with older weights, or publish those as a new version",
            )
        record = await self._context.ledger.version_record(version)
        if live.digest == record.fingerprint.sha256:  # below the floor the object may be gone
            vector = await self._context.stage.write_vector(record, live.stored)
        else:
            vector = await self._context.stage.vector_file(record)
        runtime.failpoint("subscribe.located")
        await self._engine.prove(version, vector, str(version), computed)
        runtime.failpoint("subscribe.proved")

    # Advance: one transaction along the chain, or one dense load.

    async def _advance(self, target: int) -> None:
        """Bring the engine nearer to `target`, by one transaction or one dense load."""
        self._status.report("catching up", f"to version {target}")
        try:
            route = await self._route(target)
        except (NoRoute, EngineRefused):
            if not await self._base_leads_to(target):
                raise
            await self._load(0, self._base_files(), "the base")
            return
        try:
            if route.anchor is not None:
                anchor = await self._context.ledger.history.anchor(route.anchor)
                await self._load(route.anchor, self._context.anchors.fetch(anchor), "an anchor")
            else:
                await self._apply_chain(list(route.hops))
        except NotFound as error:  # the floor has risen over the route: plan again, once
            if route == self._outdated:
                raise
            self._outdated = route
            self._emit(Retrying(what=f"planning the route again: {error.message}"))

    async def _route(self, target: int) -> Route:
        """The cheapest route to `target`; if a version on it is blocked, the cheapest one that does not pass it."""
        history, blocked, bad_anchors = self._context.ledger.history, self._backoff.blocked, self._backoff.bad_anchors
        try:
            route = await history.route(self.version, target, avoid_anchors=bad_anchors)
        except NoRoute as error:
            raise self._explain_no_route(error) from error
        if blocked is None or blocked.version not in route.hops:
            return route
        try:
            return await history.route(self.version, target, avoid_anchors=bad_anchors, avoid_deltas={blocked.version})
        except NoRoute:
            raise blocked.error from None

    def _explain_no_route(self, error: NoRoute) -> DcrError:
        """Why there is no route, and what an operator can do to make one."""
        write_anchor = "write an anchor: restart the publisher with --anchor-every 1"
        hint = (
            f"{write_anchor}; or give --base with the checkpoint that the stream was created from; or restart the "
            "engine from a materialised version"
        )
        if self._stuck:
            return EngineRefused(f"the engine stays paused: {self._stuck}, and {error.message}", hint=hint)
        if self._computed_lost is not None:
            name = self._context.layout[self._context.computed.tensors[0]].name
            return EngineRefused(
                f"the engine's loader computes with {name}, whose bytes are not known here: "
                f"{self._computed_lost.message}",
                hint=f"give --base with the checkpoint that the stream was created from; or {write_anchor}",
            )
        if self.version is None and not self._blank:
            return EngineRefused(
                f"the engine's weights are of no version of this stream, and {error.message}", hint=hint
            )
        return error

    # The chain.

    async def _apply_chain(self, hops: list[int]) -> None:
        """One transaction of the deltas that lead to these versions, or of the first of them that fit."""
        base = self.version
        assert base is not None
        first, last = hops[0], hops[0] if self._one_by_one else hops[-1]
        began = runtime.monotonic()
        try:
            staged = await self._while_healthy(self._stage_deltas(first, last, base))
        except (Corrupt, ObjectPending, ResourceExhausted) as error:
            self._backoff.block(first, error)  # it is damaged, deleted or too large: an anchor may lead past it
            return
        runtime.failpoint("subscribe.staged")
        self._transactions += 1
        txn = Transaction(id=f"{self._nonce}-{self._transactions}", hops=staged, label=str(staged[-1].version))
        try:
            asked = runtime.monotonic()
            prepared = await self._engine.prepare(txn)
            last, now = staged[prepared.fits - 1].version, runtime.monotonic()
            self._emit(
                Prepared(
                    txn=txn.id,
                    base=base,
                    version=last,
                    changed=prepared.changed,
                    seconds=now - began,
                    prepare_seconds=now - asked,
                    spent=prepared.spent,
                )
            )
            self._unanswered = txn
            runtime.failpoint("subscribe.prepared")
            ended = await self._engine.swap(txn.id)
        except EngineGone as error:
            self._backoff.note_loss(first, error, anchor=False)
            raise
        except (EngineRefused, Corrupt, ResourceExhausted) as error:
            self._unanswered = None
            await self._transaction_refused(txn, error)
            return
        self._unanswered = None
        await self._transaction_ended(txn, ended, began)

    async def _stage_deltas(self, first: int, last: int, base: int) -> list[VersionDelta]:
        context = self._context
        seals = await context.ledger.history.between(first, last)
        for seal in seals:
            context.follower.finish_prefetch(seal.attempt)
        deltas = await context.stage.stage_deltas(seals, await context.ledger.version_record(base))
        return await context.computed.attach_files(deltas, base)

    async def _transaction_ended(self, txn: Transaction, ended: Swapped, began: float) -> None:
        if ended.verdict is Verdict.ROLLED_BACK:
            self._emit(RolledBack(txn=txn.id, version=txn.base, reason=ended.reason))
            # The engine had accepted the change, so its memory or disk is at fault, not the version. An anchor is the
            # next way (must E5); where there is none, the same way is tried again after a while.
            await self._attach()
            error = EngineRefused(f"version {txn.version} was rolled back: {ended.reason}")
            self._backoff.block(txn.hops[0].version, error)
            return
        if ended.verdict is not Verdict.COMMITTED or ended.version is None:
            self._unanswered = txn
            lost = EngineGone(f"transaction {txn.id} is {ended.verdict.value}: {ended.reason}", hint="attach again")
            self._backoff.note_loss(txn.hops[0].version, lost, anchor=False)
            raise lost
        runtime.failpoint("subscribe.swapped")
        self.version, self._one_by_one = ended.version, False
        await self._note_version(txn.base, ended, began=began, route="chain")
        self._delete_old()

    async def _transaction_refused(self, txn: Transaction, error: DcrError) -> None:
        """The engine did not take a change, and nothing was written: find out what its weights are (must P4)."""
        before, version, alone = self.version, txn.hops[0].version, len(txn.hops) == 1
        self._emit(Refused(subject="version", version=version, reason=str(error)))
        self._one_by_one = True  # to learn which of several it is
        if isinstance(error, ResourceExhausted):
            if alone:
                self._backoff.block(version, error)
            return
        await self._attach()
        if self.version != before or not alone or not self._backoff.note_refusal(version):
            return
        self._emit(Alarm(must="P4", what=f"version {version} is poisoned: proved weights refuse it: {error.message}"))
        self._backoff.block(version, error, poisoned=True)

    async def _note_version(self, base: int, ended: Swapped, *, began: float, route: str) -> None:
        """The engine has committed `version`: report it."""
        assert self.version is not None
        self._backoff.note_progress(self.version)
        self._context.scrub.resume()
        await self._status.committed(base, ended, runtime.monotonic() - began, route=route)
        self._told_to_serve = self._told_to_serve or ended.serving
        self._note_serving(ended.serving)

    def _delete_old(self) -> None:
        """Delete what was staged and kept for versions that the engine has left behind."""
        assert self.version is not None
        self._context.follower.skip_to(self.version)
        self._context.stage.forget_up_to(self.version)
        self._context.computed.delete_older(self.version)
        runtime.failpoint("subscribe.tidied")

    # Dense loads: forward only; a transaction that was left begun ends with them.

    async def _base_leads_to(self, target: int) -> bool:
        """Whether weights of no known version can be replaced by the base, with the whole chain from there."""
        if self._context.options.base is None or self.version is not None or 0 in self._backoff.bad_anchors:
            return False
        try:
            await self._context.ledger.history.route(0, target, avoid_anchors=self._backoff.bad_anchors)
        except NoRoute:
            return False
        return True

    async def _base_files(self) -> list[str]:
        assert self._context.options.base is not None
        return [str(path) for path in tensor_files(self._context.options.base)]

    async def _load(self, version: int, fetching: Coroutine[Any, Any, list[str]], how: str) -> None:
        """Have the engine load all of `version` from the files that `fetching` brings."""
        context, base, began, touched = self._context, self.version, runtime.monotonic(), False
        try:
            files = await self._while_healthy(fetching)
            runtime.failpoint("subscribe.anchor.fetched")
            vector = await context.stage.vector_file(await context.ledger.version_record(version))
            self._status.loading(version)
            self._attached, touched = False, True
            ended = await self._engine.load(version, files, vector, str(version))
        except EngineGone as error:
            if touched:
                self._backoff.note_loss(version, error, anchor=True)
            raise
        except (Corrupt, ObjectPending, ResourceExhausted, EngineRefused) as error:
            await self._load_failed(version, error, touched=touched)
            return
        if ended.verdict is not Verdict.COMMITTED or ended.version is None:
            reason = EngineRefused(f"{how} of version {version} was not loaded: {ended.reason}")
            await self._load_failed(version, reason, touched=True)
            return
        runtime.failpoint("subscribe.loaded")
        self.version, self._attached, self._blank = ended.version, True, False
        self._computed_lost, self._stuck = None, ""
        if base is None:
            self._emit(Repaired(version=ended.version, how=f"loaded {how}"))
        await self._note_version(base or 0, ended, began=began, route="anchor")
        await context.computed.keep_from(version, files)
        context.anchors.forget()
        runtime.failpoint("subscribe.anchor.forgotten")
        self._delete_old()

    async def _load_failed(self, version: int, error: DcrError, *, touched: bool) -> None:
        """Do without this anchor for now. Raises `error` if there is no other way."""
        self._emit(Refused(subject="anchor", version=version, reason=str(error)))
        self._backoff.block_anchor(version)
        if touched:
            await self._attach()
        try:
            await self._route(self._target())
        except (NoRoute, EngineRefused):
            if not await self._base_leads_to(self._target()):
                raise error from None
