"""Finds the end of a ledger without reading all of it (must L2, L5).

Records are never deleted, so the occupied slots are one run from 0: doubling strides find a free slot and bisection
finds the last occupied one, in about 2·log2(n) requests. Where a record is missing nevertheless, that one may be below
the hole: `holes` looks above it. The state there is taken from the records
themselves, at the newest slot where two neighbours agree on it; one record alone proves nothing.
"""

from __future__ import annotations

from dcr_daemon.ledger.fold import Step, Tip, fold, tip_before
from dcr_daemon.ledger.holes import missing_records
from dcr_daemon.ledger.slot import judge_slot, read_slot
from dcr_daemon.store.port import Store


class Tail:
    """Reads slots of one ledger and keeps what it read until it is dropped."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._bodies: dict[int, bytes] = {}

    async def occupied(self, seq: int) -> bool:
        if seq not in self._bodies:
            body = await read_slot(self._store, seq)
            if body is None:
                return False
            self._bodies[seq] = body
        return True

    async def body(self, seq: int) -> bytes:
        """Raises `Corrupt` if the slot is free: it is below an occupied one."""
        if not await self.occupied(seq):
            raise missing_records(self._store.url, [seq])
        return self._bodies[seq]

    async def find(self, low: int) -> int:
        """The highest occupied slot, `low` being occupied."""
        stride = 1
        while await self.occupied(low + stride):
            low, stride = low + stride, stride * 2
        high = low + stride
        while high - low > 1:
            middle = (low + high) // 2
            if await self.occupied(middle):
                low = middle
            else:
                high = middle
        return low

    async def steps(self, start: Tip, tail: int) -> list[Step]:
        """Fold up to `tail` from the newest slot at or above `start` whose state two records agree on.

        One of the two must count, by the state that it claims. So void records at the tail do not mislead, whatever
        they claim: the search continues below them, in the end to `start` itself, which is known.
        """
        tip = start
        for seq in range(tail - 1, start.seq, -1):
            claimed = tip_before(start.stream, seq, body=await self.body(seq))
            if claimed is None:
                continue
            step = fold(claimed, await self.body(seq))
            if step.record and tip_before(start.stream, seq + 1, body=await self.body(seq + 1)) == step.tip:
                tip = claimed
                break
        steps = list[Step]()
        for seq in range(tip.seq + 1, tail + 1):
            step, _ = await judge_slot(self._store, tip, body=await self.body(seq))
            steps.append(step)
            tip = step.tip
        return steps
