"""Finds the seal of an old version in a few requests, however long the history is (must L5).

Every record carries the folded state before it, so any slot says which version was the newest there. The search
alternates interpolation and bisection, so an uneven history costs 2·log2(n) requests at worst. What a slot says on the
way is only a hint, since a void record may claim anything: the seal that is found must count by the state that it
claims, and its neighbour must agree with the state after it. A cold reader asks the same proof of the tail.
"""

from __future__ import annotations

from typing import NamedTuple

from dcr_daemon.ledger.fold import fold, tip_before
from dcr_daemon.ledger.holes import read_occupied
from dcr_daemon.ledger.records import Seal, SealRef
from dcr_daemon.store.port import Store


class SealPosition(NamedTuple):
    """The version and the slot of a seal."""

    version: int
    seq: int


async def find_seal(
    store: Store, stream: str, *, version: int, below: SealPosition, above: SealPosition
) -> Seal | None:
    """The seal of `version`, which is between two known ones; None if void records mislead the search.

    Then the caller goes back seal by seal, which is slow and certain. Raises `Corrupt` if a slot between is free.
    """
    low, high, halve = below, above, False
    while high.seq - low.seq > 1:
        guess = (low.seq + high.seq) // 2 if halve else _interpolate(version, low, high)
        halve = not halve
        newest = await _newest_before(store, stream, guess)
        if newest is None or not low.version <= newest.version <= high.version:
            return None
        if newest.version == version:
            return await _proved(store, stream, version=version, seq=newest.seq)
        if newest.version > version:
            high = SealPosition(newest.version, newest.seq)
        else:
            low = SealPosition(newest.version, guess)
    return await _proved(store, stream, version=version, seq=low.seq) if low.version == version - 1 else None


def _interpolate(version: int, low: SealPosition, high: SealPosition) -> int:
    """A slot strictly between the two; aimed a little above the seal, where records name it as the newest."""
    share = (version - low.version + 0.5) / (high.version - low.version)
    guess = low.seq + round(share * (high.seq - low.seq))
    return max(low.seq + 1, min(guess, high.seq - 1))


async def _newest_before(store: Store, stream: str, seq: int) -> SealRef | None:
    """The seal that was the newest before slot `seq`, as that slot says; None if it says nothing of this stream."""
    before = tip_before(stream, seq, body=await read_occupied(store, seq))
    return before.state.seal if before else None


async def _proved(store: Store, stream: str, *, version: int, seq: int) -> Seal | None:
    """The record in slot `seq` if it is the seal of `version` and counts, by what its neighbour says."""
    body = await read_occupied(store, seq)
    before = tip_before(stream, seq, body=body)
    step = fold(before, body) if before else None
    if step is None or not isinstance(step.record, Seal) or step.record.version != version:
        return None
    after = tip_before(stream, seq + 1, body=await read_occupied(store, seq + 1))
    return step.record if after == step.tip else None
