"""`dcr publish`: checkpoints that appear below a directory become versions of a stream."""

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
    state_root,
)

if TYPE_CHECKING:
    from dcr_daemon.events import Emit

_INPUT = "Input"
_STREAM = "Stream"
_TUNING = "Tuning"


def command(
    to: Annotated[str, typer.Option(envvar="DCR_STREAM", metavar="STREAM", help="Stream to publish to.")],
    watch: Annotated[
        Path,
        typer.Option(
            envvar="DCR_WATCH",
            metavar="DIR",
            help="Publish every checkpoint that appears below DIR: safetensors, whole or sharded, and torch DCP.",
        ),
    ],
    base: Annotated[
        Path | None,
        typer.Option(envvar="DCR_BASE", metavar="DIR", help="Checkpoint that is version 0; required with --create."),
    ] = None,
    create: Annotated[
        bool, typer.Option("--create", help="Make the stream if the prefix is empty.", rich_help_panel=_STREAM)
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Publish what is complete now, oldest first, and exit.")] = False,
    name: Annotated[
        str | None,
        typer.Option(
            envvar="DCR_NAME",
            metavar="NAME",
            help="Publisher name: only the same name resumes by itself. Default: as last time (kept in --state).",
            rich_help_panel=_STREAM,
        ),
    ] = None,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Claim the stream from another publisher name.", rich_help_panel=_STREAM),
    ] = False,
    state: State = None,
    marker: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A checkpoint is complete only with this file.", rich_help_panel=_INPUT),
    ] = None,
    newest: Annotated[
        bool, typer.Option("--newest", help="Of a backlog publish only the newest.", rich_help_panel=_INPUT)
    ] = False,
    poll: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0.05, help="Poll instead of inotify (network file systems).", rich_help_panel=_INPUT
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Drop tensors of these names; repeatable.", rich_help_panel=_INPUT),
    ] = None,
    upload_base: Annotated[
        bool,
        typer.Option(
            "--upload-base/--no-upload-base",
            help="Write an anchor of version 0 at --create.",
            rich_help_panel=_STREAM,
        ),
    ] = True,
    anchor_every: Annotated[
        int | None,
        typer.Option(
            metavar="VERSIONS", min=1, help="Write an anchor every so many versions.", rich_help_panel=_STREAM
        ),
    ] = None,
    anchor_share: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            min=0,
            help="Write an anchor when the chain outweighs this share of a dense checkpoint; 0 never.",
            rich_help_panel=_STREAM,
        ),
    ] = 1.0,
    keep_versions: Annotated[
        int,
        typer.Option(
            metavar="VERSIONS",
            min=0,
            help="Keep the newest so many versions, and delete older ones as far as anchors allow; 0: keep all.",
            rich_help_panel=_STREAM,
        ),
    ] = 256,
    keep_hours: Annotated[
        float,
        typer.Option(
            metavar="HOURS",
            min=0,
            help="Keep the versions of the last so many hours, too.",
            rich_help_panel=_STREAM,
        ),
    ] = 0,
    codec: Annotated[
        str, typer.Option(metavar="CODEC", help="auto, ulp, xor or overwrite.", rich_help_panel=_TUNING)
    ] = "auto",
    workers: Annotated[
        int,
        typer.Option(metavar="THREADS", min=0, help="Threads for byte work; 0: one per core.", rich_help_panel=_TUNING),
    ] = 0,
    uploads: Annotated[int, typer.Option(metavar="N", min=1, help="Concurrent uploads.", rich_help_panel=_TUNING)] = 8,
    scrub_rate: Annotated[
        float,
        typer.Option(
            metavar="BYTES",
            min=0,
            help="Of the baseline, checked a second between updates; 0: none.",
            rich_help_panel=_TUNING,
        ),
    ] = float(512 << 20),
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    listen: Listen = None,
    events: Events = None,
    log_level: LogLevel = "info",
    json: Json = False,
) -> None:
    """Publish checkpoints to a stream as they are written, until told to stop.

    A checkpoint is a directory below --watch that directly holds *.safetensors files, as Trainer, TRL, verl, NeMo-RL
    and prime-rl write them. Each shard is taken up when it is complete, while later ones are still being written.
    Checkpoints that lie in pieces are published as they lie, once complete: torch's distributed checkpoints (.metadata
    and *.distcp), and safetensors of its sharded Hugging Face writer.

    Example: dcr publish --to s3://bucket/run-42 --create --base /models/qwen3 --watch /checkpoints
    """
    from dcr_daemon.publish.options import parse_codec
    from dcr_daemon.publish.watch.watcher import WatchOptions, run_watch

    options = WatchOptions(
        state=state_root(state),
        base=base,
        create=create,
        name=name,
        take_over=take_over,
        codec=parse_codec(codec),
        ignore=tuple(ignore or ()),
        upload_base=upload_base,
        anchor_every=anchor_every,
        anchor_share=anchor_share or None,
        keep_versions=keep_versions,
        keep_hours=keep_hours,
        uploads=uploads,
        workers=workers,
        scrub_rate=scrub_rate,
        watch=watch,
        marker=marker,
        poll=poll,
        once=once,
        newest=newest,
    )
    place = StoreOptions(to, endpoint_url, region, profile)

    async def main(emit: Emit) -> None:
        async with place.open(emit) as store:
            await run_watch(options, store, emit)

    run_daemon(Observation("publisher", listen, events, log_level, json), main, stream=to)
