"""Reads records together with the one that is asked for, so that a walk through the ledger costs few round trips.

*Back*, where they lie is a guess: seals, and anchors, are mostly the same number of slots apart. So nothing but bytes
is kept, and only until the walk comes to their slot by what the records above it say. *Forward*, whether they are there
is a guess: a slot that is free, or does not prove itself, is read again in its turn. What was guessed wrong is a wasted
request, no more.
"""

from __future__ import annotations

from dcr_daemon.ledger import records
from dcr_daemon.ledger.holes import read_occupied
from dcr_daemon.ledger.slot import read_slots
from dcr_daemon.store.port import Store

MOST = 16  #: slots read at a time


class ReadAhead:
    """The slots of one walk. The first time it reads one, then twice as many each time, up to `MOST`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._bodies: dict[int, bytes | None] = {}
        self._count = 1

    async def body(self, seq: int, *, distance: int, most: int) -> bytes:
        """The bytes in slot `seq`, which is known to be occupied.

        Args:
            distance: slots between it and the one that is probably asked for next, below it.
            most: how many will be asked for, with this one; at least one is read.

        Raises:
            Corrupt: the slot is free.
        """
        if seq not in self._bodies:
            count = max(1, min(self._count, most))
            seqs = range(seq, 0, -max(1, distance))[:count]
            found = await read_slots(self._store, seqs, at_once=MOST)
            self._bodies = dict(zip(seqs, found, strict=True))
            self._count = min(2 * self._count, MOST)
        body = self._bodies.pop(seq)
        return await read_occupied(self._store, seq) if body is None else body


class ReadOn:
    """The slots of one walk towards the tail. It reads one, and one more; then twice as many each time, up to `MOST`.

    So nothing is wasted where at most one record is new, which is the rule.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._bodies: dict[int, bytes | None] = {}
        self._count = 0

    async def slot(self, seq: int) -> bytes | None:
        """The same as `read_slot`; the slots are asked for one after the other."""
        if seq not in self._bodies:
            await self._read(range(seq, seq + max(1, self._count)))
        return self._bodies.pop(seq)

    async def _read(self, seqs: range) -> None:
        found = await read_slots(self._store, seqs, at_once=MOST)
        proved = [body is not None and records.proves_itself(body) for body in found]
        last = max((n for n, body in enumerate(found) if body is not None), default=0)
        # A slot that is free below one that is not was read too early.
        self._bodies = {seqs[n]: body for n, body in enumerate(found) if n == 0 or proved[n] or n > last}
        self._count = min(2 * self._count or 1, MOST) if all(proved) else 0
