"""Reads an object that only a LIST has named, and of which nobody has the digest (must L6)."""

from __future__ import annotations

from dcr_daemon.errors import Corrupt, KeyNotFound, StoreUnavailable
from dcr_daemon.store.poller import Poller
from dcr_daemon.store.port import Store
from dcr_daemon.task_limiter import run_limited

LOOKS = 6  #: at such an object, until two agree
_FIRST, _LAST = 0.02, 1.0  #: seconds between two looks for one that is not there


class ListedAbsent(StoreUnavailable):
    """An object that a LIST named is not there: the bucket lags, or something deleted it."""

    kind = StoreUnavailable.kind


async def read_listed(store: Store, key: str, *, limit: int, patience: float, last: bytes | None = None) -> bytes:
    """An object that a LIST named, before any digest vouches for it.

    Another node of the store may have answered the LIST, so one that is missing is waited for (must L6). The object
    is read until two reads return equal bytes, the first two of them side by side: no digest is known for it yet, and
    bytes damaged on the way could still parse, and would be sealed under a digest that no other reader computes. Such
    damage differs from read to read.

    Args:
        last: what an earlier read returned.

    Raises:
        StoreUnavailable: it did not appear in `patience` seconds.
        Corrupt: larger than `limit`, or other bytes at every look.
    """

    async def read() -> bytes | None:
        try:
            return await _wait_for(store, key, limit=limit, patience=patience)
        except Corrupt:  # too large, as it was read this time
            return None

    looks = await run_limited([read, read], 2) if last is None else [last, await read()]
    while looks[-1] is None or looks[-1] != looks[-2]:
        if len(looks) == LOOKS:
            raise Corrupt(
                f"{key} is larger than {limit} bytes, or has other ones at each of {LOOKS} reads",
                hint="the bucket or the way to it damages objects",
            )
        looks.append(await read())
    return looks[-1]


async def _wait_for(store: Store, key: str, *, limit: int, patience: float) -> bytes:
    poller = Poller(first=_FIRST, longest=_LAST)
    while True:
        try:
            return await store.get(key, limit=limit)
        except KeyNotFound:
            if poller.waited > patience:
                hint = "if the bucket is a replica, it lags; if something deletes objects, the next version shows it"
                raise ListedAbsent(f"{key} is listed, and not there after {patience:g} s", hint=hint) from None
        await poller.pause()
