"""Reads records further down the ledger together with the one that is asked for, so that a walk back costs few round
trips.

Where they lie is a guess: seals are mostly the same number of slots apart. So nothing but bytes is kept, and only until
the walk comes to their slot by what the records above it say. What was guessed wrong is a wasted request, no more.
"""

from __future__ import annotations

from functools import partial

from dcr_daemon.ledger.holes import read_occupied
from dcr_daemon.ledger.slot import read_slot
from dcr_daemon.store.port import Store
from dcr_daemon.task_limiter import run_limited

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
            found = await run_limited((partial(read_slot, self._store, one) for one in seqs), MOST)
            self._bodies = dict(zip(seqs, found, strict=True))
            self._count = min(2 * self._count, MOST)
        body = self._bodies.pop(seq)
        return await read_occupied(self._store, seq) if body is None else body
