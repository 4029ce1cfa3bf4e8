"""`dcr forget`: deletes the report of a replica that no longer exists."""

from __future__ import annotations

from typing import Annotated

import typer

from dcr_daemon.cli.options import EndpointUrl, Json, Profile, Region, StoreOptions, StreamArgument, run_async
from dcr_daemon.cli.output import print_json
from dcr_daemon.errors import NotFound, UsageError

Replica = Annotated[str, typer.Argument(metavar="REPLICA", help="Its id, as `dcr status` shows it.")]
Force = Annotated[bool, typer.Option("--force", help="Also if the report is not stale.")]


def command(
    stream: StreamArgument,
    replica: Replica,
    force: Force = False,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    json: Json = False,
) -> None:
    """Remove a replica that no longer exists from `dcr status`.

    Only its report is deleted, and nothing depends on that: a replica that lives writes it again. A report that is not
    stale is refused. It needs permission to delete below replicas/.

    Example: dcr forget s3://bucket/run-42 rollout-3
    """

    async def main() -> None:
        from dcr_daemon.ledger import names
        from dcr_daemon.subscribe.status import ENDED, read_replicas

        async with StoreOptions(stream, endpoint_url, region, profile).watched() as store:
            entries = {entry.key async for entry in store.list(names.REPLICAS)}
            key = names.replica(replica)
            if key not in entries:
                raise NotFound(f"no replica {replica} has reported to {store.url}", hint="`dcr status` lists them")
            found = {report["id"]: report for report in await read_replicas(store, head=0)}.get(replica)
            if found and not force and not found["stale"] and found.get("state") not in ENDED:
                raise UsageError(
                    f"replica {replica} reported {found['age']:.0f} s ago", hint="stop it first, or give --force"
                )
            await store.delete([key])

    run_async(main())
    if json:
        print_json({"forgotten": replica})
