"""Reads records in order, several at once, with their verdicts: for people and for `verify`, not for daemons."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import takewhile

from dcr_daemon.errors import NotFound
from dcr_daemon.ledger.fold import Step, begin, fold, tip_before
from dcr_daemon.ledger.holes import find_above, read_first_again, read_occupied
from dcr_daemon.ledger.slot import read_slot
from dcr_daemon.ledger.tail import Tail
from dcr_daemon.store.port import Store

AHEAD = 16  #: slots read at once


async def replay(store: Store, *, ahead: int = AHEAD) -> AsyncIterator[Step]:
    """Fold the whole ledger; the first step is the `stream` record. Ends at the tail; beyond damage as `Tail.walk`.

    Raises:
        NotFound: there is no stream.
        Corrupt: record 0 is not one, or a record is missing under a present one (after everything below it).
        Incompatible: a record is of a newer format.
    """
    body = await read_slot(store, 0)
    if body is None and (body := await read_first_again(store)) is None:
        raise NotFound(f"there is no stream at {store.url}", hint="a publisher makes one with --create")
    tip, stream = begin(body)
    yield Step(tip, stream)
    while True:
        first = tip.seq + 1
        bodies = await asyncio.gather(*(read_slot(store, seq) for seq in range(first, first + ahead)))
        there = [body for body in takewhile(lambda body: body is not None, bodies) if body is not None]
        damaged = False
        for body in there:
            step = fold(tip, body)
            if damaged := step.foreign:
                break
            tip = step.tip
            yield step
        if damaged:
            tail = Tail(store)
            async for step in tail.walk(tip, await tail.find(tip.seq + 1)):
                tip = step.tip
                yield step
            continue
        if len(there) < ahead and await read_slot(store, tip.seq + 1) is None:
            # A writer may have filled both slots between our two reads of them; in this order of reads it cannot have.
            if await find_above(store, tip.seq) is None:
                return
            await read_occupied(store, tip.seq + 1)


async def read_steps(store: Store, stream: str, *, start: int, last: int, ahead: int = AHEAD) -> AsyncIterator[Step]:
    """Fold the slots after `start`, which holds a record that counts, up to `last`; beyond damage as `Tail.walk`.

    Raises:
        Corrupt: a record is missing.
    """
    before = await read_occupied(store, start)
    claimed = tip_before(stream, start, body=before) if start else None
    tip = fold(claimed, before).tip if claimed else begin(await read_occupied(store, 0))[0]
    while tip.seq < last:
        seqs = range(tip.seq + 1, min(tip.seq + ahead, last) + 1)
        for body in await asyncio.gather(*(read_occupied(store, seq) for seq in seqs)):
            step = fold(tip, body)
            if step.foreign:
                async for step in Tail(store).walk(tip, last):
                    yield step
                return
            tip = step.tip
            yield step
