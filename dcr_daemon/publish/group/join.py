"""Rank 0 adds up what the ranks contributed to one attempt (musts P2, P3).

`peers.OtherRanks.join` first waits for every rank's part (`collect`), then reads and adds up the parts here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from dcr_daemon.canonical.fingerprint import Vector
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.errors import Corrupt, KeyNotFound, StoreUnavailable
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.listed import read_listed
from dcr_daemon.ledger.objects import Objects
from dcr_daemon.ledger.records import PART_LIMIT, ObjectRef, Open, Part
from dcr_daemon.publish.version.attempt import Contribution
from dcr_daemon.store.port import Store
from dcr_daemon.task_limiter import TaskLimiter, run_limited

CONCURRENCY = 16  #: parts read at a time


@dataclass(slots=True)
class Joined:
    """All ranks' contributions: vectors added up, sizes in bytes, `changed` in elements.

    `anchor`: a rank asks for one. `unverified_base`: a rank diffed from bytes that are not the base's (must P4).
    """

    parts: list[ObjectRef]
    before: Vector
    after: Vector
    changed: int
    bytes: int
    anchor: bool = False
    unverified_base: bool = False

    def add(self, part: Part, before: Vector, after: Vector) -> None:
        """Count one more rank in. Its vectors are not kept: those of 1,024 ranks would be hundreds of megabytes."""
        np.add(self.before, before, out=self.before)
        np.add(self.after, after, out=self.after)
        self.changed, self.bytes = self.changed + part.changed, self.bytes + part.bytes
        self.anchor = self.anchor or part.anchor
        self.unverified_base = self.unverified_base or part.stray

    def missed(self, base: Vector, layout: Layout) -> list[str]:
        """Tensors of which the ranks together did not hold exactly the base: an element missing, twice, or wrong."""
        return [layout[int(i)].name for i in np.flatnonzero(self.before != base)]


async def join(
    own: Contribution, keys: Mapping[int, str], opened: Open, *, objects: Objects, layout: Layout, patience: float
) -> Joined:
    """Read the part and the sums of every other rank, and add everything up.

    Args:
        own: rank 0's.
        keys: of the other ranks' parts, by rank, as `ObjectCollector` found them.
        opened: the attempt.
        patience: seconds that one which is listed may be missing.

    Raises:
        Corrupt: a part is not of this attempt, or not one.
        StoreUnavailable, ObjectPending: an object cannot be read now.
    """
    given, store, limit = {0: own.part.ref}, objects.store, 16 * len(layout)
    joined = Joined([], own.before.copy(), own.after.copy(), own.changed, own.bytes)

    async def take(number: int, key: str) -> None:
        async with TaskLimiter(None) as reads:
            reading = await reads.start(partial(read_listed, store, key, limit=PART_LIMIT, patience=patience))
            guess = await reads.start(partial(_early_sums, store, key, limit=limit))
        body, sums = reading.result(), guess.result()
        part = _checked(key, body, opened, number)
        if sums is None or records.digest(sums) != part.sums.sha256:
            sums = await objects.read(part.sums, opened.version, limit=limit)
        if len(sums) != limit:
            raise Corrupt(f"{part.sums.key} does not hold two vectors of {len(layout)} tensors")
        before, after = np.frombuffer(sums, dtype="<u8").reshape(2, len(layout))
        given[number] = ObjectRef(key, len(body), records.digest(body))
        joined.add(part, before, after)

    await run_limited((partial(take, number, key) for number, key in keys.items()), CONCURRENCY)
    joined.parts = [ref for _, ref in sorted(given.items())]
    return joined


async def _early_sums(store: Store, part: str, *, limit: int) -> bytes | None:
    """What lies under the name of the sums that a part of that name refers to, read beside the part: a guess, to be
    compared with the part's digest. None if it cannot be read now."""
    with contextlib.suppress(KeyNotFound, StoreUnavailable, Corrupt):
        return await store.get(names.sums_of(part), limit=limit)
    return None


def _checked(key: str, body: bytes, opened: Open, number: int) -> Part:
    """Everything that places a part is compared: one of another call, attempt or process group is none of ours."""
    try:
        part = records.decode_part(body)
    except ValueError as error:
        raise Corrupt(f"{key} is not a part: {error}") from error
    found = (part.stream, part.group, part.call, part.attempt, part.base, part.version, part.rank)
    want = (opened.stream, opened.group, opened.call, opened.seq, opened.base, opened.version, number)
    if found != want:
        raise Corrupt(f"{key} is a part of another attempt: {found}, not {want}")
    return part


def solo(own: Contribution) -> Joined:
    """A group of one."""
    return Joined([own.part.ref], own.before, own.after, own.changed, own.bytes)
