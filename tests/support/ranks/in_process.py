"""A process group in one process: rank 0's session and the members of the others, on one event loop, in real time.

Each rank holds boxes of small canonical tensors and publishes them as `Publisher` does, but for the weights: they are
arrays here, and what a rank holds is given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from dcr_daemon import runtime
from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.blocks import Block, BlockSet
from dcr_daemon.events import Emit
from dcr_daemon.ledger import names
from dcr_daemon.ledger.records import Open
from dcr_daemon.publish.group.coordinator import Coordinator
from dcr_daemon.publish.group.opening import open_coordinator
from dcr_daemon.publish.options import PublishOptions
from dcr_daemon.publish.rank import Rank
from dcr_daemon.publish.version.versions import SealedVersion
from dcr_daemon.store.port import Store

Weights = Mapping[str, Bits]


def dealt(layout: Layout, rank: int, world: int) -> list[Block]:
    """What a rank holds: rows of even tensors, columns of odd ones, small ones whole, one rank each. Uneven."""
    blocks = []
    for tensor, spec in enumerate(layout):
        if len(spec.shape) == 2 and spec.elements:
            rows, columns = spec.shape
            axis = tensor % 2
            size = -(-spec.shape[axis] // world)
            lo, hi = min(rank * size, spec.shape[axis]), min((rank + 1) * size, spec.shape[axis])
            if lo < hi:
                box = Box.flat(lo * columns, (hi - lo) * columns)
                blocks.append(Block(tensor, Box(lo, (rows, hi - lo), (columns, 1)) if axis else box))
        elif spec.elements and tensor % world == rank:
            blocks.append(Block(tensor, Box.flat(0, spec.elements)))
    return blocks


class RankOf:
    """One rank: `open` it, `publish`, `close`."""

    def __init__(self, options: PublishOptions, store: Store, emit: Emit, rank: Rank) -> None:
        self.options, self.store, self.emit, self.rank = options, store, emit, rank
        self.session: Coordinator
        self.deal = dealt
        self.calls = 0

    async def open(self) -> RankOf:
        self.session = await open_coordinator(self.options, self.store, emit=self.emit, rank=self.rank)
        return self

    async def start(self, weights: Weights, step: int | None = None) -> Any:
        """Everything before the seal: opened, agreed, diffed. The attempt."""
        session, self.calls = self.session, self.calls + 1
        record = await session.open(step=step, call=self.calls)
        if not session.context.holds:
            await self._agree(record)
            blocks = self.deal(session.layout, self.rank.number, self.rank.world)
            session.context.hold(BlockSet(session.layout, blocks))
        attempt = await session.start(record)
        share = session.context.baseline.blocks
        await attempt.diff_blocks((n, partial(self._read, weights, share[n])) for n in range(len(share)))
        await attempt.finish()
        return attempt

    async def _agree(self, record: Open) -> None:
        """In the round in which ranks declare nothing but that they are there: these have no map."""
        answer = await self.session.agree(
            record, names.ROUNDS + 1, declared=names.READY, judge=lambda declared: names.READY
        )
        assert answer == names.READY

    def _read(self, weights: Weights, block: Block) -> Bits:
        bits = weights[self.session.layout[block.tensor].name]
        return np.ascontiguousarray(block.box.view(bits)).reshape(-1)

    async def publish(self, weights: Weights, step: int | None = None) -> SealedVersion:
        """As `Publisher.publish` and `wait_sealed`: whatever fails is settled, then raised."""
        try:
            attempt = await self.start(weights, step)
            sealed = await self.session.seal(attempt)
        except Exception as error:
            await self.session.abort_unless_sealed(error)
            raise
        await self.session.anchor_if_due()
        return sealed

    async def close(self) -> None:
        await self.session.close()


class Group:
    """`world` ranks of one process group. `async with` opens them, and closes them unless the body raises.

    Args:
        make: options of a rank, by number.
        store: of a rank, by number.
    """

    def __init__(
        self, world: int, make: Callable[[int], PublishOptions], store: Callable[[int], Store], emit: Emit
    ) -> None:
        group = runtime.nonce()
        self.ranks = [RankOf(make(n), store(n), emit, Rank(group, n, world)) for n in range(world)]

    async def __aenter__(self) -> Group:
        return await self.open()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # ranks whose test failed may never agree to close
            await self.close()

    async def open(self) -> Group:
        await asyncio.gather(*(rank.open() for rank in self.ranks))
        return self

    async def publish(self, weights: Weights, step: int | None = None) -> SealedVersion:
        """All ranks; the same version to all."""
        sealed = await asyncio.gather(*(rank.publish(weights, step) for rank in self.ranks))
        assert len({(one.version, one.seq) for one in sealed}) == 1
        return sealed[0]

    async def all(self, work: Callable[[RankOf], Awaitable[Any]]) -> list[Any]:
        """The results of every rank, errors among them."""
        return await asyncio.gather(*(work(rank) for rank in self.ranks), return_exceptions=True)

    async def close(self) -> None:
        await asyncio.gather(*(rank.close() for rank in self.ranks))
