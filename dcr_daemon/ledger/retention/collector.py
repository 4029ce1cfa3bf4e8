"""Carries retention out: reads ledger and listing, raises the floor, deletes; `plan` decides (musts L5 to L8).

Anybody may plan and delete below the present floor. Only the newest epoch raises it, and its record is durable before
the first object is deleted. An interrupted collection does no harm: the next sweep finds the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from dcr_daemon import runtime
from dcr_daemon.errors import Corrupt, Fenced, KeyNotFound, UsageError
from dcr_daemon.ledger import records
from dcr_daemon.ledger.fold import Tip
from dcr_daemon.ledger.ledger import Header, Ledger
from dcr_daemon.ledger.objects import BelowFloor, ObjectPending, Objects
from dcr_daemon.ledger.records import Anchor, Floor, ObjectRef, Seal, State, Stream
from dcr_daemon.ledger.retention.plan import (
    PREFIXES,
    AnchorFact,
    Facts,
    FloorPlan,
    Plan,
    RetentionPolicy,
    listed_attempts,
    plan_floor,
    plan_retention,
)
from dcr_daemon.ledger.retention.unexplained import check_explained, is_unexplained
from dcr_daemon.store.port import DeleteRefused, Entry
from dcr_daemon.task_limiter import run_limited

BATCH = 500  #: objects per delete; after each the caller is asked whether to go on
AT_ONCE = 8  #: files of an anchor checked at a time

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many of how many."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What was deleted: objects and bytes, and the floor that was applied.

    `refused`: objects that the store did not let us delete; `refusal`: the first reason.
    """

    floor: int
    objects: int
    bytes: int
    refused: int = 0
    refusal: DeleteRefused | None = None


class _FloorReached(Exception):
    """The floor is that high already."""


