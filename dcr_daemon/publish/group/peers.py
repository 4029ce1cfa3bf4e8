"""`Peers`: the other ranks of the group of rank 0, as `Leader` works with them. `Alone` in a group of one, else
`OtherRanks`; `peers_of` chooses once, and the leader asks nowhere else how many there are.

    agree       all ranks' declarations ─► one verdict, for all to read
    join        all ranks' parts        ─► one `Joined`, whose sums make the base
    anchor      all ranks' shares       ─► one anchor

Ranks meet in the bucket alone: each puts an object, and rank 0 waits for all of them (`collect`).
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Protocol

from dcr_daemon import runtime
from dcr_daemon.canonical.fingerprint import Vector
from dcr_daemon.errors import Corrupt, StoreUnavailable, UpdateAborted
from dcr_daemon.events import Degraded, Emit
from dcr_daemon.ledger import names
from dcr_daemon.ledger.listed import read_listed
from dcr_daemon.ledger.records import Open, Seal
from dcr_daemon.publish.group.anchors import join_anchor, write_anchor, write_share
from dcr_daemon.publish.group.collect import ObjectCollector
from dcr_daemon.publish.group.context import RankContext
from dcr_daemon.publish.group.coordinator import Judge
from dcr_daemon.publish.group.join import CONCURRENCY, Joined, join, solo
from dcr_daemon.publish.group.since_anchor import SinceAnchor
from dcr_daemon.publish.version.attempt import Contribution, put
from dcr_daemon.task_limiter import run_limited
from dcr_daemon.wording import shorten


class SumsMismatch(Corrupt):
    """The ranks together do not hold the base: every rank is to build its baseline anew (must P3)."""

    kind = "Corrupt"


class Peers(Protocol):
    """What rank 0 asks of the other ranks.

    Attributes:
        exist: whether there are any; if True, a failed call must be recorded, because other ranks wait for it.
    """

    exist: bool

    def opened(self) -> None:
        """Rank 0 has opened the next attempt: nobody is late any more."""
        ...

    def start_lag_timer(self) -> None:
        """See `Coordinator.start_lag_timer`."""
        ...

    async def agree(self, record: Open, round_: int, *, declared: bytes, judge: Judge) -> bytes:
        """See `Coordinator.agree`."""
        ...

    async def join(self, record: Open, own: Contribution) -> Joined:
        """All ranks' contributions to an attempt, which add up to its base, tensor by tensor (must P3).

        Raises:
            SumsMismatch: they do not.
            UpdateAborted: a rank gave up, or was given up.
            Corrupt, StoreUnavailable: a part cannot be read.
        """
        ...

    async def anchor_is_due(self, joined: Joined) -> bool:
        """Whether the seal of these contributions has to say that all ranks write an anchor of the version."""
        ...

    def sealed(self, seal: Seal, joined: Joined) -> None:
        """A version was sealed from these contributions."""
        ...

    async def write_anchor(self, *, at_once: bool) -> bool:
        """Write an anchor of the newest version if one is due; whether it was. Of many ranks that was decided by the
        seal, so that all of them write their shares of one version."""
        ...


def peers_of(context: RankContext, since_anchor: SinceAnchor, *, emit: Emit) -> Peers:
    """For the group that `context.rank` leads."""
    if context.rank.alone:
        return Alone(context, since_anchor)
    return OtherRanks(context, since_anchor, emit=emit)


class Alone:
    """Nobody: a group of one."""

    exist = False

    def __init__(self, context: RankContext, since_anchor: SinceAnchor) -> None:
        self._context, self._since_anchor = context, since_anchor
        self._anchor_failed_at: int | None = None  #: the tip at which an anchor's names were taken by damaged bytes

    def opened(self) -> None:
        pass

    def start_lag_timer(self) -> None:
        pass

    async def agree(self, record: Open, round_: int, *, declared: bytes, judge: Judge) -> bytes:
        return await self._context.workers.run_uncancellable(judge, [declared])

    async def join(self, record: Open, own: Contribution) -> Joined:
        return solo(own)

    async def anchor_is_due(self, joined: Joined) -> bool:
        return False

    def sealed(self, seal: Seal, joined: Joined) -> None:
        pass

    async def write_anchor(self, *, at_once: bool) -> bool:
        context, ledger = self._context, self._context.ledger
        if not (at_once or context.owes_anchor) and not await self._since_anchor.due():
            return False
        if ledger.tip.seq == self._anchor_failed_at:
            return False  # after the next version an anchor has other names (must L0)
        await context.prove()
        if context.baseline.unverified_base:
            return False  # the version that comes next is anchored instead
        runtime.failpoint("publish.anchor.proved")
        baseline, version = context.baseline, ledger.state.seal.version
        side_files = await context.side_files()
        try:
            await write_anchor(
                context.resources, baseline, version=version, vector=baseline.vector, side_files=side_files
            )
        except Corrupt as error:
            self._anchor_failed_at = ledger.tip.seq
            context.damaged(f"while its anchor was written: {error.message}")
            return False
        return True


class OtherRanks:
    """Ranks 1 and up of the group of `context.rank`."""

    exist = True

    def __init__(self, context: RankContext, since_anchor: SinceAnchor, *, emit: Emit) -> None:
        self._context, self._since_anchor, self._emit = context, since_anchor, emit
        self._lag_began: float | None = None
        self._vector: tuple[int, Vector] | None = None  #: the newest version, and its fingerprint
        self._seal_to_anchor: Seal | None = None

    def opened(self) -> None:
        self._lag_began = None

    def start_lag_timer(self) -> None:
        self._lag_began = self._lag_began or runtime.monotonic()

    def _collector(self, prefix: str) -> ObjectCollector:
        context = self._context
        return ObjectCollector(
            context.ledger.store, context.rank, prefix, lag=context.options.lag, lag_began=lambda: self._lag_began,
            check=self._check_held, emit=self._emit,
        )  # fmt: skip

    async def _check_held(self) -> None:
        """Other ranks stop answering when the stream is another publisher's: nothing is waited for then (must P6)."""
        ledger = self._context.ledger
        with contextlib.suppress(StoreUnavailable):
            await ledger.read()
        ledger.check_held()

    async def agree(self, record: Open, round_: int, *, declared: bytes, judge: Judge) -> bytes:
        runtime.failpoint("publish.declared")
        context, options = self._context, self._context.options
        keys = await self._collector(names.attempt(record.version, record.seq)).all(
            names.declared(round_), what=f"version {record.version}: the declaration"
        )
        store, limit = context.ledger.store, options.declaration_limit
        reads = (
            partial(read_listed, store, key, limit=limit, patience=options.patience) for _, key in sorted(keys.items())
        )
        others = await run_limited(reads, CONCURRENCY)
        verdict = await context.workers.run_uncancellable(judge, [declared, *others])
        await put(store, names.verdict(record.version, record.seq, round_), verdict, options.patience)
        runtime.failpoint("publish.verdict.put")
        return verdict

    async def join(self, record: Open, own: Contribution) -> Joined:
        context = self._context
        keys = await self._collector(names.attempt(record.version, record.seq)).all(
            ".part.json", what=f"version {record.version}: the part"
        )
        joined = await join(
            own, keys, record, objects=context.objects, layout=context.layout, patience=context.options.patience
        )
        runtime.failpoint("publish.joined")
        if not self._vector or self._vector[0] != record.base:
            self._vector = record.base, await context.restorer.vector(record.base)
        missed = joined.missed(self._vector[1], context.layout)
        if missed and not (joined.unverified_base or context.baseline.unverified_base):
            raise SumsMismatch(
                f"what the ranks hold does not add up to version {record.base} in {len(missed)} tensors: "
                f"{shorten(missed)}",
                hint="every rank builds its baseline anew; if it stays so, elements have no rank or several",
            )
        return joined

    async def anchor_is_due(self, joined: Joined) -> bool:
        return joined.anchor or self._context.owes_anchor or await self._since_anchor.due(joined)

    def sealed(self, seal: Seal, joined: Joined) -> None:
        self._vector = seal.version, joined.after
        self._seal_to_anchor = seal if seal.anchor else None

    async def write_anchor(self, *, at_once: bool) -> bool:
        seal, self._seal_to_anchor = self._seal_to_anchor, None
        context = self._context
        if seal is None or seal.version != context.ledger.state.seal.version:
            return False
        await context.prove()
        try:
            own = await write_share(context, seal)
        except Corrupt as error:
            context.damaged(f"while its share of an anchor was written: {error.message}")
            return False
        try:
            keys = await self._collector(names.anchor(seal.version, seal.seq)).all(
                ".share.json", what=f"the anchor of version {seal.version}: the share"
            )
            await join_anchor(context, seal, own=own, keys=keys, side_files=await context.side_files())
        except (UpdateAborted, Corrupt) as error:  # no fault of this version, nor of the next: that brings another one
            context.owes_anchor = True
            self._emit(
                Degraded(what=f"version {seal.version} has no anchor; a later version tries again: {error.message}")
            )
            return False
        return True
