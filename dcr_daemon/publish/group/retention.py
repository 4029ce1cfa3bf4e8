"""Retention behind one publisher: it raises the floor and deletes, and holds nothing up (must L5).

A round runs on the publisher's loop, beside the next update, one at a time: at the first seal of this process, so that
what an earlier one left behind is deleted, after every anchor, and every `EVERY` seals. An error becomes an event, and
the round is tried again later; a ledger that lacks records is an alarm, and nothing is deleted. A fenced publisher
deletes nothing more: the publisher that fenced it decides now.
"""

from __future__ import annotations

import asyncio

from dcr_daemon import runtime
from dcr_daemon.errors import Corrupt, DcrError, Fenced
from dcr_daemon.events import Alarm, Collected, Degraded, Emit, Retrying
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.retention.collector import Collector
from dcr_daemon.ledger.retention.plan import Plan, RetentionPolicy
from dcr_daemon.ledger.retention.unexplained import check_explained
from dcr_daemon.store.port import DeleteRefused

EVERY = 32  #: seals from one round to the next, if no anchor comes between


class Retention:
    """Collects for one leader, whose ledger is claimed. `anchors`: whether this publisher will write any."""

    def __init__(self, ledger: Ledger, policy: RetentionPolicy, *, emit: Emit, anchors: bool) -> None:
        self._ledger, self._policy, self._emit, self._anchors = ledger, policy, emit, anchors
        self._round: asyncio.Task[None] | None = None
        self._seals = EVERY  # the first one is followed by a round
        self._again = False  #: an anchor was recorded during the round under way, which may not have seen it
        self._over = False  #: fenced, or closed: no round begins any more
        self._said = self._said_refused = ""
        self._alarmed = ""

    def sealed(self) -> None:
        """A version was sealed."""
        self._seals += 1
        if self._seals >= EVERY:
            self.anchored()

    def anchored(self) -> None:
        """An anchor was recorded, so that the floor may rise: begin a round, after the one that is under way."""
        self._again = True
        if self._over or (self._round and not self._round.done()):
            return
        self._round = asyncio.create_task(self._run())

    async def ended(self) -> None:
        """Wait for the round under way. Raises what only a bug raises there."""
        if self._round:
            await asyncio.wait([self._round])
            if not self._round.cancelled():
                self._round.result()

    async def close(self) -> None:
        """End the round under way, and begin none any more; what it did not get to is found by the next process."""
        self._over = True
        if self._round:
            self._round.cancel()
            await self.ended()

    async def _run(self) -> None:
        while self._again and not self._over:
            self._again, self._seals = False, 0
            await self._collect()

    async def _collect(self) -> None:
        began = runtime.monotonic()
        try:
            plan = await self._plan()
            collector = Collector(self._ledger)
            if plan.rises:
                await collector.raise_floor(plan)
            done = await collector.delete(plan, go_on=self._still_ours)
        except Fenced as error:
            self._over = True
            self._emit(Degraded(what=f"retention stops, and deletes nothing more: {error.message}"))
        except Corrupt as error:
            self._alarm(error)
        except DcrError as error:
            self._emit(Retrying(what=f"retention, after a later version: {error.message}"))
        else:
            if plan.rises or done.objects:
                seconds = runtime.monotonic() - began
                self._emit(Collected(floor=done.floor, objects=done.objects, bytes=done.bytes, seconds=seconds))
            self._warn(done.refusal)

    def _warn(self, refusal: DeleteRefused | None) -> None:
        """Say once which objects cannot be deleted, and why; every round tries them again."""
        folders = sorted({key.partition("/")[0] for key in refusal.keys}) if refusal else []
        told = " ".join(folders)
        if refusal and told != self._said_refused:
            self._emit(Degraded(what=f"retention goes on, but what it may not delete stays: {refusal}"))
        self._said_refused = told

    def _alarm(self, error: Corrupt) -> None:
        """The ledger is damaged, and nothing is deleted. Told once, and again if it is something else."""
        if error.message != self._alarmed:
            self._alarmed = error.message
            self._emit(Alarm(must="L2", what=f"retention deletes nothing: {error}"))

    async def _plan(self) -> Plan:
        await self._still_ours()
        plan = await Collector(self._ledger).plan(self._policy)
        check_explained(plan, self._ledger.store.url)
        held = plan.floor.held if plan.floor.blocked or not self._anchors else ""
        if held and not self._said:
            hint = "" if self._anchors else "; let this publisher write anchors (--anchor-share, --anchor-every)"
            self._emit(Degraded(what=f"retention: {held}{hint}"))
        self._said = held
        return plan

    async def _still_ours(self) -> None:
        await self._ledger.read()
        if not self._ledger.holds:
            owner = self._ledger.state.epoch
            raise Fenced(f"publisher {owner.name if owner else 'nobody'} has claimed {self._ledger.store.url} since")
