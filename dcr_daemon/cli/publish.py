"""`dcr publish`: publishes the checkpoints that appear below a directory as versions of a stream."""

from __future__ import annotations

import sys
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
from dcr_daemon.cli.output import print_json, print_table

if TYPE_CHECKING:
    from dcr_daemon.events import Emit
    from dcr_daemon.publish.watch.once import OnceReport

_INPUT = "Input"
_STREAM = "Stream"
_TUNING = "Tuning"

To = Annotated[str, typer.Option(envvar="DCR_STREAM", metavar="STREAM", help="Stream to publish to.")]
Watch = Annotated[
    Path,
    typer.Option(
        envvar="DCR_WATCH",
        metavar="DIR",
        help="Publish every checkpoint that appears below DIR: safetensors, whole or sharded, and torch DCP.",
    ),
]
Base = Annotated[
    Path | None,
    typer.Option(envvar="DCR_BASE", metavar="DIR", help="Checkpoint to publish as version 0; required with --create."),
]
Create = Annotated[
    bool, typer.Option("--create", help="Create the stream if it does not exist.", rich_help_panel=_STREAM)
]
Once = Annotated[
    bool,
    typer.Option(
        "--once",
        help="Publish the checkpoints that are complete now, oldest first, print what was published and what not, and "
        "exit: 0 if no checkpoint of the policy was left out, 10 if one does not fit, 17 if one is incomplete.",
    ),
]
Name = Annotated[
    str | None,
    typer.Option(
        envvar="DCR_NAME",
        metavar="NAME",
        help="Name of this publisher. Without --take-over, only a publisher of the same name continues a stream. "
        "Default: the name of the last run, kept in --state.",
        rich_help_panel=_STREAM,
    ),
]
TakeOver = Annotated[
    bool,
    typer.Option(
        "--take-over",
        help="Claim the stream from a publisher of another name; if that is still running, it is fenced and stops.",
        rich_help_panel=_STREAM,
    ),
]
Select = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB",
        help="Publish only checkpoints whose path below DIR matches, such as 'global_step_*/actor/huggingface'; "
        "repeatable. Default: the paths that differ from the first one that is published only in their numbers.",
        rich_help_panel=_INPUT,
    ),
]
StepPattern = Annotated[
    str | None,
    typer.Option(
        metavar="REGEX",
        help="Read the training step from the path below DIR with this expression: its first group, or all of it. "
        "Default: known patterns, such as checkpoint-N, global_step_N, step=N, iter_N.",
        rich_help_panel=_INPUT,
    ),
]
Marker = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Publish a checkpoint only when its directory holds a file of this name.",
        rich_help_panel=_INPUT,
    ),
]
Newest = Annotated[
    bool,
    typer.Option(
        "--newest",
        help="Publish only the newest of several finished checkpoints: the one that was written last.",
        rich_help_panel=_INPUT,
    ),
]
Poll = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        min=0.05,
        help="Scan DIR at this interval instead of using inotify (for network file systems).",
        rich_help_panel=_INPUT,
    ),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB", help="Ignore input tensors with these names; repeatable.", rich_help_panel=_INPUT),
]
UploadBase = Annotated[
    bool,
    typer.Option(
        "--upload-base/--no-upload-base",
        help="With --create, write an anchor of version 0.",
        rich_help_panel=_STREAM,
    ),
]
AnchorEvery = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Write an anchor every N versions.", rich_help_panel=_STREAM),
]
AnchorShare = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        min=0,
        help="Write an anchor when the versions since the last one weigh more than this share of a whole checkpoint "
        "(0: never).",
        rich_help_panel=_STREAM,
    ),
]
KeepVersions = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        help="Keep the newest N versions and delete older ones, as far as anchors allow (0: keep all).",
        rich_help_panel=_STREAM,
    ),
]
KeepHours = Annotated[
    float,
    typer.Option(metavar="N", min=0, help="Also keep the versions of the last N hours.", rich_help_panel=_STREAM),
]
Codec = Annotated[
    str, typer.Option(metavar="CODEC", help="Delta codec: auto, ulp, xor or overwrite.", rich_help_panel=_TUNING)
]
Threads = Annotated[
    int,
    typer.Option(
        metavar="THREADS", min=0, help="Threads that compare and encode (0: one per core).", rich_help_panel=_TUNING
    ),
]
Uploads = Annotated[
    int, typer.Option(metavar="N", min=1, help="Number of concurrent uploads.", rich_help_panel=_TUNING)
]
ScrubRate = Annotated[
    float,
    typer.Option(
        metavar="BYTES",
        min=0,
        help="Bytes per second of the baseline to verify between updates (0: off).",
        rich_help_panel=_TUNING,
    ),
]


def command(
    to: To,
    watch: Watch,
    base: Base = None,
    create: Create = False,
    once: Once = False,
    name: Name = None,
    take_over: TakeOver = False,
    state: State = None,
    select: Select = None,
    step_pattern: StepPattern = None,
    marker: Marker = None,
    newest: Newest = False,
    poll: Poll = None,
    ignore: Ignore = None,
    upload_base: UploadBase = True,
    anchor_every: AnchorEvery = None,
    anchor_share: AnchorShare = 1.0,
    keep_versions: KeepVersions = 256,
    keep_hours: KeepHours = 0,
    codec: Codec = "auto",
    workers: Threads = 0,
    uploads: Uploads = 8,
    scrub_rate: ScrubRate = float(512 << 20),
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    listen: Listen = None,
    events: Events = None,
    trace: Trace = None,
    log_level: LogLevel = "info",
    json: Json = False,
) -> None:
    """Publish checkpoints to a stream as they are written, until told to stop.

    A checkpoint is a directory below --watch that directly holds *.safetensors files, as Trainer, TRL, verl, NeMo-RL
    and prime-rl write them. Each shard is read as soon as it is complete, while later ones are still being written.
    Distributed checkpoints are published once they are complete, without merging their pieces: torch DCP (.metadata and
    *.distcp), and the safetensors files of torch's sharded Hugging Face writer.

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
        select=tuple(select or ()),
        step_pattern=step_pattern,
        marker=marker,
        poll=poll,
        once=once,
        newest=newest,
    )
    place = StoreOptions(to, endpoint_url, region, profile)

    async def main(emit: Emit) -> None:
        async with place.open(emit) as store:
            report = await run_watch(options, store, emit=emit)
        if once:
            _print_report(report, json=json)
            report.check()

    observation = Observation(
        "publisher", listen, events, log_level, json, trace=trace, disks={"state": options.state, "watch": watch}
    )
    run_daemon(observation, main, stream=to)


def _print_report(report: OnceReport, *, json: bool) -> None:
    """A table on a terminal, else one JSON object: as the log lines beside it."""
    if json or not sys.stdout.isatty():
        print_json(report.as_json())
        return
    shown = report.as_json()
    rows: list[tuple[object, ...]] = [
        (f"version {one['version']}", one["step"], one["path"]) for one in shown["published"]
    ]
    rows += [(one["cause"].replace("_", " "), None, one["path"], one["reason"]) for one in shown["not_published"]]
    if more := len(report.published) + len(report.not_published) - len(rows):
        rows.append((f"and {more} more",))
    if rows:
        print_table(("OUTCOME", "STEP ", "CHECKPOINT", "REASON"), rows)
