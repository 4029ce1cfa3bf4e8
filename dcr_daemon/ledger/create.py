"""Creates a stream: once, on an empty prefix, and only on demand (must T1)."""

from __future__ import annotations

from dcr_daemon import runtime
from dcr_daemon.canonical.fingerprint import Vector, total
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.errors import UsageError
from dcr_daemon.events import Emit
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.records import ObjectRef, Stream
from dcr_daemon.ledger.slot import occupy
from dcr_daemon.store.port import Store
from dcr_daemon.store.put_if_absent import put_if_absent


async def create_stream(store: Store, layout: Layout, *, vector: Vector, model: str, emit: Emit) -> None:
    """Put the layout, the vector of version 0 and record 0, in this order (must L4). Another process may win slot 0.

    If the prefix holds only the first two objects, an earlier creation died before its record, and this one continues:
    their bytes follow from layout and base, and no stream has ever been seen there.

    Raises:
        UsageError: the prefix holds anything else.
        Corrupt: it holds the vector of another base.
    """
    sums = vector.astype("<u8").tobytes()
    layout_key, vector_key = names.layout(layout.digest), names.vector(0, 0)
    async for entry in store.list(""):
        if entry.key not in (layout_key, vector_key) and not entry.key.startswith(names.PROBES):
            raise UsageError(
                f"{store.url} is not empty: it holds {entry.key} and no ledger",
                hint="a stream is made on an empty prefix; choose another one",
            )
    await put_if_absent(store, layout_key, layout.encoded)
    runtime.failpoint("ledger.layout.created")
    await put_if_absent(store, vector_key, sums)
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
    await occupy(store, 0, records.encode(record), emit=emit)
    runtime.failpoint("ledger.stream.answered")
