"""Finds records that are missing under a present one: holes in the ledger (must L2).

A cold reader whose search meets a hole takes it for the tail. So before it believes a tail it looks above it: by GETs
at doubling distances, which find every hole that is at most 512 slots wide and has as many records above it as it is
wide, and by a LIST for the others. Both are hints: a hole is what a GET finds free after another GET has found a record
above it. In this order of reads no writer can have filled both meanwhile, since a record becomes durable only after all
records below it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from dcr_daemon.errors import Corrupt
from dcr_daemon.ledger import names
from dcr_daemon.ledger.slot import read_slot
from dcr_daemon.store.port import Store

REACH = 10  #: doublings above a free slot: up to 512 slots
PAGE_DIGITS = 3  #: the last digits of a record's name: a LIST without them is one page of 1000 names
CONFIRMED = 100  #: slots that a listing does not show and that are read: it may be older than the records

_RECORD = re.compile(r"ledger/([0-9]{16})\.json")


async def find_above(
    store: Store, tail: int, *, by_list: bool = True, doublings: Iterable[int] = range(REACH)
) -> int | None:
    """A record above the free slot `tail + 1`; None if none is found. A slot that is still free afterwards is a hole.

    Args:
        doublings: of the distance at which to look.
        by_list: also list the names above it, of this thousand and the next: one or two requests more.
    """
    for n in doublings:
        seq = tail + 1 + (1 << n)
        if await read_slot(store, seq) is not None:
            return seq
    if by_list:
        page = (tail + 1) // 10**PAGE_DIGITS
        for number in (page, page + 1):
            shown = [seq for seq in await _listed(store, names.record_page(number, PAGE_DIGITS)) if seq > tail + 1]
            if shown and await read_slot(store, shown[-1]) is not None:
                return shown[-1]
    return None


async def find_holes(store: Store, tail: int) -> list[int]:
    """The slots that are free under a record, ascending; of many the first `CONFIRMED`. `tail` has been read occupied.

    Lists all names: one request per thousand records.
    """
    shown = await _listed(store, names.LEDGER)
    top = tail
    if shown and shown[-1] > tail and await read_slot(store, shown[-1]) is not None:
        top = shown[-1]
    missing = sorted(set(range(top)) - set(shown))
    return [seq for seq in missing[:CONFIRMED] if await read_slot(store, seq) is None]


def missing_records(url: str, seqs: Sequence[int]) -> Corrupt:
    """The error for holes at `seqs`."""
    one = len(seqs) == 1
    what = f"record {seqs[0]} is" if one else f"records {', '.join(map(str, seqs))} are"
    return Corrupt(
        f"the ledger of {url} is damaged: {what} missing although later ones exist",
        hint="nothing may be written or deleted until it is restored: `dcr verify` says how",
    )


async def _listed(store: Store, prefix: str) -> list[int]:
    """The seqs of the records whose names begin with `prefix`, ascending."""
    found = [_RECORD.fullmatch(entry.key) async for entry in store.list(prefix)]
    return sorted(int(match[1]) for match in found if match)
