"""Creates an immutable data object and returns when it is known to be durable.

For objects whose bytes are decided before the first try: chunks, parts, vectors, layouts, anchors. Ledger records have
a stricter rule (must L1, `ledger.slot`), because *another* record may be in their slot.
"""

from __future__ import annotations

import contextlib

from dcr_daemon.errors import Corrupt, KeyNotFound
from dcr_daemon.store.keys import check_key
from dcr_daemon.store.port import Outcome, Store
from dcr_daemon.store.retry import RetryPolicy, Transient, retry

#: An upload cannot be continued, and a large one may move for longer than the patience before it breaks off.
FEWEST_TRIES = 3


async def put_if_absent(
    store: Store, key: str, body: bytes | memoryview, *, patience: RetryPolicy | None = None
) -> None:
    """Return when `key` durably holds exactly `body`.

    `LOST` and `UNKNOWN` are resolved by reading the slot: equal bytes are ours, whoever wrote them. A 404 decides
    nothing (must L1), so the same bytes are put again.

    Raises:
        Corrupt: the slot holds other bytes; names are never reused (must L0), so somebody else made this one.
        StoreUnavailable: undecided when the patience was used up; the object may or may not exist.
    """
    check_key(key)
    body = body.cast("B") if isinstance(body, memoryview) else body

    async def attempt(_: float) -> None:
        outcome = await store.create(key, body)
        if outcome is not Outcome.WON and not await _holds(store, key, body):
            raise Transient("the create is still undecided")

    await retry(
        attempt,
        what=f"{store.url}/{key}",
        patience=patience or RetryPolicy(),
        gate=contextlib.nullcontext(),
        fewest=FEWEST_TRIES,
        hint="the object may or may not exist; trying again with the same bytes is safe",
    )


async def _holds(store: Store, key: str, body: bytes | memoryview) -> bool:
    """True: `key` holds `body`. False: nothing is there now. Raises `Corrupt` for anything else."""
    try:
        found = await store.get(key, limit=len(body))
    except KeyNotFound:
        return False
    except Corrupt:
        found = None
    if found is not None and found == body:
        return True
    raise Corrupt(
        f"{store.url}/{key} already holds other bytes than ours",
        hint="two writers used one name: check that no other process publishes under the same identity",
    )
