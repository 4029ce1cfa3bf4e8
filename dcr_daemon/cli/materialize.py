"""`dcr materialize`: builds a plain Hugging Face checkpoint of one version."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dcr_daemon.cli import Stopped
from dcr_daemon.cli.options import EndpointUrl, Json, Profile, Region, StoreOptions, StreamArgument, run_async
from dcr_daemon.cli.output import print_fields, print_json, size
from dcr_daemon.cli.progress import transfer
from dcr_daemon.errors import StoreUnavailable
from dcr_daemon.observe.streams import put
from dcr_daemon.wording import printable


def command(
    stream: StreamArgument,
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="New directory; it appears when it is complete and verified, or not at all."),
    ],
    version: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Version to build; default: the newest sealed one.")
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            envvar="DCR_BASE", metavar="DIR", help="Checkpoint of version 0; needed where the stream has no anchor."
        ),
    ] = None,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    json: Json = False,
) -> None:
    """Build a checkpoint of one version from the stream, and verify it against its fingerprint.

    What has arrived when the command is interrupted, or the store stops answering, is kept in .NAME.dcr-partial beside
    DIR: the same command goes on there. If you do not want it any more, delete that directory.

    Example: dcr materialize s3://bucket/run-42 --version 17 --out /models/v17
    """
    from dcr_daemon.subscribe.materialize import Materialized, kept_directory, materialize

    place = StoreOptions(stream, endpoint_url, region, profile)

    async def main() -> Materialized:
        with transfer("materialising", quiet=json) as emit:
            async with place.watched(emit) as store:
                return await materialize(store, version=version, out=out, base=base, emit=emit)

    try:
        built = run_async(main())
    except (KeyboardInterrupt, Stopped, StoreUnavailable):
        if (kept := kept_directory(out)).exists() and not json:
            put(sys.stderr, f"dcr: {printable(str(kept))} has what has arrived: run the command again, or delete it\n")
        raise
    result = {
        "out": str(built.out),
        "version": built.version,
        "step": built.step,
        "tensors": built.tensors,
        "bytes": built.bytes,
        "fingerprint": built.total,
    }
    if json:
        print_json(result)
    else:
        print_fields(result | {"bytes": size(built.bytes)})
