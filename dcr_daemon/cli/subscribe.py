"""`dcr subscribe`: keeps one engine at a stream's newest version."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcr_daemon.cli.daemon import Observation, run_daemon
from dcr_daemon.cli.options import (
    EndpointUrl,
    Events,
    Json,
    Listen,
    LogLevel,
    Profile,
    Region,
    State,
    StoreOptions,
    Trace,
    state_root,
)

if TYPE_CHECKING:
    from dcr_daemon.events import Emit

_STAGING = "Staging"
_SCRUB = "Scrub"

Source = Annotated[str, typer.Option("--from", envvar="DCR_STREAM", metavar="STREAM", help="Stream to follow.")]
Engine = Annotated[
    str,
    typer.Option(
        envvar="DCR_ENGINE",
        metavar="URL",
        help="Engine to update: vllm:///run/dcr/vllm.sock, or dir:///models/current for a checkpoint directory.",
    ),
]
Once = Annotated[bool, typer.Option("--once", help="Bring the engine to the newest sealed version, and exit.")]
Replica = Annotated[
    str | None,
    typer.Option(
        envvar="DCR_REPLICA",
        metavar="ID",
        help="Id of this replica in `dcr status`, as the name of a pod: 1 to 63 of a-z, 0-9, - and .; default: the "
        "host name.",
    ),
]
Pin = Annotated[int | None, typer.Option(metavar="VERSION", min=0, help="Serve this version and never a newer one.")]
Base = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Checkpoint that the stream was created from; for engines whose loader computes some tensors.",
    ),
]
Staging = Annotated[
    Path | None,
    typer.Option(
        envvar="DCR_STAGING",
        metavar="DIR",
        help="Directory for downloaded chunks; default: /dev/shm/dcr-ID where /dev/shm exists.",
        rich_help_panel=_STAGING,
    ),
]
StagingLimit = Annotated[
    int | None,
    typer.Option(
        metavar="BYTES", min=1 << 20, help="Maximum bytes in the staging directory.", rich_help_panel=_STAGING
    ),
]
Poll = Annotated[
    float,
    typer.Option(
        envvar="DCR_POLL",
        metavar="SECONDS",
        min=0.01,
        help="Seconds between polls of the ledger after a record; a tenth of it (0.1 or more) while one is expected.",
    ),
]
PollMax = Annotated[
    float,
    typer.Option(
        envvar="DCR_POLL_MAX",
        metavar="SECONDS",
        min=0.01,
        help="Longest pause between polls. A pause is 2% of the time since the last record, unless one is expected.",
    ),
]
Patience = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0,
        help="Seconds to wait for an object that is not there yet, and with --once for an engine that does not answer.",
    ),
]
ReadyWithin = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        help="/readyz reports ready while the engine is at most N versions behind the newest known version.",
    ),
]
ScrubEvery = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0,
        help="Seconds between two passes that verify the live weights (0: off).",
        rich_help_panel=_SCRUB,
    ),
]
ScrubRate = Annotated[
    float,
    typer.Option(
        metavar="BYTES",
        min=0,
        help="Bytes per second that each rank may read for the scrub (0: unlimited).",
        rich_help_panel=_SCRUB,
    ),
]


def command(
    source: Source,
    engine: Engine,
    once: Once = False,
    replica: Replica = None,
    pin: Pin = None,
    base: Base = None,
    state: State = None,
    staging: Staging = None,
    staging_limit: StagingLimit = None,
    poll: Poll = 1.0,
    poll_max: PollMax = 30.0,
    patience: Patience = 60.0,
    ready_within: ReadyWithin = 4,
    scrub_every: ScrubEvery = 3600.0,
    scrub_rate: ScrubRate = float(64 << 20),
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    listen: Listen = None,
    events: Events = None,
    trace: Trace = None,
    log_level: LogLevel = "info",
    json: Json = False,
) -> None:
    """Update a running engine in place to every new version of a stream, until told to stop.

    Example: dcr subscribe --from s3://bucket/run-42 --engine vllm:///run/dcr/vllm.sock
    """
    from dcr_daemon.engine import open_engine
    from dcr_daemon.observe.health import Policy
    from dcr_daemon.subscribe.daemon import STAGING_LIMIT, SubscribeOptions, run_subscribe
    from dcr_daemon.subscribe.fetch.staging import staging_root
    from dcr_daemon.subscribe.options import replica_id

    root = state_root(state)
    options = SubscribeOptions(
        replica=replica or replica_id(socket.gethostname()),
        state=root,
        staging=staging,
        staging_limit=staging_limit or STAGING_LIMIT,
        once=once,
        pin=pin,
        base=base,
        poll=poll,
        poll_max=poll_max,
        patience=patience,
        scrub_every=scrub_every,
        scrub_rate=scrub_rate,
    )
    place = StoreOptions(source, endpoint_url, region, profile)

    async def main(emit: Emit) -> None:
        served = open_engine(engine, state=root, emit=emit)
        try:
            async with place.open(emit) as store:
                await run_subscribe(options, store, engine=served, emit=emit)
        finally:
            await served.close()

    watch = Observation(
        "subscriber",
        listen,
        events,
        log_level,
        json,
        Policy(ready_within, pin),
        trace,
        longest_poll=options.polling.longest,
        disks={"state": root, "staging": staging or staging_root(root)},
    )
    run_daemon(watch, main, stream=source, replica=options.replica)
