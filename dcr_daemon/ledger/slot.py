"""One slot of the ledger: reads it, and puts a record there so that the outcome is known (musts L0, L1).

`occupy` is the only function in DCR that appends to a ledger. It returns the bytes that occupy the slot, ours or not,
or raises `Undecided`. It never guesses: a 404 after a lost answer decides nothing, since the PUT may still arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from dcr_daemon import runtime
from dcr_daemon.errors import Corrupt, KeyNotFound, StoreUnavailable
from dcr_daemon.events import Emit, Retrying
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.records import RECORD_LIMIT
from dcr_daemon.store.port import Outcome, Store
from dcr_daemon.task_limiter import run_limited

LOOKS = 4  #: reads of bytes that are no record, or not the record that was expected
TRIES = 8  #: puts of the same bytes before a caller is told that the outcome is still open
BACKOFF = 0.2  #: seconds before the second try; doubles, jittered
BACKOFF_LIMIT = 5.0  #: seconds


class Undecided(StoreUnavailable):
    """A record was sent and its outcome is not known. It is kept: the next call on the ledger resolves it first.

    Until then nothing may be undone, committed, diffed or reported as failed (must L1).
    """


async def read_slot(store: Store, seq: int) -> bytes | None:
    """The bytes in slot `seq`; None if it is free now.

    Bytes that do not prove themselves are read again, until they do, the same bytes come twice, or `LOOKS` reads are
    done; a record without a digest is one of an early writer, and is read again at once. Whether damaged bytes are void
    is not decided here (`fold_decided`).
    """
    body: bytes | None = None
    for n in range(LOOKS):
        if body is not None and not records.is_sound(body):
            await pause_before(n)
        before = body
        try:
            body = await store.get(names.record(seq), limit=RECORD_LIMIT)
        except KeyNotFound:
            return None
        except Corrupt:
            body = records.Oversized()
        if body == before or records.proves_itself(body):
            break
    return body


async def read_slots(store: Store, seqs: Sequence[int], *, at_once: int) -> list[bytes | None]:
    """`read_slot` of each of `seqs`, at most `at_once` at a time."""
    if len(seqs) == 1:
        return [await read_slot(store, seqs[0])]
    return await run_limited((partial(read_slot, store, seq) for seq in seqs), at_once)


async def occupy(store: Store, seq: int, body: bytes, *, emit: Emit, tries: int = TRIES) -> bytes:
    """Put `body` into slot `seq` if it is free, and return what occupies the slot: `body` or another's bytes.

    Raises:
        Undecided: after `tries` puts the slot could not be read occupied and no put was acknowledged.
        Incompatible: the store denies the write.
    """
    for n in range(tries):
        if n:
            await pause_before(n)
        if await store.create(names.record(seq), body) is Outcome.WON:
            return body
        try:
            occupant = await read_slot(store, seq)
        except StoreUnavailable:
            occupant = None
        if occupant is not None:
            return occupant
        emit(Retrying(what=f"record {seq}: the store neither acknowledges it nor returns it"))
    raise Undecided(
        f"record {seq} of {store.url} was sent {tries} times; the store says neither that it exists nor that it cannot",
        hint="it will be resolved before anything else is written; see that the bucket answers",
    )


async def pause_before(n: int) -> None:
    """Sleep before try number `n` (from 1): doubling, capped, with full jitter above half."""
    delay: float = min(BACKOFF * 2 ** (n - 1), BACKOFF_LIMIT)
    await runtime.sleep(delay * (0.5 + runtime.jitter() / 2))
