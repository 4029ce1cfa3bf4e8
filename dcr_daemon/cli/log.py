"""`dcr log`: the versions of a stream, newest last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcr_daemon.cli.options import EndpointUrl, Json, Profile, Region, StoreOptions, StreamArgument, run_async
from dcr_daemon.cli.output import clock, print_json, print_table, share, size

if TYPE_CHECKING:
    from dcr_daemon.ledger.ledger import Ledger
    from dcr_daemon.ledger.records import AnyRecord, Stream

Row = dict[str, Any]


def command(
    stream: StreamArgument,
    limit: Annotated[int, typer.Option("-n", "--limit", metavar="N", min=1, help="Newest versions to show.")] = 20,
    everything: Annotated[bool, typer.Option("--all", help="Show every version since the first.")] = False,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    json: Json = False,
) -> None:
    """List the versions of a stream: changed elements, payload and source; aborted and open attempts too.

    With --json one object per line and version: version, step, state (sealed, open or aborted), seq, attempt, epoch,
    changed (elements), elements, bytes, dense_bytes, source, at, reason.
    """

    async def main() -> tuple[list[Row], int]:
        from dcr_daemon.ledger.ledger import Ledger

        async with StoreOptions(stream, endpoint_url, region, profile).watched() as store:
            ledger = Ledger(store)
            rows = await read_rows(ledger, None if everything else limit)
            return rows, ledger.state.floor

    rows, floor = run_async(main())
    if json:
        for row in rows:
            print_json(row)
        return
    columns = ("version ", "step ", "state", "changed ", "payload ", "of dense ", "at", "source")
    print_table(columns, [_cells(row, floor) for row in rows])


def _cells(row: Row, floor: int) -> tuple[Any, ...]:
    built = row["state"] == "sealed" and row["version"] > 0
    gone = row["state"] == "sealed" and row["version"] < floor
    return (
        row["version"],
        row["step"],
        "below the floor" if gone else row["state"],
        share(row["changed"], row["elements"]) if built else "",
        size(row["bytes"]) if built else "",
        share(row["bytes"], row["dense_bytes"]) if built else "",
        clock(row["at"]),
        row["reason"] or (row["source"] or {}).get("path"),
    )


async def read_rows(ledger: Ledger, limit: int | None) -> list[Row]:
    """One row per attempt of the newest `limit` versions (None: all), oldest first."""
    from dcr_daemon.ledger.records import Stream

    state = await ledger.read_whole()
    first = 0 if limit is None else max(0, state.seal.version - limit + 1)
    rows = [] if first else [_stream_row(ledger.stream)]
    start = (await ledger.history.seal(first)).previous if first else 0
    opened: dict[int, AnyRecord] = {}
    async for record in valid_records(ledger, start):
        if not isinstance(record, Stream):
            rows += _rows_of(record, opened)
    return rows + [_row(record, "open") for record in opened.values()]


async def valid_records(ledger: Ledger, start: int) -> Any:
    """The valid records in the slots after `start`, in order. `start` itself must hold a valid record."""
    from dcr_daemon.ledger.fold import begin, fold, tip_before
    from dcr_daemon.ledger.holes import missing_records
    from dcr_daemon.ledger.slot import read_slot

    async def body(seq: int) -> bytes:
        found = await read_slot(ledger.store, seq)
        if found is None:
            raise missing_records(ledger.store.url, [seq])
        return found

    first = await body(start)
    before = tip_before(ledger.tip.stream, start, body=first) if start else None
    tip = fold(before, first).tip if before else begin(await body(0))[0]
    while tip.seq < ledger.tip.seq:
        step = fold(tip, await body(tip.seq + 1))
        tip = step.tip
        if step.record is not None:
            yield step.record


def _rows_of(record: AnyRecord, opened: dict[int, AnyRecord]) -> list[Row]:
    """Rows that a record completes. `opened` holds the attempts whose end was not read yet."""
    from dcr_daemon.ledger.records import Abort, Epoch, Open, Release, Seal

    match record:
        case Open():
            opened[record.seq] = record
        case Seal():
            opened.pop(record.attempt, None)
            return [_row(record, "sealed")]
        case Abort():
            begun = opened.pop(record.attempt, None)
            return [_row(record, "aborted") | {"step": getattr(begun, "step", None)}]
        case Epoch() | Release():
            ended, reason = (
                list(opened.values()),
                f"its publisher ended with {type(record).__name__.lower()} {record.seq}",
            )
            opened.clear()
            return [_row(attempt, "aborted") | {"reason": reason} for attempt in ended]
    return []


def _row(record: Any, state: str) -> Row:
    return {
        "version": record.version,
        "step": getattr(record, "step", None),
        "state": state,
        "seq": record.seq,
        "attempt": getattr(record, "attempt", record.seq),
        "epoch": record.epoch,
        "changed": getattr(record, "changed", 0),
        "elements": getattr(record, "elements", 0),
        "bytes": getattr(record, "bytes", 0),
        "dense_bytes": getattr(record, "dense_bytes", 0),
        "source": getattr(record, "source", None),
        "at": record.at,
        "reason": getattr(record, "reason", None),
    }


def _stream_row(record: Stream) -> Row:
    """Version 0, whose seal the stream record is."""
    keys = ("step", "attempt", "reason")
    counts = ("version", "seq", "epoch", "changed", "elements", "bytes", "dense_bytes")
    source = {"path": record.model} if record.model else None
    return dict.fromkeys(keys) | dict.fromkeys(counts, 0) | {"state": "sealed", "source": source, "at": record.at}
