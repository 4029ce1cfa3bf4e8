"""`dcr trace`: merges the traces of daemons, and shows what the time of each refit was spent on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcr_daemon.cli.options import Json
from dcr_daemon.cli.output import print_json, print_table, share, size
from dcr_daemon.cli.units import duration, link_rate
from dcr_daemon.errors import NotFound, ResourceExhausted, UsageError

if TYPE_CHECKING:
    from dcr_daemon.tracing.refits import Refit

_DRAWN = 8  #: versions, unless --version says which


def command(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES", help="Files that --trace or DCR_TRACE named, of any processes.")
    ],
    version: Annotated[list[int] | None, typer.Option(metavar="VERSION", help="Only this version; repeatable.")] = None,
    link: Annotated[
        str | None, typer.Option(metavar="RATE", help="Rate of each process's link: 200Mbit/s, 10Gbps.")
    ] = None,
    rtt: Annotated[str, typer.Option(metavar="TIME", help="Round trip to the store: 50ms.")] = "0",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write the timeline: FILE.svg or FILE.html, the newest 8 versions unless --version is given; "
            "FILE.json, one trace of all for Perfetto.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Merge traces, and show for each version how long its refit took and on which phases.

    A refit lasts from the beginning of the update to the commit on the last replica. A phase's share is of that time;
    phases overlap. "alone" is the time in which no other phase ran, "waiting" that in which none did. With --link the
    lower bound is the time of the bytes on the link and two round trips. The clocks of the hosts must agree.

    With --json: refits [{version, seconds, bytes, lower_bound, ratio, replicas {name: seconds}, waiting, phases {name:
    {seconds, share, alone}}}].
    """
    from dcr_daemon.tracing.refits import find_refits
    from dcr_daemon.tracing.timeline import read_traces

    rate, delay = link_rate(link) if link else None, duration(rtt)
    if out and out.suffix not in (".svg", ".html", ".json"):
        raise UsageError(f"--out {out} is neither .svg nor .html nor .json", hint="name a file with such an ending")
    slices = read_traces(files)
    refits = [refit for refit in find_refits(slices) if not version or refit.version in version]
    if not refits:
        raise NotFound("these files hold no whole refit", hint="give the files of the publisher and of replicas")
    if out:
        _write(out, slices, refits if version else refits[-_DRAWN:], rate, delay)
    for refit in refits:
        if refit.skew:
            typer.echo(
                f"dcr: version {refit.version} was committed {refit.skew:.3f} s before its seal: the clocks of these "
                "hosts do not agree, and its times are wrong",
                err=True,
            )
    if json:
        print_json({"refits": [_document(refit, rate, delay) for refit in refits]})
        return
    for refit in refits:
        _print(refit, rate, delay)


def _write(out: Path, slices: Any, refits: list[Refit], rate: float | None, rtt: float) -> None:
    from dcr_daemon.tracing.drawing import as_page, draw
    from dcr_daemon.tracing.timeline import merged_trace

    if out.suffix == ".json":
        text = merged_trace(slices)
    else:
        drawn = draw(refits, rate=rate, rtt=rtt)
        text = as_page(drawn) if out.suffix == ".html" else drawn
    try:
        out.write_text(text)
    except OSError as error:
        raise ResourceExhausted(f"{out} cannot be written: {error.strerror or error}") from error


def _document(refit: Refit, rate: float | None, rtt: float) -> dict[str, Any]:
    bound = refit.lower_bound(rate, rtt) if rate else None
    return {
        "version": refit.version,
        "seconds": round(refit.seconds, 6),
        "bytes": refit.bytes,
        "lower_bound": bound,
        "ratio": refit.seconds / bound if bound else None,
        "replicas": {name: round(at - refit.begin, 6) for name, at in sorted(refit.commits.items())},
        "waiting": round(refit.waiting, 6),
        "phases": {
            name: {
                "seconds": round(phase.seconds, 6),
                "share": phase.seconds / refit.seconds if refit.seconds else 0.0,
                "alone": round(phase.alone, 6),
            }
            for name, phase in refit.phases.items()
        },
    }


def _print(refit: Refit, rate: float | None, rtt: float) -> None:
    bound = refit.lower_bound(rate, rtt) if rate else None
    against = f", {refit.seconds / bound:.2f} × its lower bound of {bound:.3f} s" if bound else ""
    moved = f", {size(refit.bytes)}" if refit.bytes is not None else ""
    replicas = f", {len(refit.commits)} replicas" if len(refit.commits) > 1 else ""
    typer.echo(f"version {refit.version}: {refit.seconds:.3f} s{moved}{replicas}{against}")
    rows = [
        (name, f"{phase.seconds:.3f} s", share(phase.seconds, refit.seconds), f"{phase.alone:.3f} s")
        for name, phase in refit.phases.items()
    ]
    rows.append(("waiting", f"{refit.waiting:.3f} s", share(refit.waiting, refit.seconds), ""))
    print_table(("PHASE", "TIME ", "SHARE ", "ALONE "), rows)
