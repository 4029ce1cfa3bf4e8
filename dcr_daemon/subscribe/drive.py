"""One engine kept at a stream's newest version: attach, locate, prove, catch up, serve, then version by version.

What it decides: the engine serves only when it is at the newest seal read at attach (must E2); several versions behind
are one transaction (must E6); a refusal is answered with a full fingerprint, and a version that healthy weights refuse
twice is poisoned and gone round by an anchor (must P4). What it leaves to others: whether the engine may run at all
(the engine, must E1), what is in the ledger, what is staged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dcr_daemon import runtime
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.engine.port import Engine, EngineGone, Swapped, Transaction, Verdict
from dcr_daemon.errors import Corrupt, DcrError, EngineRefused, Exhausted, StoreUnavailable
from dcr_daemon.events import (
    Alarm,
    Attached,
    Committed,
    Emit,
    EngineLost,
    Prepared,
    Repaired,
    RolledBack,
    Serving,
    Waiting,
)
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.objects import BelowFloor, NotYet, Objects
from dcr_daemon.ledger.records import Seal
from dcr_daemon.ledger.route import NoRoute, Route
from dcr_daemon.subscribe.anchors import AnchorFiles
from dcr_daemon.subscribe.follow import Feed
from dcr_daemon.subscribe.loaded import Loaded
from dcr_daemon.subscribe.locate import locate, record_of
from dcr_daemon.subscribe.options import SubscribeOptions
from dcr_daemon.subscribe.stage import Stage
from dcr_daemon.subscribe.status import Reporter

BACK_OFF = 60.0  #: seconds between two tries at most
HEARTBEAT = 5  #: times `poll`, between looks at an engine that has nothing to do
REFUSALS = 2  #: times that proved weights may refuse a version before it counts as poisoned


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
    feed: Feed
    reporter: Reporter


@dataclass(frozen=True, slots=True)
class Blocked:
    """A version that the chain does not get past. One that is poisoned can only be gone round."""

    version: int
    error: DcrError
    poisoned: bool


class Driver:
    """Drives `engine`; `version` is what its weights are, None while that is unknown."""

    def __init__(self, place: Place, engine: Engine, emit: Emit) -> None:
        self._at = place
        self._engine = engine
        self._emit = emit
        self.version: int | None = None
        self._goal = 0
        self._incarnation = ""
        self._serving = False
        self._blank = False
        self._nonce = runtime.nonce()
        self._transactions = 0
        self._pending: Transaction | None = None
        self._blocked: Blocked | None = None
        self._one_by_one = False
        self._refusals = 0
        self._bad_anchors: set[int] = set()
        self._unfed: DcrError | None = None

    async def run(self) -> None:
        """Until cancelled; with `once`, until the newest seal read at the start is served."""
        began, tries, once = runtime.monotonic(), 0, self._at.options.once
        self._goal = self._newest()
        while True:
            try:
                await self._attach()
                tries = 0
                await self._keep()
                return
            except EngineGone as error:
                self.version, self._serving = None, False
                self._emit(EngineLost(reason=error.message))
                self._report("waiting for the engine", error.message)
                if once and runtime.monotonic() - began > self._at.options.patience:
                    raise
            except StoreUnavailable as error:
                if once:
                    raise
                self._emit(Waiting(what=error.message))
            await runtime.sleep(self._back_off(tries))
            tries += 1
            if not once:
                await self._read_on()
                self._goal = self._newest()

    async def _read_on(self) -> None:
        try:
            await self._at.ledger.read()
        except StoreUnavailable as error:
            self._emit(Waiting(what=error.message))

    def _newest(self) -> int:
        """The newest sealed version that the operator allows."""
        newest, pin = self._at.ledger.state.seal.version, self._at.options.pin
        return newest if pin is None else min(newest, pin)

    def _target(self) -> int:
        """The version to bring the engine to: a fixed one with `once`, else whatever is newest."""
        return self._goal if self._at.options.once else max(self._newest(), self._goal)

    # Attach: whose weights are these?

    async def _attach(self) -> None:
        began, at = runtime.monotonic(), self._at
        self._report("attaching")
        facts = await at.stage.facts()
        attached = await self._engine.attach(facts)
        if attached.adopted is not None:
            ended = await self._engine.settle(attached.adopted)
            self._emit(Repaired(version=ended.version or 0, how=f"settled {attached.adopted}: {ended.verdict.value}"))
            attached = await self._engine.attach(facts)
        self._incarnation = attached.incarnation
        runtime.failpoint("subscribe.attached")
        at.loaded.follow(attached.classes)
        await self._tell_pending()
        if attached.adopted is not None:
            # It can go neither forward nor back: only a dense load ends it (must E6).
            self.version, self._serving, self._blank = None, False, False
            return
        vector = np.frombuffer(attached.vector, dtype="<u8").astype(np.uint64)
        self._blank = not vector.any()
        self._serving = attached.serving
        self.version = await locate(
            at.ledger,
            at.objects,
            at.layout,
            vector,
            attached.classes,
            highest=at.ledger.state.seal.version,
            hint=attached.version,
            emit=self._emit,
        )
        seconds = runtime.monotonic() - began
        self._emit(Attached(version=self.version, tensors=len(attached.classes), seconds=seconds))
        at.reporter.set(engine=attached.incarnation, version=self.version)
        self._unfed = None
        if self.version is not None:
            try:
                loaded = await at.loaded.at(self.version)
            except (NoRoute, BelowFloor, Corrupt) as error:
                # What the loader computed cannot be told from live memory: only an anchor brings it to a known state.
                self.version, self._unfed = None, error
            else:
                await self._prove(self.version, loaded)

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
            await self._tell_committed(pending.base, ended, 0.0)
        elif ended.verdict is Verdict.ROLLED_BACK:
            self._emit(RolledBack(txn=pending.id, version=pending.base, reason=ended.reason))

    # Keep: version after version.

    async def _keep(self) -> None:
        tries = 0
        while True:
            try:
                await self._step()
                tries = 0
            except (StoreUnavailable, Corrupt, Exhausted, EngineRefused, NoRoute) as error:
                if self._at.options.once or not self._may_wait(error):
                    raise
                self._report("poisoned" if self._blocked and self._blocked.poisoned else "blocked", str(error))
                self._emit(Waiting(what=str(error)))
                await self._at.feed.wait_change(self._back_off(tries))
                self._retry()
                tries += 1
                continue
            if self._at.options.once:
                return
            while not await self._at.feed.wait_change(self._at.options.poll * HEARTBEAT):
                await self._look_at_engine()

    async def _look_at_engine(self) -> None:
        """An engine that was restarted waits, paused, for somebody to prove it: notice without a new version."""
        status = await self._engine.status()
        if status.incarnation != self._incarnation:
            raise EngineGone("the engine was restarted", hint="attach again")
        if status.version != self.version:
            await self._engine.drop()  # a subscriber that was fenced learns it here, and does not attach again
            raise EngineGone(f"the engine is no longer proved at version {self.version}", hint="attach again")
        self._at.reporter.set(serving=status.serving)  # somebody else may have paused it: that is their business

    def _may_wait(self, error: DcrError) -> bool:
        """Whether time may help: weights that nobody knows stay unknown, unless there are none yet."""
        return self.version is not None or isinstance(error, StoreUnavailable) or self._blank

    def _retry(self) -> None:
        """A damaged object may be whole again; a poisoned version stays so."""
        self._bad_anchors.clear()
        if self._blocked and not self._blocked.poisoned:
            self._blocked = None

    async def _step(self) -> None:
        """To the target, and serve."""
        while self.version is None or self.version < self._target():
            await self._advance(self._target())
            if self.version is not None and self.version >= self._goal and not self._serving:
                await self._serve()
        if not self._serving:
            await self._serve()
        self._report("serving")

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
        self._serving = True
        runtime.failpoint("subscribe.serving")
        self._tell_serving(self.version)

    async def _advance(self, target: int) -> None:
        """One transaction or one anchor nearer to `target`."""
        self._report("catching up", f"to version {target}")
        route = await self._route(target)
        try:
            if route.anchor is not None:
                await self._load(route.anchor)
            else:
                await self._change(list(route.hops))
        except BelowFloor as error:  # the floor has risen over the route: plan again
            self._emit(Waiting(what=error.message))

    async def _route(self, target: int) -> Route:
        history, blocked = self._at.ledger.history, self._blocked
        try:
            route = await history.route(self.version, target, avoid=self._bad_anchors)
        except NoRoute as error:
            if self._unfed is not None and not self._bad_anchors:
                name = self._at.layout[self._at.loaded.tensors[0]].name
                raise EngineRefused(
                    f"the engine's loader computes with {name}, whose bytes are not known here: {self._unfed.message}",
                    hint="give --base with the checkpoint that the stream was created from, or publish an anchor",
                ) from error
            if self.version is None and not self._blank and not self._bad_anchors:
                raise EngineRefused(
                    f"the engine's weights are of no version of this stream, and {error.message}",
                    hint="start it from the stream's base or a materialised version",
                ) from error
            raise
        if blocked is None or blocked.version not in route.hops:
            return route
        below = {anchor.version for anchor in await history.anchors() if anchor.version < blocked.version}
        try:
            return await history.route(None, target, avoid=self._bad_anchors | below)
        except NoRoute:
            raise blocked.error from None

    # The chain.

    async def _change(self, hops: list[int]) -> None:
        at, base = self._at, self.version
        assert base is not None
        first, last = hops[0], hops[0] if self._one_by_one else hops[-1]
        seals = await at.ledger.history.between(first, last)
        for seal in seals:
            await at.feed.settle(seal.attempt)
        began = runtime.monotonic()
        try:
            staged = await at.loaded.beside(await at.stage.hops(seals, await record_of(at.ledger, base)), base)
        except (Corrupt, NotYet) as error:  # damaged, or deleted behind our back: an anchor may lead round it
            self._block(first, error, poisoned=False)
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
        except (EngineRefused, Corrupt, Exhausted) as error:
            self._pending = None
            await self._refused(txn, error)
            return
        self._pending = None
        await self._ended(txn, ended, began)

    async def _ended(self, txn: Transaction, ended: Swapped, began: float) -> None:
        if ended.verdict is Verdict.ROLLED_BACK:
            self._emit(RolledBack(txn=txn.id, version=txn.base, reason=ended.reason))
            # It had accepted the change: a fault of its memory or disk, and no word against the version. An anchor is
            # the next way (must E5); where there is none, the same way is tried again after a while.
            await self._attach()
            error = EngineRefused(f"version {txn.version} was rolled back: {ended.reason}")
            self._block(txn.hops[0].version, error, poisoned=False)
            return
        if ended.verdict is not Verdict.COMMITTED or ended.version is None:
            self._pending = txn
            raise EngineGone(f"transaction {txn.id} is {ended.verdict.value}: {ended.reason}", hint="attach again")
        runtime.failpoint("subscribe.swapped")
        self.version, self._serving = ended.version, ended.serving
        self._refusals, self._one_by_one = 0, False
        await self._tell_committed(txn.base, ended, runtime.monotonic() - began)
        self._tidy()

    async def _refused(self, txn: Transaction, error: DcrError) -> None:
        """The engine did not take a change, and nothing was written: find out what its weights are (must P4)."""
        before, version, alone = self.version, txn.hops[0].version, len(txn.hops) == 1
        self._emit(Waiting(what=f"version {version} was refused: {error}"))
        self._one_by_one = True  # to learn which of several it is
        if isinstance(error, Exhausted):
            if alone:
                raise error
            return
        await self._attach()
        if self.version != before or not alone:
            return
        self._refusals += 1
        if self._refusals < REFUSALS:
            return
        self._refusals = 0
        self._emit(Alarm(must="P4", what=f"version {version} is poisoned: proved weights refuse it: {error.message}"))
        self._block(version, error, poisoned=True)

    def _block(self, version: int, error: DcrError, *, poisoned: bool) -> None:
        self._blocked = Blocked(version, error, poisoned)
        self._report("poisoned" if poisoned else "blocked", error.message)

    # Anchors.

    async def _load(self, version: int) -> None:
        at, base, began = self._at, self.version, runtime.monotonic()
        anchor = await at.ledger.history.anchor(version)
        record = await record_of(at.ledger, version)
        try:
            files = await at.anchors.fetch(anchor)
            runtime.failpoint("subscribe.anchor.fetched")
            ended = await self._engine.load(version, files, await at.stage.vector(record), str(version))
        except (Corrupt, NotYet, EngineRefused) as error:
            await self._give_up(version, error)
            return
        if ended.verdict is not Verdict.COMMITTED or ended.version is None:
            await self._give_up(version, EngineRefused(f"anchor {version} was not loaded: {ended.reason}"))
            return
        runtime.failpoint("subscribe.loaded")
        self.version, self._serving, self._blank, self._unfed = ended.version, ended.serving, False, None
        if self._blocked and self._blocked.version <= ended.version:
            self._blocked = None
        if base is None:
            self._emit(Repaired(version=ended.version, how="loaded an anchor"))
        await self._tell_committed(base or 0, ended, runtime.monotonic() - began, route="anchor")
        await at.loaded.take(version, files)
        at.anchors.forget()
        runtime.failpoint("subscribe.anchor.forgotten")
        self._tidy()

    async def _give_up(self, version: int, error: DcrError) -> None:
        """Do without this anchor; if there is no other way, its failure is the news."""
        self._emit(Waiting(what=f"anchor {version} cannot be loaded: {error}"))
        self._bad_anchors.add(version)
        try:
            await self._route(self._target())
        except NoRoute:
            raise error from None

    # What is told.

    async def _tell_committed(self, base: int, ended: Swapped, seconds: float, *, route: str = "chain") -> None:
        assert ended.version is not None
        record = await record_of(self._at.ledger, ended.version)
        step = record.step if isinstance(record, Seal) else None
        self._emit(
            Committed(
                base=base,
                version=ended.version,
                route=route,
                pause_seconds=ended.pause,
                seconds=seconds,
                step=step,
            )
        )
        self._at.reporter.set(version=ended.version, step=step)
        if ended.serving:
            self._tell_serving(ended.version)

    def _tell_serving(self, version: int) -> None:
        if memory := self._at.ledger.memory:
            memory.serves(version)
        runtime.failpoint("subscribe.served")
        self._emit(Serving(version=version))
        self._report("serving")

    def _report(self, state: str, detail: str = "") -> None:
        head = self._at.ledger.state.seal.version
        self._at.reporter.set(state=state, detail=detail, serving=self._serving, head=head)

    def _tidy(self) -> None:
        assert self.version is not None
        self._at.feed.skip_to(self.version)
        self._at.stage.forget(self.version)
        self._at.loaded.tidy(self.version)
        runtime.failpoint("subscribe.tidied")

    def _back_off(self, tries: int) -> float:
        return min(self._at.options.poll * 2.0**tries, BACK_OFF) * (0.75 + runtime.jitter() / 2)
