"""`dcr subscribe`: one engine kept at a stream's newest version."""

from __future__ import annotations

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
    default_replica,
    state_root,
)

if TYPE_CHECKING:
    from dcr_daemon.events import Emit

_STAGING = "Staging"
_SCRUB = "Scrub"


def command(
    source: Annotated[str, typer.Option("--from", envvar="DCR_STREAM", metavar="STREAM", help="Stream to follow.")],
    engine: Annotated[
        str,
        typer.Option(
            envvar="DCR_ENGINE",
            metavar="URL",
            help="vllm:///run/dcr/vllm.sock, or dir:///models/current for a checkpoint directory.",
        ),
    ],
    once: Annotated[
        bool, typer.Option("--once", help="Reach the newest version that is sealed now, and exit.")
    ] = False,
    replica: Annotated[
        str | None,
        typer.Option(envvar="DCR_REPLICA", metavar="ID", help="Id of this replica; default: the host name."),
    ] = None,
    pin: Annotated[
        int | None, typer.Option(metavar="VERSION", min=0, help="Serve this version and never a newer one.")
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Checkpoint that the stream was created from; for engines that compute with some tensors at load.",
        ),
    ] = None,
    state: State = None,
    staging: Annotated[
        Path | None,
        typer.Option(
            envvar="DCR_STAGING",
            metavar="DIR",
            help="Where chunks wait; default /dev/shm/dcr-ID where that exists.",
            rich_help_panel=_STAGING,
        ),
    ] = None,
    staging_limit: Annotated[
        int | None, typer.Option(metavar="BYTES", min=1 << 20, help="Bytes staged at most.", rich_help_panel=_STAGING)
    ] = None,
    poll: Annotated[float, typer.Option(metavar="SECONDS", min=0.01, help="Between looks at the ledger's end.")] = 1.0,
    patience: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0, help="How long --once waits for an absent engine, and for a missing object."
        ),
    ] = 60.0,
    ready_within: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="/readyz: ready while at most N versions behind the newest seal that is known."
        ),
    ] = 4,
    scrub_every: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="Between two passes that sum the live weights again; 0: never.",
            rich_help_panel=_SCRUB,
        ),
    ] = 3600.0,
    scrub_rate: Annotated[
        float,
        typer.Option(
            metavar="BYTES", min=0, help="Read a second by each rank for it; 0: no limit.", rich_help_panel=_SCRUB
        ),
    ] = float(64 << 20),
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    listen: Listen = None,
    events: Events = None,
    log_level: LogLevel = "info",
    json: Json = False,
) -> None:
    """Bring a running engine to every new version of a stream, in place, until told to stop.

    Example: dcr subscribe --from s3://bucket/run-42 --engine vllm:///run/dcr/vllm.sock
    """
    from dcr_daemon.engine import open_engine
    from dcr_daemon.observe.health import Policy
    from dcr_daemon.subscribe.daemon import STAGING_LIMIT, SubscribeOptions, run_subscribe

    root = state_root(state)
    options = SubscribeOptions(
        replica=replica or default_replica(),
        state=root,
        staging=staging,
        staging_limit=staging_limit or STAGING_LIMIT,
        once=once,
        pin=pin,
        base=base,
        poll=poll,
        patience=patience,
        scrub_every=scrub_every,
        scrub_rate=scrub_rate,
    )
    place = StoreOptions(source, endpoint_url, region, profile)

    async def main(emit: Emit) -> None:
        served = open_engine(engine, state=root)
        try:
            async with place.open(emit) as store:
                await run_subscribe(options, store, served, emit)
        finally:
            await served.close()

    watch = Observation("subscriber", listen, events, log_level, json, Policy(ready_within, pin))
    run_daemon(watch, main, stream=source, replica=options.replica)
