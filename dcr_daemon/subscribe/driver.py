"""One engine kept at a stream's newest version: attach, locate, prove, catch up, serve, then version by version.

What it decides: the engine serves only when it is at the newest seal read at attach (must E2); several versions behind
are one transaction (must E6); a refusal is answered with a full fingerprint, and a version that healthy weights refuse
twice is poisoned and gone round by an anchor (must P4); nothing that a bucket holds or an engine answers ends it, but
for another owner (must E3) and what only an operator can mend. What it leaves to others: whether the engine may run at
all (the engine, must E1), what is in the ledger, what is staged, when what failed is tried again (`obstacles`).

`version` is what was proved last; it is None from the moment that is in doubt until an attach has ended well.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcr_daemon import runtime
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.directory import tensor_files
from dcr_daemon.engine.port import Attached as EngineAttached
from dcr_daemon.engine.port import Engine, EngineGone, StreamFacts, Swapped, Transaction, Verdict, VersionDelta
from dcr_daemon.errors import Corrupt, DcrError, EngineRefused, NotFound, ResourceExhausted, StoreUnavailable
from dcr_daemon.events import Alarm, Attached, Degraded, Emit, Prepared, Repaired, Retrying, RolledBack
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.objects import BelowFloor, ObjectPending, Objects
from dcr_daemon.ledger.route import NoRoute, Route
from dcr_daemon.subscribe.anchors import AnchorFiles
from dcr_daemon.subscribe.backoff import BACK_OFF, FailureBackoff, back_off
from dcr_daemon.subscribe.engine_monitor import EngineMonitor
from dcr_daemon.subscribe.follower import LedgerFollower
from dcr_daemon.subscribe.loaded import Loaded
from dcr_daemon.subscribe.locate import locate, record_of
from dcr_daemon.subscribe.options import SubscribeOptions
from dcr_daemon.subscribe.scrub import Scrub
from dcr_daemon.subscribe.stage import Stage
from dcr_daemon.subscribe.status import Reporter
from dcr_daemon.subscribe.status_publisher import StatusPublisher

HEARTBEAT = 5  #: times `poll`, between looks at an engine that has nothing to do
HELD = (StoreUnavailable, Corrupt, ResourceExhausted, EngineRefused, NotFound)  #: what is waited out unless `once`


@dataclass(frozen=True, slots=True)
class Place:
    """Where a subscriber works: everything it was given and made at its start."""

    options: SubscribeOptions
    ledger: Ledger
    objects: Objects
    layout: Layout
    stage: Stage
    anchors: AnchorFiles
    loaded: Loaded
    feed: LedgerFollower
    reporter: Reporter
    scrub: Scrub


class Driver:
    """Drives `engine`."""

    def __init__(self, place: Place, engine: Engine, emit: Emit) -> None:
        self._at = place
        self._engine = engine
        self._emit = emit
        self._heartbeat = place.options.poll * HEARTBEAT
        self._tell = StatusPublisher(place.ledger, place.reporter, emit)
        self._obstacles = FailureBackoff(place.options.poll)
        self._vigil = EngineMonitor(engine, place.scrub, heartbeat=self._heartbeat, notice=self._noticed)
        self.version: int | None = None
        self._goal = 0
        self._incarnation = ""
        self._attached = False  #: what the engine is, is known
        self._released = False  #: it was let run since attach: a pause now is somebody else's
        self._blank = False
        self._begun = ""  #: why a transaction ends neither way
        self._nonce = runtime.nonce()
        self._transactions = 0
        self._pending: Transaction | None = None
        self._one_by_one = False
        self._gone: Route | None = None
        self._unfed: DcrError | None = None

    async def run(self) -> None:
        """Until cancelled; with `once`, until the newest seal read at the start is served.

        Raises:
            Fenced: another subscriber has attached to this engine.
            Incompatible, UsageError: what only an operator can mend.
            With `once`, whatever stands in the way; without, that is said and waited out.
        """
        began, absent, once = runtime.monotonic(), 0, self._at.options.once
        self._goal = self._newest()
        while True:
            try:
                await self._attach()
                await self._keep()
                return
            except EngineGone as error:
                self._tell.lost(error.message)
                if once and runtime.monotonic() - began > self._at.options.patience:
                    raise
                absent = 0 if self._attached else absent + 1
                pause = back_off(self._at.options.poll, absent, self._heartbeat)
                if self._attached:  # it may die of what it is asked to do, again and again
                    pause = self._obstacles.failed()
            except HELD as error:
                if once:
                    raise
                if isinstance(error, EngineRefused):
                    self._tell.lost(error.message)  # whatever it holds, nobody vouches for it
                self._hold(error)
                pause = self._obstacles.failed()
            self._doubt()
            await runtime.sleep(pause)
            if not once:
                await self._read_on()
                self._goal = self._newest()

    async def _read_on(self) -> None:
        try:
            await self._at.ledger.read()
        except (StoreUnavailable, ResourceExhausted) as error:
            self._emit(Retrying(what=f"reading the ledger: {error.message}"))

    def _newest(self) -> int:
        """The newest sealed version that the operator allows."""
        newest, pin = self._at.ledger.state.seal.version, self._at.options.pin
        return newest if pin is None else min(newest, pin)

    def _target(self) -> int:
        """The version to bring the engine to: a fixed one with `once`, else whatever is newest."""
        fixed = self._at.options.once and self._goal >= self._at.ledger.state.floor  # else it cannot be had any more
        return self._goal if fixed else max(self._newest(), self._goal)

    # Attach: whose weights are these?

    def _doubt(self) -> None:
        """From here on, what the engine holds is for an attach to say."""
        self.version, self._attached, self._released = None, False, False
        self._at.scrub.forbid()

    async def _attach(self) -> None:
        began, at = runtime.monotonic(), self._at
        self._doubt()
        self._tell.report("attaching")
        attached = await self._take_over(await at.stage.facts())
        if attached.incarnation != self._incarnation:
            self._obstacles.another_engine()
        self._incarnation = attached.incarnation
        runtime.failpoint("subscribe.attached")
        at.loaded.follow(attached.classes)
        await self._tell_pending()
        if not self._begun:
            await self._recognise(attached)
            seconds = runtime.monotonic() - began
            self._emit(Attached(version=self.version, tensors=len(attached.classes), seconds=seconds))
        self._tell.attached(attached.incarnation, self.version)
        self._attached = True
        if self.version is not None:
            self._obstacles.passed(self.version)
            at.scrub.allow()
            self._released = attached.serving
            self._noticed(attached.serving)

    async def _take_over(self, facts: StreamFacts) -> EngineAttached:
        """Become the owner; a transaction that somebody left begun is ended first (must E6)."""
        attached, self._begun = await self._engine.attach(facts), ""
        if attached.adopted is None:
            return attached
        ended = await self._engine.finish_adopted(attached.adopted)
        if ended.version is not None:
            how = f"settled {attached.adopted}: {ended.verdict.value}"
            self._emit(Repaired(version=ended.version, how=how))
        attached = await self._engine.attach(facts)
        if attached.adopted is not None:  # it goes neither forward nor back: only a dense load ends it
            self._begun = f"{attached.adopted} was begun and cannot be ended ({ended.reason})"
        return attached

    async def _recognise(self, attached: EngineAttached) -> None:
        """Find the version by content, and have the engine prove it."""
        at, self._unfed = self._at, None
        vector = np.frombuffer(attached.vector, dtype="<u8").astype(np.uint64)
        self._blank = not vector.any()
        if attached.version is not None and attached.version > at.ledger.state.seal.version:
            await at.ledger.read()  # somebody else has brought it further than this process has read
        version = await locate(
            at.ledger,
            at.objects,
            at.layout,
            vector,
            attached.classes,
            highest=at.ledger.state.seal.version,
            hint=attached.version,
            thorough=bool(self._obstacles.bad_anchors),
            emit=self._emit,
        )
        if version is None:
            return
        try:
            loaded = await at.loaded.at(version)
        except (NoRoute, BelowFloor, Corrupt) as error:
            # What the loader computed cannot be told from live memory: only an anchor brings it to a known state.
            self._unfed = error
            return
        try:
            await self._prove(version, loaded)
        except BelowFloor as error:  # the floor has risen since it was located: it goes by an anchor
            self._emit(Degraded(what=f"the engine's version {version} cannot be verified: {error.message}"))
            return
        self.version = version

    async def _prove(self, version: int, loaded: str) -> None:
        pin = self._at.options.pin
        if pin is not None and version > pin:
            raise EngineRefused(
                f"the engine is at version {version}, above the pinned {pin}",
                hint="restart the engine with older weights, or publish those as a new version",
            )
        vector = await self._at.stage.vector(await record_of(self._at.ledger, version))
        runtime.failpoint("subscribe.located")
        await self._engine.prove(version, vector, str(version), loaded)
        runtime.failpoint("subscribe.proved")

    async def _tell_pending(self) -> None:
        """What became of the transaction whose answer was lost."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        ended = await self._engine.outcome(pending.id)
        if ended.verdict is Verdict.COMMITTED:
            await self._tell.committed(pending.base, ended, 0.0, route="chain")
        elif ended.verdict is Verdict.ROLLED_BACK:
            self._emit(RolledBack(txn=pending.id, version=pending.base, reason=ended.reason))

    # Keep: version after version.

    async def _keep(self) -> None:
        while True:
            try:
                await self._step()
            except HELD as error:
                if self._at.options.once or self._begun or not self._attached:
                    raise
                self._hold(error)
                await self._rest(self._obstacles.pause())
                continue
            if self._at.options.once:
                return
            await self._rest(BACK_OFF)

    async def _rest(self, seconds: float) -> None:
        """Until there is a new record, `seconds` at most."""
        await self._beside(self._at.feed.wait_change(seconds))

    async def _beside(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Await what asks nothing of the engine; the engine is looked after meanwhile."""
        return await self._vigil.beside(work, self._incarnation, self.version)

    def _noticed(self, serving: bool) -> None:
        """An engine that was released and does not run was paused by somebody else."""
        if self.version is None or not self._released:
            return
        if serving:
            self._tell.serves(self.version)
        else:
            self._tell.paused(self.version)

    def _hold(self, error: DcrError) -> None:
        """Something is in the way: say so, and go on with what there is."""
        obstacle = self._obstacles.blocked
        self._emit(Retrying(what=str(error)))
        if isinstance(error, StoreUnavailable) and obstacle is None:
            self._tell.report("serving" if self._tell.serving else "waiting", str(error))
        else:
            self._tell.blocked(error, obstacle if obstacle and obstacle.error is error else None)

    async def _step(self) -> None:
        """To the target, and serve."""
        while self.version is None or self.version < self._target():
            await self._advance(self._target())
            if self.version is not None and self.version >= self._goal and not self._released:
                await self._serve()
        if not self._released:
            await self._serve()
        self._obstacles.progress(self.version)
        self._tell.report("serving" if self._tell.serving else "paused")

    async def _serve(self) -> None:
        assert self.version is not None
        memory = self._at.ledger.memory
        served = memory.served if memory else None
        if self._at.options.pin is None and served is not None and self.version < served:
            raise EngineRefused(
                f"the engine is at version {self.version}; this replica has served version {served} before",
                hint="wait for a newer version, or pin this one",
            )
        await self._engine.serve()
        self._released = True
        runtime.failpoint("subscribe.serving")
        self._noticed(True)

    async def _advance(self, target: int) -> None:
        """One transaction, or one dense load, nearer to `target`."""
        self._tell.report("catching up", f"to version {target}")
        try:
            route = await self._route(target)
        except (NoRoute, EngineRefused):
            if not await self._may_reload(target):
                raise
            await self._load(0, self._base_files(), "the base")
            return
        try:
            if route.anchor is not None:
                anchor = await self._at.ledger.history.anchor(route.anchor)
                await self._load(route.anchor, self._at.anchors.fetch(anchor), "an anchor")
            else:
                await self._change(list(route.hops))
        except NotFound as error:  # the floor has risen over the route: plan again, once
            if route == self._gone:
                raise
            self._gone = route
            self._emit(Retrying(what=f"planning the route again: {error.message}"))

    async def _route(self, target: int) -> Route:
        """The cheapest route there; if the chain does not get past a version, the cheapest one round it."""
        history, obstacle, bad = self._at.ledger.history, self._obstacles.blocked, self._obstacles.bad_anchors
        try:
            route = await history.route(self.version, target, avoid_anchors=bad)
        except NoRoute as error:
            raise self._no_way(error) from error
        if obstacle is None or obstacle.version not in route.hops:
            return route
        try:
            return await history.route(self.version, target, avoid_anchors=bad, avoid_deltas={obstacle.version})
        except NoRoute:
            raise obstacle.error from None

    def _no_way(self, error: NoRoute) -> DcrError:
        """Why there is no route, and what would make one."""
        hint = (
            "write an anchor: restart the publisher with --anchor-every 1; or give --base with the checkpoint that the "
        )
        hint += "stream was created from; or restart the engine from a materialised version"
        if self._begun:
            return EngineRefused(f"the engine stays paused: {self._begun}, and {error.message}", hint=hint)
        if self._unfed is not None:
            name = self._at.layout[self._at.loaded.tensors[0]].name
            return EngineRefused(
                f"the engine's loader computes with {name}, whose bytes are not known here: {self._unfed.message}",
                hint="give --base with the checkpoint that the stream was created from; or write an anchor: restart "
                "the publisher with --anchor-every 1",
            )
        if self.version is None and not self._blank:
            return EngineRefused(
                f"the engine's weights are of no version of this stream, and {error.message}", hint=hint
            )
        return error

    # The chain.

    async def _change(self, hops: list[int]) -> None:
        base = self.version
        assert base is not None
        first, last = hops[0], hops[0] if self._one_by_one else hops[-1]
        began = runtime.monotonic()
        try:
            staged = await self._beside(self._staged(first, last, base))
        except (
            Corrupt,
            ObjectPending,
            ResourceExhausted,
        ) as error:  # an anchor may lead round what is damaged, deleted or too large
            self._obstacles.block(first, error)
            return
        runtime.failpoint("subscribe.staged")
        self._transactions += 1
        txn = Transaction(id=f"{self._nonce}-{self._transactions}", hops=staged, label=str(staged[-1].version))
        try:
            prepared = await self._engine.prepare(txn)
            last = staged[prepared.fits - 1].version
            seconds = runtime.monotonic() - began
            self._emit(Prepared(txn=txn.id, base=base, version=last, changed=prepared.changed, seconds=seconds))
            self._pending = txn
            runtime.failpoint("subscribe.prepared")
            ended = await self._engine.swap(txn.id)
        except EngineGone as error:
            self._obstacles.lost_over(first, error, anchor=False)
            raise
        except (EngineRefused, Corrupt, ResourceExhausted) as error:
            self._pending = None
            await self._refused(txn, error)
            return
        self._pending = None
        await self._ended(txn, ended, began)

    async def _staged(self, first: int, last: int, base: int) -> list[VersionDelta]:
        at = self._at
        seals = await at.ledger.history.between(first, last)
        for seal in seals:
            await at.feed.settle(seal.attempt)
        return await at.loaded.beside(await at.stage.hops(seals, await record_of(at.ledger, base)), base)

    async def _ended(self, txn: Transaction, ended: Swapped, began: float) -> None:
        if ended.verdict is Verdict.ROLLED_BACK:
            self._emit(RolledBack(txn=txn.id, version=txn.base, reason=ended.reason))
            # It had accepted the change: a fault of its memory or disk, and no word against the version. An anchor is
            # the next way (must E5); where there is none, the same way is tried again after a while.
            await self._attach()
            error = EngineRefused(f"version {txn.version} was rolled back: {ended.reason}")
            self._obstacles.block(txn.hops[0].version, error)
            return
        if ended.verdict is not Verdict.COMMITTED or ended.version is None:
            self._pending = txn
            lost = EngineGone(f"transaction {txn.id} is {ended.verdict.value}: {ended.reason}", hint="attach again")
            self._obstacles.lost_over(txn.hops[0].version, lost, anchor=False)
            raise lost
        runtime.failpoint("subscribe.swapped")
        self.version, self._one_by_one = ended.version, False
        await self._arrived(txn.base, ended, began, "chain")
        self._tidy()

    async def _arrived(self, base: int, ended: Swapped, began: float, route: str) -> None:
        assert self.version is not None
        self._obstacles.progress(self.version)
        self._at.scrub.allow()
        await self._tell.committed(base, ended, runtime.monotonic() - began, route=route)
        self._released = self._released or ended.serving
        self._noticed(ended.serving)

    async def _refused(self, txn: Transaction, error: DcrError) -> None:
        """The engine did not take a change, and nothing was written: find out what its weights are (must P4)."""
        before, version, alone = self.version, txn.hops[0].version, len(txn.hops) == 1
        self._emit(Degraded(what=f"version {version} was refused: {error}"))
        self._one_by_one = True  # to learn which of several it is
        if isinstance(error, ResourceExhausted):
            if alone:
                self._obstacles.block(version, error)
            return
        await self._attach()
        if self.version != before or not alone or not self._obstacles.refused(version):
            return
        self._emit(Alarm(must="P4", what=f"version {version} is poisoned: proved weights refuse it: {error.message}"))
        self._obstacles.block(version, error, poisoned=True)

    # Dense loads: forward only, and whatever else was begun ends with them.

    async def _may_reload(self, target: int) -> bool:
        """Whether weights that nobody knows can be replaced by the base, from which the whole chain is still there."""
        if self._at.options.base is None or self.version is not None or 0 in self._obstacles.bad_anchors:
            return False
        try:
            await self._at.ledger.history.route(0, target, avoid_anchors=self._obstacles.bad_anchors)
        except NoRoute:
            return False
        return True

    async def _base_files(self) -> list[str]:
        assert self._at.options.base is not None
        return [str(path) for path in tensor_files(self._at.options.base)]

    async def _load(self, version: int, fetching: Coroutine[Any, Any, list[str]], how: str) -> None:
        at, base, began, touched = self._at, self.version, runtime.monotonic(), False
        try:
            files = await self._beside(fetching)
            runtime.failpoint("subscribe.anchor.fetched")
            vector = await at.stage.vector(await record_of(at.ledger, version))
            self._tell.loading(version)
            self._attached, touched = False, True
            ended = await self._engine.load(version, files, vector, str(version))
        except EngineGone as error:
            if touched:
                self._obstacles.lost_over(version, error, anchor=True)
            raise
        except (Corrupt, ObjectPending, ResourceExhausted, EngineRefused) as error:
            await self._give_up(version, error, touched=touched)
            return
        if ended.verdict is not Verdict.COMMITTED or ended.version is None:
            reason = EngineRefused(f"{how} of version {version} was not loaded: {ended.reason}")
            await self._give_up(version, reason, touched=True)
            return
        runtime.failpoint("subscribe.loaded")
        self.version, self._attached, self._blank, self._unfed, self._begun = ended.version, True, False, None, ""
        if base is None:
            self._emit(Repaired(version=ended.version, how=f"loaded {how}"))
        await self._arrived(base or 0, ended, began, "anchor")
        await at.loaded.take(version, files)
        at.anchors.forget()
        runtime.failpoint("subscribe.anchor.forgotten")
        self._tidy()

    async def _give_up(self, version: int, error: DcrError, *, touched: bool) -> None:
        """Do without this anchor for now; if there is no other way, its failure is the news."""
        self._emit(Degraded(what=f"anchor {version} cannot be loaded: {error}"))
        self._obstacles.blame_anchor(version)
        if touched:
            await self._attach()
        try:
            await self._route(self._target())
        except (NoRoute, EngineRefused):
            if not await self._may_reload(self._target()):
                raise error from None

    def _tidy(self) -> None:
        assert self.version is not None
        self._at.feed.skip_to(self.version)
        self._at.stage.forget(self.version)
        self._at.loaded.tidy(self.version)
        runtime.failpoint("subscribe.tidied")
