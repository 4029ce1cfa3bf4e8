"""Finds records that are missing under a present one: holes in the ledger (must L2).

A cold reader whose search meets a hole takes it for the tail. So before it believes a tail it looks above it: by GETs
at doubling distances, which find every hole that is at most 512 slots wide and has as many records above it as it is
wide, and by a LIST for the others. Both are hints: a hole is what a GET finds free after another GET has found a record
above it. In this order of reads no writer can have filled both meanwhile, since a record becomes durable only after all
records below it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from dcr_daemon.errors import Corrupt
from dcr_daemon.ledger import names
from dcr_daemon.ledger.slot import LOOKS, pause_before, read_slot, read_slots
from dcr_daemon.store.port import Store

REACH = 10  #: doublings above a free slot: up to 512 slots
PAGE_DIGITS = 3  #: the last digits of a record's name: a LIST without them is one page of 1000 names
PAGE = 10**PAGE_DIGITS
NAMED = 100  #: holes that are named; whether there are more is not looked for
AT_ONCE = 16  #: slots that are read at a time, of those above a tail, or that a listing does not show: it may be old

_RECORD = re.compile(r"ledger/([0-9]{16})\.json")


class MissingRecords(Corrupt):
    """The slots `seqs` are free although records lie above them."""

    kind = "Corrupt"

    def __init__(self, message: str, *, seqs: Sequence[int], hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.seqs = seqs


async def find_above(
    store: Store, tail: int, *, by_list: bool = True, doublings: Iterable[int] = range(REACH)
) -> int | None:
    """A record above the free slot `tail + 1`; None if none is found. A slot that is still free afterwards is a hole.

    Args:
        doublings: of the distance at which to look.
        by_list: also list the names above it, of this thousand and the next: one or two requests more.
    """
    seqs = [tail + 1 + (1 << n) for n in doublings]
    bodies = await read_slots(store, seqs, at_once=AT_ONCE)
    for seq, body in zip(seqs, bodies, strict=True):
        if body is not None:
            return seq
    if by_list:
        page = (tail + 1) // PAGE
        for number in (page, page + 1):
            shown = [seq for seq in await _listed(store, names.record_page(number, PAGE_DIGITS)) if seq > tail + 1]
            if shown and await read_slot(store, shown[-1]) is not None:
                return shown[-1]
    return None


async def find_holes(store: Store, tail: int, *, pages: Collection[int] | None = None) -> list[int]:
    """The slots that are free under a record, ascending; of many the first `NAMED`. `tail` has been read occupied.

    Args:
        pages: look only below these thousands of names, one request each. None: list all names, a thousand at a time.
    """
    prefixes = [names.LEDGER] if pages is None else [names.record_page(number, PAGE_DIGITS) for number in pages]
    shown = {seq for prefix in prefixes for seq in await _listed(store, prefix)}
    top = max(shown, default=tail)
    if top <= tail or await read_slot(store, top) is None:
        top = tail
    slots = range(top) if pages is None else (n * PAGE + i for n in pages for i in range(PAGE) if n * PAGE + i < top)
    missing, free = sorted(set(slots) - shown), list[int]()
    for first in range(0, len(missing), AT_ONCE):
        seqs = missing[first : first + AT_ONCE]
        bodies = await read_slots(store, seqs, at_once=AT_ONCE)
        free += [seq for seq, body in zip(seqs, bodies, strict=True) if body is None]
        if len(free) >= NAMED:
            break
    if free:  # each answer may be wrong once
        await pause_before(1)
        bodies = await read_slots(store, free, at_once=AT_ONCE)
    return [seq for seq, body in zip(free, bodies, strict=True) if body is None][:NAMED] if free else []


class HoleSearch:
    """Looks for holes below the tail again and again, for one process.

    The first time in the whole ledger. Then in the thousands of records that may be new, and in one of the older ones
    in turn: however long the ledger is, a look costs what is new, and one request.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._proved: int | None = None  #: a tail below which there was no hole
        self._turn = 0

    async def find(self, tail: int) -> list[int]:
        """`find_holes` for this tail; the same holes again as long as they are there."""
        pages = None
        if self._proved is not None:
            new = self._proved // PAGE
            older = {self._turn % new} if new else set()
            pages = sorted({*older, *range(new, tail // PAGE + 1)})
        if holes := await find_holes(self._store, tail, pages=pages):
            return holes
        self._proved, self._turn = tail, self._turn + 1
        return []


async def read_first_again(store: Store) -> bytes | None:
    """Slot 0, which one answer says is free. None: there is no stream. Raises `Corrupt` if there are records above."""
    if await find_above(store, -1) is not None:
        return await read_occupied(store, 0)
    await pause_before(1)
    return await read_slot(store, 0)


async def read_occupied(store: Store, seq: int) -> bytes:
    """The bytes in slot `seq`, which is known to be occupied. Raises `Corrupt` if it is free whenever it is read."""
    for n in range(LOOKS):
        if n:
            await pause_before(n)
        body = await read_slot(store, seq)
        if body is not None:
            return body
    raise missing_records(store.url, [seq])


def missing_records(url: str, seqs: Sequence[int]) -> MissingRecords:
    """The error for holes at `seqs`."""
    one = len(seqs) == 1
    what = f"record {seqs[0]} is" if one else f"records {', '.join(map(str, seqs))} are"
    return MissingRecords(
        f"the ledger of {url} is damaged: {what} missing although later ones exist",
        seqs=seqs,
        hint="nothing may be written or deleted until it is restored: `dcr verify` says how",
    )


async def _listed(store: Store, prefix: str) -> list[int]:
    """The seqs of the records whose names begin with `prefix`, ascending."""
    found = [_RECORD.fullmatch(entry.key) async for entry in store.list(prefix)]
    return sorted(int(match[1]) for match in found if match)