class Collector:
    """Collects in the stream of `ledger`, which has been read.

    Args:
        progress: called with what is being done, for people.
    """

    def __init__(self, ledger: Ledger, *, progress: Progress | None = None) -> None:
        self._ledger = ledger
        self._store = ledger.store
        # No patience: an anchor that is not complete now is not used now. The next sweep checks again.
        self._objects = Objects(ledger.store, floor=lambda: ledger.state.floor, patience=0)
        self._tell: Progress = progress or (lambda what, done, total: None)

    async def plan(self, policy: RetentionPolicy) -> Plan:
        """The plan that follows from the policy and the ledger, which is read to its tail. Writes nothing.

        Raises:
            Corrupt: a record is missing, or cannot be read.
        """
        listing = [entry for prefix in PREFIXES async for entry in self._list(prefix)]
        await self._ledger.read_whole()  # after the listing, which then shows nothing that the ledger cannot explain
        tip = self._ledger.tip
        sealed = await self._sealed(tip.state, listing)
        facts = Facts(tip.seq, tip.state, sealed, await self._anchors(), await self._unexplained(tip, sealed, listing))
        floor = await self._floor(policy, facts)
        return plan_retention(facts, floor, listing=listing)

    async def raise_floor(self, plan: Plan) -> None:
        """Write the plan's floor, unless the floor is that high already. The caller holds the claim.

        Raises:
            Fenced: a newer epoch owns the stream and decides.
            Undecided: the record was sent and its outcome is not known; nothing may be deleted by it yet.
            Corrupt: the ledger does not know of objects that it should know of.
        """
        check_explained(plan, self._store.url)
        floor = plan.floor.floor

        def make(header: Header) -> Floor:
            if header.state.floor >= floor:
                raise _FloorReached
            return Floor(**header.fields, floor=floor)

        runtime.failpoint("retention.planned")
        try:
            await self._ledger.append(make)
        except _FloorReached:
            return
        runtime.failpoint("retention.floor")

    async def delete(self, plan: Plan, *, go_on: Callable[[], Awaitable[None]] | None = None) -> Collected:
        """Delete what the plan names, but for what the store refuses to delete: that keeps no other object.

        Args:
            go_on: awaited before each batch; what it raises ends the sweep.

        Raises:
            UsageError: the plan's floor is not in the ledger (must L5: the record comes first).
            Corrupt: the ledger does not know of objects that it should know of.
        """
        check_explained(plan, self._store.url)
        if self._ledger.state.floor < plan.floor.floor:
            raise UsageError(f"nothing may be deleted below {plan.floor.floor} before the ledger says so")
        objects = size = refused = 0
        refusal: DeleteRefused | None = None
        for first in range(0, len(plan.items), BATCH):
            if go_on:
                await go_on()
            batch = list(plan.items[first : first + BATCH])
            self._tell("deleting", first, len(plan.items))
            try:
                await self._store.delete([item.key for item in batch])
            except DeleteRefused as error:
                refusal, refused = refusal or error, refused + len(error.keys)
                batch = [item for item in batch if item.key not in error.keys]
            runtime.failpoint("retention.deleted")
            objects, size = objects + len(batch), size + sum(item.size for item in batch)
        return Collected(plan.floor.floor, objects, size, refused, refusal)

    # Facts.

    async def _list(self, prefix: str) -> AsyncIterator[Entry]:
        self._tell(f"listing {prefix}", 0, 0)
        async for entry in self._store.list(prefix):
            yield entry

    async def _sealed(self, state: State, listing: Sequence[Entry]) -> dict[int, int]:
        """The attempt that became each listed version that may stay; newest first, as the ledger is read."""
        listed = {version for version, _ in listed_attempts(listing)}
        wanted = sorted(v for v in listed if max(state.floor, 1) <= v <= state.seal.version)
        sealed = {}
        for n, version in enumerate(reversed(wanted)):
            self._tell(f"reading the seal of version {version}", n, len(wanted))
            sealed[version] = (await self._ledger.history.seal(version)).attempt
        return sealed

    async def _unexplained(self, tip: Tip, sealed: Mapping[int, int], listing: Sequence[Entry]) -> set[tuple[int, int]]:
        """The listed attempts that are not sealed, and have no `open` in the ledger or are sealed by void records."""
        unsealed = (
            (version, attempt)
            for version, attempt in sorted(listed_attempts(listing))
            if max(tip.state.floor, 1) <= version and 0 < attempt <= tip.seq and sealed.get(version) != attempt
        )
        return {
            (version, attempt)
            for version, attempt in unsealed
            if await is_unexplained(self._store, tip, version=version, attempt=attempt)
        }

    async def _anchors(self) -> list[AnchorFact]:
        """The newest anchor of each version at or above the floor, newest first, with the prefixes of its objects."""
        facts = []
        for anchor in await self._ledger.history.anchors():
            refs = await self._files(anchor)
            folders = None if refs is None else frozenset(ref.key.rpartition("/")[0] + "/" for ref in refs)
            facts.append(AnchorFact(anchor.version, anchor.seq, folders))
        return facts

    async def _files(self, anchor: Anchor) -> list[ObjectRef] | None:
        """Everything an anchor is made of; None if its index cannot be read now."""
        try:
            index = await self._objects.read_anchor_index(anchor)
        except (Corrupt, ObjectPending, BelowFloor):
            return None
        return [anchor.index, *index.all]

    async def _floor(self, policy: RetentionPolicy, facts: Facts) -> FloorPlan:
        """The floor that the policy asks for; an anchor is checked only if the floor might rise to it."""
        state = facts.state
        if not policy.active:
            return FloorPlan(state.floor, state.floor)
        oldest = policy.oldest(state.seal.version, await self._oldest_recent(policy))
        looked = list[AnchorFact]()
        for fact in facts.anchors:
            if fact.version <= oldest:
                wrong = await self._wrong(fact) if fact.version > state.floor else ""
                looked.append(AnchorFact(fact.version, fact.seq, fact.folders, wrong))
                if not wrong:
                    break
        return plan_floor(oldest, state.floor, looked)

    async def _wrong(self, fact: AnchorFact) -> str:
        """What makes an anchor unusable; empty if it is valid and complete."""
        anchor = await self._ledger.history.anchor(fact.version)
        seal: Seal | None = await self._ledger.history.seal(fact.version) if fact.version else None
        if anchor.total != (seal.after if seal else self._ledger.stream.total):
            return "does not have the sum of its version"
        refs = await self._files(anchor)
        if refs is None:
            return "has no index that can be read"
        self._tell(f"checking the anchor of version {fact.version}", 0, 0)
        found = await run_limited((partial(self._exists, ref) for ref in refs), AT_ONCE)
        gone = [ref.key for ref, exists in zip(refs, found, strict=True) if not exists]
        return f"lacks {gone[0].rpartition('/')[2]}" if gone else ""

    async def _exists(self, ref: ObjectRef) -> bool:
        """Whether an object exists with at least its size, by a GET and never by a LIST.

        The limit is one byte below its size, so that the store refuses the object without sending it.
        """
        try:
            body = await self._store.get(ref.key, limit=max(ref.size - 1, 0))
        except Corrupt:
            return True
        except KeyNotFound:
            return False
        return len(body) == ref.size

    # Hours are measured by the clocks of the publishers and of this machine; safety never rests on them (must L8).

    async def _oldest_recent(self, policy: RetentionPolicy) -> int | None:
        """The oldest version that was sealed in the last `hours`, None if none was; found by bisection."""
        if policy.hours is None:
            return None
        since = runtime.now() - timedelta(hours=policy.hours)
        low, high = max(self._ledger.state.floor, 1), self._ledger.state.seal.version + 1
        while low < high:
            middle = (low + high) // 2
            if _sealed_at(await self._ledger.history.seal(middle)) >= since:
                high = middle
            else:
                low = middle + 1
        if low == 1 and _sealed_at(self._ledger.stream) >= since:
            return 0
        return low if low <= self._ledger.state.seal.version else None


