"""Retention at work: learn the facts, raise the floor, delete; each decision is `retention`'s (musts L5 to L8).

Anybody may plan and delete below the floor that stands. Only the newest epoch raises it, and the record is durable
before the first object goes. An interrupted collection leaves nothing half done: the next sweep finds what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from dcr_daemon import runtime
from dcr_daemon.errors import Corrupt, Fenced, KeyNotFound, UsageError
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
    listed_versions,
    plan_floor,
    plan_retention,
)
from dcr_daemon.store.port import Entry

BATCH = 500  #: objects per delete, and between two looks at whether to go on
AT_ONCE = 8  #: files of an anchor looked at at a time

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many of how many."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What went: objects and bytes, and the floor that it went by."""

    floor: int
    objects: int
    bytes: int


class _Enough(Exception):
    """The floor is as high as that already."""


class Collector:
    """Collects in the stream of `ledger`, which has been read.

    Args:
        progress: told what is being done, for people.
    """

    def __init__(self, ledger: Ledger, *, progress: Progress | None = None) -> None:
        self._ledger = ledger
        self._store = ledger.store
        # No patience: what is not there now is not built upon now. The next sweep looks again.
        self._objects = Objects(ledger.store, floor=lambda: ledger.state.floor, patience=0)
        self._tell: Progress = progress or (lambda what, done, total: None)

    async def plan(self, policy: RetentionPolicy) -> Plan:
        """What the policy, and the ledger up to its present tip, would have done. Writes nothing."""
        listing = [entry for prefix in PREFIXES async for entry in self._list(prefix)]
        tip = self._ledger.tip
        facts = Facts(tip.seq, tip.state, await self._sealed(tip.state, listing), await self._anchors())
        floor = await self._floor(policy, facts)
        return plan_retention(facts, floor, listing)

    async def raise_floor(self, plan: Plan) -> None:
        """Write the plan's floor, unless a record says as much already. The caller holds the claim.

        Raises:
            Fenced: a newer epoch owns the stream; it has the say now.
            Undecided: the record was sent and its fate is not known; nothing may be deleted by it yet.
        """
        floor = plan.floor.floor

        def make(header: Header) -> Floor:
            if header.state.floor >= floor:
                raise _Enough
            return Floor(**header.fields, floor=floor)

        runtime.failpoint("retention.planned")
        try:
            await self._ledger.append(make)
        except _Enough:
            return
        runtime.failpoint("retention.floor")

    async def delete(self, plan: Plan, *, go_on: Callable[[], Awaitable[None]] | None = None) -> Collected:
        """Delete what the plan names.

        Args:
            go_on: awaited before each batch; what it raises ends the sweep.

        Raises:
            UsageError: the plan's floor is not in the ledger (must L5: the record comes first).
        """
        if self._ledger.state.floor < plan.floor.floor:
            raise UsageError(f"nothing may be deleted below {plan.floor.floor} before the ledger says so")
        objects = size = 0
        for first in range(0, len(plan.items), BATCH):
            if go_on:
                await go_on()
            batch = plan.items[first : first + BATCH]
            self._tell("deleting", first, len(plan.items))
            await self._store.delete([item.key for item in batch])
            runtime.failpoint("retention.deleted")
            objects, size = objects + len(batch), size + sum(item.size for item in batch)
        return Collected(plan.floor.floor, objects, size)

    # Facts.

    async def _list(self, prefix: str) -> AsyncIterator[Entry]:
        self._tell(f"listing {prefix}", 0, 0)
        async for entry in self._store.list(prefix):
            yield entry

    async def _sealed(self, state: State, listing: Sequence[Entry]) -> dict[int, int]:
        """The attempt that became each listed version that may stay; newest first, as the ledger is walked."""
        wanted = sorted(v for v in listed_versions(listing) if max(state.floor, 1) <= v <= state.seal.version)
        sealed = {}
        for n, version in enumerate(reversed(wanted)):
            self._tell(f"reading the seal of version {version}", n, len(wanted))
            sealed[version] = (await self._ledger.history.seal(version)).attempt
        return sealed

    async def _anchors(self) -> list[AnchorFact]:
        """The newest anchor of each version at or above the floor, newest first, with the folders it lies in."""
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
        """Where the policy would have the floor; an anchor is looked at only if the floor might rise to it."""
        state = facts.state
        if not policy.active:
            return FloorPlan(state.floor, state.floor)
        oldest = policy.oldest(state.seal.version, await self._young(policy))
        looked = list[AnchorFact]()
        for fact in facts.anchors:
            if fact.version <= oldest:
                wrong = await self._wrong(fact) if fact.version > state.floor else ""
                looked.append(AnchorFact(fact.version, fact.seq, fact.folders, wrong))
                if not wrong:
                    break
        return plan_floor(oldest, state.floor, looked)

    async def _wrong(self, fact: AnchorFact) -> str:
        """What keeps an anchor from being built upon; empty if it is valid and all of it is there."""
        anchor = await self._ledger.history.anchor(fact.version)
        seal: Seal | None = await self._ledger.history.seal(fact.version) if fact.version else None
        if anchor.total != (seal.after if seal else self._ledger.stream.total):
            return "does not have the sum of its version"
        refs = await self._files(anchor)
        if refs is None:
            return "has no index that can be read"
        slots = asyncio.Semaphore(AT_ONCE)

        async def there(ref: ObjectRef) -> bool:
            async with slots:
                return await self._there(ref)

        self._tell(f"looking at the anchor of version {fact.version}", 0, 0)
        found = await asyncio.gather(*(there(ref) for ref in refs))
        gone = [ref.key for ref, is_there in zip(refs, found, strict=True) if not is_there]
        return f"lacks {gone[0].rpartition('/')[2]}" if gone else ""

    async def _there(self, ref: ObjectRef) -> bool:
        """Whether an object exists with at least its size, told by the store itself and never by a LIST.

        Asked for with a limit one byte short of its size, a store refuses it without sending it.
        """
        try:
            body = await self._store.get(ref.key, limit=max(ref.size - 1, 0))
        except Corrupt:
            return True
        except KeyNotFound:
            return False
        return len(body) == ref.size

    # Hours: an operator's wish, told by the clocks of the publishers and of this machine (must L8: never safety).

    async def _young(self, policy: RetentionPolicy) -> int | None:
        """The oldest version that was sealed in the last `hours`, None if none was; found by halving."""
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
    """Plan and carry out, from outside of any publisher: claims the stream if the floor is to rise, and releases it.

    Claimed is under the name of the publisher that held the stream last, unless `name` says otherwise: should this
    process die before it releases, that publisher still restarts by itself (must P6).

    Raises:
        Fenced: a publisher holds the stream; it is the one to raise the floor.
        NotFound: there is no stream.
    """
    collector = Collector(ledger, progress=progress)
    await ledger.read()
    plan = await collector.plan(policy)
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
    """What its publisher's clock said; now, so that it is kept, if that is no time."""
    try:
        at = datetime.fromisoformat(record.at)
    except ValueError:
        return runtime.now()
    return at if at.tzinfo else at.replace(tzinfo=UTC)
