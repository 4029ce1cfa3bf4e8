"""`dcr verify`: checks a whole stream against its digests and fingerprints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcr_daemon.cli.options import EndpointUrl, Json, Profile, Region, StoreOptions, StreamArgument, run_async
from dcr_daemon.cli.output import print_fields, print_json, size
from dcr_daemon.cli.progress import progress_bar
from dcr_daemon.errors import Corrupt

if TYPE_CHECKING:
    from dcr_daemon.ledger.audit.verify import Report


def command(
    stream: StreamArgument,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    json: Json = False,
) -> None:
    """Check every record, object, digest and fingerprint of a stream; write nothing.

    Prints what is damaged and how it can be repaired. The exit code is 13 if anything is damaged.

    With --json: stream (id), head, floor, records, void, versions, anchors, objects, bytes, damages [{key, version,
    what, rebuildable, repair}], orphans, orphan_bytes (what `dcr gc` would delete), unknown.
    """

    async def main() -> Report:
        from dcr_daemon.ledger.audit.verify import verify
        from dcr_daemon.runtime import Workers

        workers = Workers()
        try:
            with progress_bar("verifying", quiet=json) as progress:
                async with StoreOptions(stream, endpoint_url, region, profile).watched() as store:
                    return await verify(store, progress=progress, workers=workers)
        finally:
            workers.close()

    report = run_async(main())
    if json:
        print_json(report)
    else:
        _print(report)
    if not report.ok:
        count = len(report.damages)
        raise Corrupt(f"{count} damaged object{'s' * (count > 1)} in {stream}", hint="each is listed with its repair")


def _print(report: Report) -> None:
    print_fields(
        {
            "stream": report.stream,
            "head": f"version {report.head}",
            "floor": f"version {report.floor}",
            "records": f"{report.records}, {len(report.void)} of them void",
            "versions": report.versions,
            "anchors": report.anchors,
            "objects": f"{report.objects}, {size(report.bytes)}",
            "orphans": None if report.orphans is None else f"{report.orphans}, {size(report.orphan_bytes or 0)}",
            "damages": len(report.damages) or "none",
        }
    )
    for note in report.void:
        print_fields({"void": note})
    if report.orphans:
        print_fields({"note": "orphans harm nothing; `dcr gc` deletes them"})
    for key in report.unknown:
        print_fields({"unknown": key})
    for damage in report.damages:
        print_fields({"damaged": damage.key, "  what": damage.what, "  repair": damage.repair or None})
