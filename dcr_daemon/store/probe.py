"""Proves at start-up that a store honours create-if-absent, on which everything rests (must L6).

A store that accepts If-None-Match and ignores it would silently let two publishers write one slot. Such stores are
common, so each is tried. The probe writes a few small objects under `probe/<nonce>/` and deletes them again.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Protocol, runtime_checkable

from dcr_daemon import runtime
from dcr_daemon.errors import DcrError, Incompatible, KeyNotFound
from dcr_daemon.store.port import Outcome, Store
from dcr_daemon.store.put_if_absent import put_if_absent
from dcr_daemon.store.retry import RetryPolicy, Transient, retry
from dcr_daemon.task_limiter import run_limited

ROUNDS = 4
RACERS = 2
SWEPT = 3  #: probes in a row whose objects a collector may delete while they run
_HINT = "use a store that honours If-None-Match: * on PUT; docs/STORES.md lists which do"


@runtime_checkable
class Inspectable(Protocol):
    """A store that can read the rules of its bucket and name those that would damage a stream."""

    async def inspect(self) -> tuple[str, ...]:
        """One sentence per rule; empty if there is none, or if reading them is not allowed."""
        ...


async def probe(store: Store, *, again: bool = False) -> list[str]:
    """Prove create-if-absent on `store`; a publisher calls this before its first append.

    Args:
        again: an earlier process has proved it on this store. See only that a second create still loses: five requests.

    Returns:
        Warnings for an operator: rules that will delete or move objects, or objects that could not be deleted.

    Raises:
        Incompatible: the store does not honour create-if-absent, denies access or has no such bucket.
        StoreUnavailable: it did not answer, or never decisively.
    """
    for _ in range(SWEPT):
        place = f"probe/{runtime.nonce(8)}"
        twice, races = f"{place}/twice", [] if again else [f"{place}/race-{number}" for number in range(ROUNDS)]
        await put_if_absent(store, _witness(place), place.encode())
        try:
            await _second_create_loses(store, twice)
            await run_limited((partial(_one_racer_wins, store, key) for key in races), ROUNDS, settles=True)
        except Incompatible:
            # A collector may take this probe for one that was left over and delete it (must L5). Whatever it lists of
            # the probe, it lists the witness: the verdict counts only if that still exists.
            swept = not await _stands(store, _witness(place))
            await _clean(store, place, [twice, *races])
            if not swept:
                raise
        else:
            warnings = await _clean(store, place, [twice, *races])
            break
    else:
        raise Incompatible(f"{store.url} loses objects: {SWEPT} probes in a row were gone half way", hint=_HINT)
    if isinstance(store, Inspectable):
        warnings.extend(await store.inspect())
    return warnings


async def _second_create_loses(store: Store, key: str) -> None:
    first, second = (f"{name} {runtime.nonce(8)}".encode() for name in ("first", "second"))
    await put_if_absent(store, key, first)
    outcome = await _decisive_create(store, key, second)
    if outcome is Outcome.WON or await _read(store, key) != first:
        raise Incompatible(f"{store.url} ignores create-if-absent: a second create replaced the first", hint=_HINT)


async def _one_racer_wins(store: Store, key: str) -> None:
    bodies = [f"racer {number} {runtime.nonce(8)}".encode() for number in range(RACERS)]
    outcomes = await asyncio.gather(*(store.create(key, body) for body in bodies))
    winners = [body for body, outcome in zip(bodies, outcomes, strict=True) if outcome is Outcome.WON]
    if len(winners) > 1:
        raise Incompatible(f"{store.url}: {len(winners)} of {RACERS} racing creates were told they won", hint=_HINT)
    if not winners and Outcome.LOST not in outcomes:
        return  # no try is known to have got through; the sequential part has proved what it could
    found = await _read(store, key)
    if found not in (winners or bodies):
        raise Incompatible(f"{store.url}: after a race the object is not the winner's", hint=_HINT)


async def _decisive_create(store: Store, key: str, body: bytes) -> Outcome:
    """Create until the answer is WON or LOST. The object is known to exist, so UNKNOWN proves nothing."""

    async def attempt(_: float) -> Outcome:
        outcome = await store.create(key, body)
        if outcome is Outcome.UNKNOWN:
            raise Transient("a create of an existing object was neither refused nor acknowledged")
        return outcome

    return await retry(
        attempt,
        what=store.url,
        patience=RetryPolicy(),
        gate=contextlib.nullcontext(),
        hint="check the store's health; a healthy store that answers like this cannot hold a stream",
    )


def _witness(place: str) -> str:
    """The first object of a probe, in time and in listings."""
    return f"{place}/0-witness"


async def _stands(store: Store, key: str) -> bool:
    try:
        await store.get(key, limit=4096)
    except KeyNotFound:
        return False
    return True


async def _read(store: Store, key: str) -> bytes:
    try:
        return await store.get(key, limit=4096)
    except KeyNotFound:
        raise Incompatible(f"{store.url}: an object is gone after its create was acknowledged", hint=_HINT) from None


async def _clean(store: Store, place: str, others: list[str]) -> list[str]:
    """Delete what the probe wrote. Least-privilege policies may deny that; the objects are tiny and harmless."""
    try:
        await store.delete([_witness(place), *others])
    except DcrError as error:
        return [f"the probe's objects under {store.url}/{place} stay: {error.message}"]
    return []
