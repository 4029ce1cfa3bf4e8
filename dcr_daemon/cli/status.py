"""`dcr status`: the state of a stream and of its replicas."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from dcr_daemon.cli.options import EndpointUrl, Json, Profile, Region, StoreOptions, StreamArgument, run_async
from dcr_daemon.cli.output import clock, print_fields, print_json, print_table, size
from dcr_daemon.errors import Corrupt, KeyNotFound

if TYPE_CHECKING:
    from dcr_daemon.store.port import Store

_REPLICA_LIMIT = 1 << 16  #: bytes of a status object
_AT_ONCE = 32  #: status objects read at a time


def command(
    stream: StreamArgument,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    json: Json = False,
) -> None:
    """Show the newest version, the publisher, the anchors, and every replica that reports.

    A replica's report is a hint: the replica overwrites it, and no decision depends on it.

    With --json: stream (url, id, layout), head (version, step, seq, at), epoch (seq, name, released), open, floor,
    anchors [{version, bytes, seq}], void [{seq, why}] (records after the newest seal that do not count), replicas [{id,
    …}], doubt (seq, reason, head: a damaged record at which readers stop, and the newest version that the bucket
    shows). The exit code is 13 if a record is missing.
    """

    async def main() -> dict[str, Any]:
        async with StoreOptions(stream, endpoint_url, region, profile).watched() as store:
            return await read_status(store)

    status = run_async(main())
    if json:
        print_json(status)
        return
    head, epoch, attempt, doubt = status["head"], status["epoch"], status["open"], status["doubt"]
    anchors = ", ".join(f"version {a['version']} ({size(a['bytes'])})" for a in status["anchors"])
    step = "" if head["step"] is None else f", step {head['step']}"
    print_fields(
        {
            "stream": f"{status['stream']['url']}  id {status['stream']['id']}",
            "head": f"version {head['version']}{step}, sealed {clock(head['at'])}",
            "publisher": epoch and f"{epoch['name']}, epoch {epoch['seq']}{', released' if epoch['released'] else ''}",
            "open": attempt and f"version {attempt['version']}, attempt {attempt['seq']}",
            "floor": status["floor"],
            "anchors": anchors or "none",
        }
        | {f"void record {void['seq']}": void["why"] for void in status["void"]}
        | ({"damaged": f"record {doubt['seq']}, where readers stop: {doubt['reason']}"} if doubt else {})
    )
    if status["replicas"]:
        print_table(
            ("replica", "version ", "state", "at", "scrubbed", "scrub", "detail"), map(_cells, status["replicas"])
        )


def _cells(replica: dict[str, Any]) -> list[Any]:
    """The cells of one replica's report, which may hold anything (must L7)."""
    times = {key: clock(str(replica[key])) for key in ("at", "scrubbed_at") if replica.get(key)}
    shown = replica | times
    return [shown.get(key) for key in ("id", "version", "state", "at", "scrubbed_at", "scrub", "detail")]


async def read_status(store: Store) -> dict[str, Any]:
    """The answer of `dcr status --json`. Raises what reading a ledger raises."""
    import msgspec

    from dcr_daemon.ledger.audit.replay import read_steps
    from dcr_daemon.ledger.ledger import Ledger

    ledger = Ledger(store)
    state = await ledger.read_whole()
    version = state.seal.version
    head: Any = await ledger.history.seal(version) if version else ledger.stream
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
        "replicas": await _read_replicas(store),
        "doubt": asdict(ledger.doubt) if ledger.doubt else None,
    }


async def _read_replicas(store: Store) -> list[dict[str, Any]]:
    """Status objects by replica id; an unreadable one counts as absent (must L7)."""
    import msgspec

    from dcr_daemon.task_limiter import run_limited
    from dcr_daemon.untrusted import decode_json

    decoder = msgspec.json.Decoder(dict[str, Any])

    async def read(key: str) -> dict[str, Any] | None:
        try:
            report = decode_json(decoder, await store.get(key, limit=_REPLICA_LIMIT))
        except (KeyNotFound, Corrupt, ValueError):
            return None
        return report | {"id": key.removeprefix("replicas/").removesuffix(".json")}

    keys = [entry.key async for entry in store.list("replicas/")]
    reports = await run_limited((partial(read, key) for key in keys), _AT_ONCE)
    return sorted(filter(None, reports), key=lambda report: str(report["id"]))
