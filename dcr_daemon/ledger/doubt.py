"""A record that does not follow the tip: the reader doubts itself first (must L2).

It reads the ledger again from its first record, as a cold reader does, and believes nothing that it has read before.
Either that leads past the record, or the reader stays where it is, in doubt: it is not ready, appends nothing, and
looks again while it waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from dcr_daemon.errors import Corrupt
from dcr_daemon.ledger.fold import Step, Tip, begin, fold_decided
from dcr_daemon.ledger.tail import Tail
from dcr_daemon.store.port import Store

NEAR = 64  #: records up to which a reader folds each one, and does not go from its tip to the tail at once
REPAIR = (
    "restore the record from a backup of the bucket; if it never was a record of this stream, and no slot above it is "
    "occupied, an administrator may delete it (`dcr verify` names every damage)"
)


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why a reader does not go past slot `seq`. `head` is the newest version that the bucket shows to be sealed."""

    seq: int
    reason: str
    head: int

    def error(self, url: str) -> Corrupt:
        return Corrupt(
            f"record {self.seq} of {url} is damaged, or no record of this stream: {self.reason}", hint=REPAIR
        )


class Looks:
    """Says when the ledger is read again because of a record: at once, and then after 1, 2, 4, ... further polls."""

    def __init__(self) -> None:
        self._of: tuple[int, str] | None = None
        self._count = 0

    def due(self, step: Step) -> bool:
        of = (step.tip.seq, step.tip.digest)
        self._count = self._count + 1 if of == self._of else 0
        self._of = of
        return self._count & (self._count - 1) == 0


@dataclass(frozen=True, slots=True)
class Reading:
    """The ledger as a cold reader finds it: the newest tip that is decided, and the steps that lead to it."""

    tip: Tip
    steps: list[Step]
    tail: Tail
    last: int  #: the highest occupied slot

    async def steps_after(self, tip: Tip) -> list[Step] | None:
        """The steps from `tip` to this tip, none left out; None if they do not lead there, or are more than `NEAR`."""
        if not 0 <= self.tip.seq - tip.seq <= NEAR:
            return None
        bodies = [await self.tail.body(seq) for seq in range(tip.seq + 1, self.last + 1)]
        steps = fold_decided(tip, bodies)
        return steps if steps and steps[-1].tip == self.tip else None

    async def head(self) -> int:
        """The newest version that is sealed by what lies in the bucket, whether or not it is decided."""
        claimed = await self.tail.newest_claimed(self.tip.stream, above=self.tip.seq, tail=self.last)
        return max(self.tip.state.seal.version, claimed)


async def read_again(store: Store) -> Reading:
    """Read the tail of the ledger in `store`, starting from nothing."""
    tail = Tail(store)
    start, _ = begin(await tail.body(0))
    last = await tail.find(0)
    steps = await tail.steps(start, last)
    return Reading(steps[-1].tip if steps else start, steps, tail, last)
