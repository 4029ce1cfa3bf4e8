"""Creates a stream: once, on an empty prefix, and only on demand (must T1)."""

from __future__ import annotations

from dcr_daemon import runtime
from dcr_daemon.canonical.fingerprint import Vector, total
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.errors import Corrupt, UsageError
from dcr_daemon.events import Emit
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.records import ObjectRef, Stream
from dcr_daemon.ledger.slot import occupy, read_slot
from dcr_daemon.store.poller import Poller
from dcr_daemon.store.port import Store
from dcr_daemon.store.put_if_absent import put_if_absent

CREATION = 10.0  #: seconds that the record of another creation may be away: it puts two small objects before


async def create_stream(store: Store, layout: Layout, *, vector: Vector, model: str, emit: Emit) -> None:
    """Put the layout, the vector of version 0 and record 0, in this order (must L4). Another process may win slot 0.

    If the prefix holds only the first two objects, an earlier creation died before its record, and this one continues:
    their bytes follow from layout and base, and no stream has ever been seen there. Objects of another layout or base
    may be those of a creation under way: then this one waits a little for its record.

    Raises:
        UsageError: the prefix holds anything else, and no ledger.
        Corrupt: it holds the vector of another base, and no ledger.
    """
    sums = vector.astype("<u8").tobytes()
    layout_key, vector_key = names.layout(layout.digest), names.vector(0, 0)
    async for entry in store.list(""):
        if entry.key in (layout_key, vector_key) or entry.key.startswith(names.PROBES):
            continue
        if await _is_created(store, patience=CREATION if entry.key.startswith(names.LAYOUTS) else 0.0):
            return
        raise UsageError(
            f"{store.url} is not empty: it holds {entry.key} and no ledger",
            hint="a stream is made on an empty prefix; choose another one",
        )
    await put_if_absent(store, layout_key, layout.encoded)
    runtime.failpoint("ledger.layout.created")
    try:
        await put_if_absent(store, vector_key, sums)
    except Corrupt:
        if await _is_created(store, patience=CREATION):
            return
        raise
    runtime.failpoint("ledger.stream.put")
    record = Stream(
        stream=runtime.nonce(),
        seq=0,
        prev=records.NO_RECORD,
        state=None,
        nonce=runtime.nonce(),
        at=runtime.now().isoformat(timespec="milliseconds"),
        layout=ObjectRef(layout_key, len(layout.encoded), layout.digest),
        fingerprint=ObjectRef(vector_key, len(sums), records.digest(sums)),
        total=records.show_u64(total(vector)),
        model=model,
    )
    await occupy(store, 0, records.encode_record(record), emit=emit)
    runtime.failpoint("ledger.stream.answered")


async def _is_created(store: Store, *, patience: float) -> bool:
    """Whether slot 0 is occupied within `patience` seconds: what was found lies there since another process made it."""
    poller = Poller(first=0.1, longest=1.0)
    while await read_slot(store, 0) is None:
        if poller.waited >= patience:
            return False
        await poller.pause()
    return True
