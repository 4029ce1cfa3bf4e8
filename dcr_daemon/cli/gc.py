"""`dcr gc`: deletes what a stream need not keep, or lists it with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcr_daemon.cli.options import EndpointUrl, Json, Profile, Region, StoreOptions, StreamArgument, run_async
from dcr_daemon.cli.output import print_fields, print_json, print_table, size
from dcr_daemon.cli.progress import progress_bar
from dcr_daemon.errors import UsageError

if TYPE_CHECKING:
    from dcr_daemon.ledger.retention.collector import Collected
    from dcr_daemon.ledger.retention.plan import Item, Plan

_POLICY = "Policy"


def command(
    stream: StreamArgument,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be deleted and why; delete nothing.")
    ] = False,
    keep_versions: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Keep the newest N versions.", rich_help_panel=_POLICY),
    ] = None,
    keep_hours: Annotated[
        float | None,
        typer.Option(metavar="N", min=0, help="Keep the versions of the last N hours.", rich_help_panel=_POLICY),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            envvar="DCR_NAME",
            metavar="NAME",
            help="Claim the stream under the name of this publisher, which must be down. Default: the name that "
            "released the stream last.",
            rich_help_panel=_POLICY,
        ),
    ] = None,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="Claim the stream although a publisher has not released it. One that still runs is fenced.",
            rich_help_panel=_POLICY,
        ),
    ] = False,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    json: Json = False,
) -> None:
    """Delete the objects below the floor, and those that aborted attempts left behind.

    Without --keep-versions and --keep-hours it claims nothing and may run beside a publisher. With one of them the
    floor is raised first, to the newest whole anchor at or below the oldest version to keep. That claims the stream and
    releases it at once; while a publisher holds the stream, give these options to the publisher instead.

    With --json: stream, head, dry_run, floor_before, floor, oldest (version to keep), held (why the floor is not
    at oldest), objects and bytes (deleted, or to be), kept, kept_bytes, unknown [key], unexplained [key], items [{key,
    size, version, attempt, why}], refused (objects that the store did not let us delete).

    If the store does not let us delete some objects, the exit code is 10 when all others are deleted. If later records,
    or objects that the ledger does not know of (unexplained), show that it lacks records, nothing is deleted and the
    exit code is 13.
    """
    from dcr_daemon.ledger.retention.plan import RetentionPolicy
    from dcr_daemon.ledger.retention.unexplained import check_explained

    policy = RetentionPolicy.of(keep_versions, keep_hours)
    if take_over and not policy.active:
        raise UsageError("nothing is claimed without a policy", hint="add --keep-versions or --keep-hours")

    async def main() -> tuple[Plan, Collected | None, int]:
        from dcr_daemon.ledger.ledger import Ledger
        from dcr_daemon.ledger.retention.collector import Collector, collect

        with progress_bar("gc:", quiet=json) as progress:
            async with StoreOptions(stream, endpoint_url, region, profile).watched() as store:
                ledger = Ledger(store)
                if dry_run:
                    await ledger.read()
                    plan, done = await Collector(ledger, progress=progress).plan(policy), None
                else:
                    plan, done = await collect(ledger, policy, name=name, take_over=take_over, progress=progress)
                return plan, done, ledger.state.seal.version

    plan, done, head = run_async(main())
    if json:
        print_json(_document(stream, plan, head, done=done))
    else:
        _print(stream, plan, head, done=done)
    check_explained(plan, stream)
    if done and done.refusal:
        raise done.refusal


def _document(stream: str, plan: Plan, head: int, *, done: Collected | None) -> dict[str, Any]:
    """`done`: None for a dry run."""
    items = [
        {"key": item.key, "size": item.size, "version": item.version, "attempt": item.attempt, "why": item.why.value}
        for item in plan.items
    ]
    return {
        "stream": stream,
        "head": head,
        "dry_run": done is None,
        "floor_before": plan.before,
        "floor": plan.floor.floor,
        "oldest": plan.floor.oldest,
        "held": plan.floor.held,
        "objects": done.objects if done else len(items),
        "bytes": done.bytes if done else plan.bytes,
        "refused": done.refused if done else 0,
        "kept": plan.kept,
        "kept_bytes": plan.kept_bytes,
        "unknown": list(plan.unknown),
        "unexplained": list(plan.unexplained),
        "items": items,
    }


def _print(stream: str, plan: Plan, head: int, *, done: Collected | None) -> None:
    if plan.items:
        print_table(("what", "objects ", "size ", "why"), _rows(plan.items))
    floor = f"version {plan.floor.floor}" + (f", was {plan.before}" if plan.rises else "")
    would = "" if done else "would be "
    objects, deleted = (done.objects, done.bytes) if done else (len(plan.items), plan.bytes)
    print_fields(
        {
            "stream": stream,
            "head": f"version {head}",
            "floor": would * plan.rises + floor,
            "deleted": f"{would}{objects} objects, {size(deleted)}",
            "kept": f"{plan.kept} objects, {size(plan.kept_bytes)}",
        }
        | ({"held back": plan.floor.held} if plan.floor.held else {})
        | ({"not deleted": f"{done.refused} objects: the store refuses"} if done and done.refused else {})
    )
    for key in plan.unknown:
        print_fields({"unknown, kept": key})
    for key in plan.unexplained:
        print_fields({"not in the ledger": key})


def _rows(items: Sequence[Item]) -> list[tuple[str, int, str, str]]:
    """One row per reason for what is below the floor, one per aborted attempt."""
    groups: dict[tuple[str, str], list[Item]] = {}
    for item in items:
        kind = item.key.partition("/")[0]
        folder = item.key.rpartition("/")[0] if item.version is not None else kind
        groups.setdefault((kind if item.why.name == "BELOW" else folder, item.why.value), []).append(item)
    rows = []
    for (place, why), found in groups.items():
        versions = {item.version for item in found if item.version is not None}
        what = f"{place}/ of {_versions(versions)}" if "/" not in place and versions else f"{place}/"
        rows.append((what, len(found), size(sum(item.size for item in found)), why))
    return rows


def _versions(versions: Iterable[int]) -> str:
    """`versions 1, 3 to 7, 9`."""
    runs: list[list[int]] = []
    for version in sorted(versions):
        if runs and version == runs[-1][-1] + 1:
            runs[-1][1:] = [version]
        else:
            runs.append([version])
    text = ", ".join(" to ".join(map(str, run)) for run in runs)
    return f"version{'s' * (text.isdigit() is False)} {text}"
