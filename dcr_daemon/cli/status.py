"""`dcr status`: the state of a stream and of its replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcr_daemon import runtime
from dcr_daemon.cli.options import EndpointUrl, Json, Profile, Region, StoreOptions, StreamArgument, run_async
from dcr_daemon.cli.output import clear_screen, clock, print_fields, print_json, print_table, size

if TYPE_CHECKING:
    from dcr_daemon.store.port import Store

Watch = Annotated[bool, typer.Option("--watch", help="Show it anew every --every seconds, until interrupted.")]
Every = Annotated[
    float, typer.Option("--every", metavar="SECONDS", min=0.5, help="With --watch: seconds between looks.")
]


def command(
    stream: StreamArgument,
    watch: Watch = False,
    every: Every = 10.0,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    json: Json = False,
) -> None:
    """Show the newest version, the publisher, the anchors, and every replica that reports.

    A replica's report is a hint: the replica overwrites it, and no decision depends on it. It is STALE when the replica
    should have written it again and has not: it was killed, or cannot reach the bucket.

    With --json: stream (url, id, layout), head (version, step, seq, at), epoch (seq, name, released), open, floor,
    anchors [{version, bytes, seq}], void [{seq, why}] (records after the newest seal that do not count), replicas [{id,
    age (seconds), lag, stale, …}], fleet (replicas, serving, current, stale, ended), doubt (seq, reason, head: a
    damaged record at which readers stop, and the newest version that the bucket shows). The exit code is 13 if a record
    is missing. With --watch, one such line for each look.
    """

    async def main() -> None:
        async with StoreOptions(stream, endpoint_url, region, profile).watched() as store:
            while True:
                status = await read_status(store)
                if json:
                    print_json(status)
                else:
                    clear_screen(watch)
                    _print(status)
                if not watch:
                    return
                await runtime.sleep(every)

    run_async(main())


def _print(status: dict[str, Any]) -> None:
    head, epoch, attempt, doubt = status["head"], status["epoch"], status["open"], status["doubt"]
    anchors = ", ".join(f"version {a['version']} ({size(a['bytes'])})" for a in status["anchors"])
    step = "" if head["step"] is None else f", step {head['step']}"
    print_fields(
        {
            "stream": f"{status['stream']['url']}  id {status['stream']['id']}",
            "head": f"version {head['version']}{step}, sealed {clock(head['at'])} UTC",
            "publisher": epoch and f"{epoch['name']}, epoch {epoch['seq']}{', released' if epoch['released'] else ''}",
            "open": attempt and f"version {attempt['version']}, attempt {attempt['seq']}",
            "floor": status["floor"],
            "anchors": anchors or "none",
            "fleet": _describe(status["fleet"]),
        }
        | {f"void record {void['seq']}": void["why"] for void in status["void"]}
        | ({"damaged": f"record {doubt['seq']}, where readers stop: {doubt['reason']}"} if doubt else {})
    )
    if status["replicas"]:
        columns = ("replica", "version ", "lag ", "state", "seen", "scrubbed", "scrub", "detail")
        print_table(columns, map(_cells, status["replicas"]))


async def read_status(store: Store) -> dict[str, Any]:
    """The answer of `dcr status --json`. Raises what reading a ledger raises."""
    import msgspec

    from dcr_daemon.ledger.audit.replay import read_steps
    from dcr_daemon.ledger.ledger import Ledger
    from dcr_daemon.subscribe.status import read_replicas

    ledger = Ledger(store)
    state = await ledger.read_whole()
    version = state.seal.version
    head: Any = await ledger.history.seal(version) if version else ledger.stream
    replicas = await read_replicas(store, head=ledger.head)
    return {
        "stream": {"url": store.url, "id": ledger.stream.stream, "layout": ledger.stream.layout.sha256},
        "head": {"version": version, "step": getattr(head, "step", None), "seq": state.seal.seq, "at": head.at},
        "epoch": msgspec.to_builtins(state.epoch) if state.epoch else None,
        "open": msgspec.to_builtins(state.open) if state.open else None,
        "floor": state.floor,
        "anchors": [{"version": a.version, "bytes": a.bytes, "seq": a.seq} for a in await ledger.history.anchors()],
        "void": [
            {"seq": step.tip.seq, "why": step.void}
            async for step in read_steps(store, ledger.stream.stream, start=state.seal.seq, last=ledger.tip.seq)
            if step.record is None
        ],
        "replicas": replicas,
        "fleet": count_fleet(replicas),
        "doubt": asdict(ledger.doubt) if ledger.doubt else None,
    }


def count_fleet(replicas: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many there are: `serving` and `current` (at the newest version) count only those that are not stale."""
    from dcr_daemon.subscribe.status import ENDED

    counted = Counter({"replicas": len(replicas), "serving": 0, "current": 0, "stale": 0, "ended": 0})
    for replica in replicas:
        if replica["stale"]:
            counted["stale"] += 1
        elif replica.get("state") in ENDED:
            counted["ended"] += 1
        elif replica.get("serving") is True:
            counted["serving"] += 1
            counted["current"] += replica["lag"] == 0
    return dict(counted)


def _describe(fleet: dict[str, int]) -> str:
    """One line: 3 replicas: 2 serving (1 at the newest version), 1 STALE."""
    parts = [f"{fleet['serving']} serving ({fleet['current']} at the newest version)"]
    parts += [f"{fleet['stale']} STALE"] if fleet["stale"] else []
    parts += [f"{fleet['ended']} ended"] if fleet["ended"] else []
    other = fleet["replicas"] - fleet["serving"] - fleet["stale"] - fleet["ended"]
    parts += [f"{other} not serving"] if other else []
    return f"{fleet['replicas']} replicas: {', '.join(parts)}" if fleet["replicas"] else "no replica has reported"


def _cells(replica: dict[str, Any]) -> list[Any]:
    """The cells of one replica's row: replica, version, lag, state, seen, scrubbed, scrub, detail."""
    state = f"STALE ({replica.get('state')})" if replica["stale"] else replica.get("state")
    scrubbed = clock(str(replica["scrubbed_at"])) if replica.get("scrubbed_at") else None
    told = [replica.get(key) for key in ("scrub", "detail")]
    return [replica["id"], replica.get("version"), replica["lag"], state, _ago(replica["age"]), scrubbed, *told]


def _ago(seconds: float | None) -> str:
    """An age for people: 47 s ago, 12 min ago, 3.5 h ago, 9 d ago."""
    if seconds is None:
        return "?"
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min ago"
    return f"{seconds / 3600:.1f} h ago" if seconds < 172800 else f"{seconds / 86400:.0f} d ago"
