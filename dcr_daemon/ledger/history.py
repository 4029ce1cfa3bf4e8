"""Reads the seals and anchors of the past, and plans routes over them.

Every record names the seal and the anchor before it, so a cold reader reads exactly the history that it needs. An old
seal is found by `search`, so that asking for one old version costs the same in a long history as in a short one.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Collection
from typing import TypeVar

from dcr_daemon.errors import Corrupt, NotFound
from dcr_daemon.ledger import records
from dcr_daemon.ledger.fold import Tip
from dcr_daemon.ledger.holes import read_occupied
from dcr_daemon.ledger.objects import BelowFloor
from dcr_daemon.ledger.read_ahead import MOST, ReadAhead
from dcr_daemon.ledger.records import Anchor, AnyRecord, Seal
from dcr_daemon.ledger.route import Route, plan_route
from dcr_daemon.ledger.search import SealPosition, find_seal
from dcr_daemon.store.port import Store

T = TypeVar("T")

KEPT = 4096  #: seals and anchors held in memory; older ones are read again when asked for
NEAR = 12  #: distance in versions up to which seals are read one by one; above it `search` finds one


class History:
    """Seals and anchors that count as of a tip. Records are immutable, so what was read once stays true."""

    def __init__(self, store: Store, tip: Callable[[], Tip]) -> None:
        self._store = store
        self._tip = tip
        self._seals: dict[int, Seal] = {}
        self._anchors: dict[int, Anchor] = {}

    @property
    def seals(self) -> dict[int, Seal]:
        """Seals read so far, by version."""
        return self._seals

    def note(self, record: AnyRecord) -> None:
        """Keep a record that counts."""
        if isinstance(record, Seal):
            _keep(self._seals, record.version, record)
        elif isinstance(record, Anchor):
            _keep(self._anchors, record.seq, record)

    def forget(self) -> None:
        """Forget what was read: it may have been misread."""
        self._seals.clear()
        self._anchors.clear()

    async def record(self, seq: int) -> AnyRecord:
        """The record in slot `seq`, which is known to count. Raises `Corrupt` if it is gone or another."""
        return self._decoded(seq, await read_occupied(self._store, seq))

    def _decoded(self, seq: int, body: bytes) -> AnyRecord:
        try:
            record = records.decode_record(body)
        except ValueError as error:
            raise Corrupt(f"record {seq} of {self._store.url} counted and does not parse: {error}") from error
        if record.stream != self._tip().stream or record.seq != seq:
            raise Corrupt(f"record {seq} of {self._store.url} counted and belongs elsewhere")
        self.note(record)
        return record

    async def between(self, first: int, last: int | None = None) -> list[Seal]:
        """The seals of versions `first` to `last` (the newest if None), ascending; version 0 has none.

        Raises:
            NotFound: `last` is not sealed.
        """
        last = self._tip().state.seal.version if last is None else last
        found: list[Seal] = []
        if last < first:
            return found
        async for seal in self.seals_back(last, first):
            found.append(seal)
            if seal.version <= first:
                break
        return found[::-1]

    async def seal(self, version: int) -> Seal:
        """The seal of one version above 0. Raises `NotFound` if it is not sealed."""
        if version < 1:
            raise NotFound(f"version {version} has no seal: version 0 is the stream record itself")
        if version > self._tip().state.seal.version:
            raise self._unsealed(version)
        if version in self._seals:
            return self._seals[version]
        above = self._nearest_above(version)
        if above.version - version > NEAR:
            below = self._nearest_below(version)
            found = await find_seal(self._store, self._tip().stream, version=version, below=below, above=above)
            if found is not None:
                self.note(found)
                return found
        while True:
            seal = self._seals.get(above.version) or self._seal(above, await self.record(above.seq))
            if seal.version == version:
                return seal
            above = SealPosition(seal.version - 1, seal.previous)

    async def anchors(self) -> list[Anchor]:
        """The anchors at or above the floor, newest first; of several for one version, the newest."""
        return [anchor async for anchor in self.anchors_back()]

    async def anchor(self, version: int) -> Anchor:
        """The newest anchor of one version.

        Raises:
            BelowFloor: the version is below the floor; there is another anchor at or above the floor (must L5).
            NotFound: it has none.
        """
        async for anchor in self.anchors_back():
            if anchor.version == version:
                return anchor
            if anchor.version < version:
                break
        if version < self._tip().state.floor:
            raise BelowFloor(f"the anchor of version {version} of {self._store.url} is below the floor")
        raise NotFound(f"version {version} of {self._store.url} has no anchor")

    async def route(
        self,
        have: int | None,
        target: int,
        *,
        avoid_anchors: Collection[int] = (),
        avoid_deltas: Collection[int] = (),
        anchor_limit: int | None = None,
    ) -> Route:
        """The cheapest route from `have` (None: from nothing) to `target`, reading no more history than decides it.

        Args:
            avoid_anchors: versions whose anchor is not used.
            avoid_deltas: versions whose delta (the one that leads to the version) is not used.
            anchor_limit: only so many of the newest anchors that may be used are considered, and no older record of
                an anchor is read. None: all.

        Raises:
            NotFound: `target` is not sealed.
            NoRoute: nothing leads there, with the reason.
            Corrupt: a record that has to be read is damaged.
        """
        floor = self._tip().state.floor
        if target > self._tip().state.seal.version:
            raise self._unsealed(target)
        usable = (a async for a in self.anchors_back() if a.version <= target and a.version not in avoid_anchors)

        async def next_anchor() -> Anchor | None:
            return None if len(sizes) == anchor_limit else await anext(usable, None)

        hops: dict[int, int] = {}
        sizes: dict[int, int] = {}  # of the anchors that the way back has met
        anchor = await next_anchor()
        version, cost, best = target, 0, math.inf
        seals = self.seals_back(target, 1 + (have if have is not None else anchor.version if anchor else target))
        while True:
            if anchor is not None and anchor.version == version:
                sizes[version], best = anchor.bytes, min(best, cost + anchor.bytes)
                anchor = await next_anchor()
            # Every other route passes the deltas read so far: once they cost more than a whole route, none is cheaper.
            end = have if have is not None else anchor.version if anchor else version
            if version <= end or version < max(floor, 1) or cost > best or version in avoid_deltas:
                break
            hops[version] = (await anext(seals)).bytes
            cost, version = cost + hops[version], version - 1
        return plan_route(have, target, hops=hops, anchors=sizes, floor=floor)

    async def anchors_back(self) -> AsyncIterator[Anchor]:
        """The same as `anchors`; records are read when they are asked for, ever more of them at a time."""
        state, last = self._tip().state, None
        at, ahead, distance = state.anchor, ReadAhead(self._store), 0
        while at is not None and at.version >= state.floor:
            anchor: AnyRecord | None = self._anchors.get(at.seq)
            if anchor is None:
                body = await ahead.body(at.seq, distance=distance, most=MOST if distance else 1)
                anchor = self._decoded(at.seq, body)
            if not isinstance(anchor, Anchor) or anchor.version != at.version or anchor.state is None:
                raise Corrupt(f"record {at.seq} of {self._store.url} is not the anchor of version {at.version}")
            if anchor.version != last:
                yield anchor
            at, last = anchor.state.anchor, anchor.version
            distance = anchor.seq - at.seq if at else 0

    async def seals_back(self, version: int, first: int = 1) -> AsyncIterator[Seal]:
        """The seals from `version` down to that of version 1, read as they are asked for. Those down to that of
        `first` will be: they are read ahead."""
        if version < 1:
            return
        seal, ahead = await self.seal(version), ReadAhead(self._store)
        yield seal
        while seal.version > 1:
            position, distance = SealPosition(seal.version - 1, seal.previous), seal.seq - seal.previous
            known = self._seals.get(position.version)
            if known is None:
                body = await ahead.body(position.seq, distance=distance, most=position.version - first + 1)
                known = self._seal(position, self._decoded(position.seq, body))
            seal = known
            yield seal

    def _nearest_above(self, version: int) -> SealPosition:
        """The lowest seal at or above `version` whose slot is known without a request.

        Every record that counts says where the newest seal before it lies.
        """
        newest = self._tip().state.seal
        known = [SealPosition(newest.version, newest.seq)]
        known += [SealPosition(above - 1, seal.previous) for above, seal in self._seals.items() if above > version]
        known += [SealPosition(a.state.seal.version, a.state.seal.seq) for a in self._anchors.values() if a.state]
        return min(position for position in known if position.version >= version)

    def _nearest_below(self, version: int) -> SealPosition:
        """The highest seal below `version` whose slot is known; version 0 is sealed in slot 0."""
        known = [SealPosition(below, seal.seq) for below, seal in self._seals.items() if below < version]
        known += [SealPosition(a.state.seal.version, a.state.seal.seq) for a in self._anchors.values() if a.state]
        return max((position for position in known if position.version < version), default=SealPosition(0, 0))

    def _unsealed(self, version: int) -> NotFound:
        newest = self._tip().state.seal.version
        return NotFound(f"version {version} of {self._store.url} is not sealed; the newest is {newest}")

    def _seal(self, position: SealPosition, record: AnyRecord) -> Seal:
        if not isinstance(record, Seal) or record.version != position.version:
            raise Corrupt(f"record {position.seq} of {self._store.url} is not the seal of version {position.version}")
        return record


def _keep(kept: dict[int, T], key: int, value: T) -> None:
    kept[key] = value
    if len(kept) > KEPT:
        kept.pop(min(kept))
