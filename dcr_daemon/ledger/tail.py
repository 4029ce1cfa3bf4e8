"""Finds the end of a ledger without reading all of it (must L2, L5).

Records are never deleted, so the occupied slots are one run from 0: doubling strides find a free slot and bisection
finds the last occupied one, in about 2·log2(n) requests. Where a record is missing nevertheless, that one may be below
the hole: `holes` looks above it. The state there is taken from the records themselves, at the newest slot where two
neighbours agree on it; one record alone proves nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

from dcr_daemon.ledger.fold import Step, Tip, fold, fold_decided, tip_before
from dcr_daemon.ledger.holes import read_occupied
from dcr_daemon.ledger.slot import read_slot
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
            self._bodies[seq] = await read_occupied(self._store, seq)
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
        """Fold up to `tail` from the newest slot above `start` at which two records agree, else from `start`.

        Ends before what no record has decided yet (`fold_decided`).
        """
        tip = await self._agreed(start, tail) or start
        return fold_decided(tip, [await self.body(seq) for seq in range(tip.seq + 1, tail + 1)])

    async def _agreed(self, start: Tip, tail: int) -> Tip | None:
        """The tip before the newest slot above `start` whose state two records agree on.

        One of the two must count, by the state that it claims. So void records at the tail do not mislead, whatever
        they claim: the search continues below them.
        """
        for seq in range(tail - 1, start.seq, -1):
            claimed = tip_before(start.stream, seq, body=await self.body(seq))
            if claimed is None:
                continue
            step = fold(claimed, await self.body(seq))
            if step.record and tip_before(start.stream, seq + 1, body=await self.body(seq + 1)) == step.tip:
                return claimed
        return None

    async def walk(self, start: Tip, tail: int) -> AsyncIterator[Step]:
        """A step for each slot after `start` up to `tail`, for reports: it shows what is readable beyond damage.

        It ends at the tip of `steps`. A record that counts although it does not follow the one before it is `foreign`,
        and `void` says what is wrong there; `decided` is False for the slots that `steps` ends before.
        """
        tip = start
        decided: dict[int, Step] | None = None  # from the first slot on that does not follow
        for seq in range(start.seq + 1, tail + 1):
            step = fold(tip, await self.body(seq))
            if step.foreign:
                if decided is None:
                    decided = {step.tip.seq: step for step in await self.steps(tip, tail)}
                step = await self._beyond_damage(step, decided)
            yield step
            tip = step.tip

    async def _beyond_damage(self, step: Step, decided: Mapping[int, Step]) -> Step:
        """The step of a slot that does not follow; by its own word, if the record after it agrees."""
        seq, stream = step.tip.seq, step.tip.stream
        if seq > max(decided, default=seq - 1):
            return replace(step, decided=False)
        own = decided.get(seq)
        claimed = None if own else tip_before(stream, seq, body=await self.body(seq))
        if claimed:
            own = fold(claimed, await self.body(seq))
            if tip_before(stream, seq + 1, body=await self.body(seq + 1)) != own.tip:
                own = None
        return replace(own, foreign=True, void=step.void) if own and own.record else step

    async def newest_claimed(self, stream: str, *, above: int, tail: int) -> int:
        """The newest version that a record above slot `above` says is sealed; 0 if none says anything."""
        for seq in range(tail, above, -1):
            claimed = tip_before(stream, seq, body=await self.body(seq))
            if claimed is not None:
                return fold(claimed, await self.body(seq)).tip.state.seal.version
        return 0