async def collect(
    ledger: Ledger,
    policy: RetentionPolicy,
    *,
    name: str | None = None,
    take_over: bool = False,
    progress: Progress | None = None,
) -> tuple[Plan, Collected]:
    """Plan and carry out, outside of any publisher: claims the stream if the floor is to rise, and releases it.

    The claim has the name of the publisher that held the stream last, unless `name` is given: if this process dies
    before it releases, that publisher can still restart by itself (must P6).

    Raises:
        Fenced: a publisher holds the stream; only it may raise the floor.
        Corrupt: records are missing, as their successors or objects show: nothing is written or deleted.
        NotFound: there is no stream.
    """
    collector = Collector(ledger, progress=progress)
    await ledger.read()
    plan = await collector.plan(policy)
    check_explained(plan, ledger.store.url)
    if plan.rises:
        await ledger.claim(_claimant(ledger, name, take_over=take_over), take_over=take_over)
        try:
            runtime.failpoint("retention.claimed")
            plan = await collector.plan(policy)  # whoever held the stream went on until the claim
            if plan.rises:
                await collector.raise_floor(plan)
        finally:
            with contextlib.suppress(Fenced):
                await ledger.release()
    return plan, await collector.delete(plan)


def _claimant(ledger: Ledger, name: str | None, *, take_over: bool) -> str:
    holder = ledger.state.epoch
    if holder and not holder.released and not take_over and name is None:
        raise Fenced(
            f"publisher {holder.name} holds {ledger.store.url}, and only the holder raises the floor",
            hint="give that publisher --keep-versions or --keep-hours; if it is down for good, add --take-over here",
        )
    return name or (holder.name if holder else "gc")


def _sealed_at(record: Seal | Stream) -> datetime:
    """When its publisher's clock says it was sealed; if that cannot be parsed, now, so that it is kept."""
    return records.written_at(record) or runtime.now()
