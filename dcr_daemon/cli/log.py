"""`dcr log`: the versions of a stream, newest last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcr_daemon.cli.options import EndpointUrl, Json, Profile, Region, StoreOptions, StreamArgument, run_async
from dcr_daemon.cli.output import clock, print_json, print_table, share, size

if TYPE_CHECKING:
    from dcr_daemon.ledger.fold import Step
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
    """List the versions of a stream: changed elements, payload and source; aborted and open attempts, void records too.

    With --json one object per line and version: version, step, state (sealed, open, aborted or void), seq, attempt,
    epoch, changed (elements), elements, bytes, dense_bytes, source, at, reason. A void record has no version.

    The exit code is 13 if a record is missing.
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
    """One row per attempt of the newest `limit` versions (None: all) and per void record, oldest first."""
    from dcr_daemon.ledger.audit.replay import read_steps

    state = await ledger.read_whole()
    first = 0 if limit is None else max(0, state.seal.version - limit + 1)
    rows = [] if first else [_stream_row(ledger.stream)]
    start = (await ledger.history.seal(first)).previous if first else 0
    opened: dict[int, AnyRecord] = {}
    async for step in read_steps(ledger.store, ledger.stream.stream, start=start, last=ledger.tip.seq):
        rows += _rows_of(step.record, opened) if step.record else [_void_row(step)]
    return rows + [_row(record, "open") for record in opened.values()]


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


def _void_row(step: Step) -> Row:
    """A record that does not count."""
    keys = ("version", "step", "attempt", "epoch", "source", "at")
    counts = dict.fromkeys(("changed", "elements", "bytes", "dense_bytes"), 0)
    seq = step.tip.seq
    return dict.fromkeys(keys) | counts | {"state": "void", "seq": seq, "reason": f"record {seq}: {step.void}"}


def _stream_row(record: Stream) -> Row:
    """Version 0, whose seal the stream record is."""
    keys = ("step", "attempt", "reason")
    counts = ("version", "seq", "epoch", "changed", "elements", "bytes", "dense_bytes")
    source = {"path": record.model} if record.model else None
    return dict.fromkeys(keys) | dict.fromkeys(counts, 0) | {"state": "sealed", "source": source, "at": record.at}
