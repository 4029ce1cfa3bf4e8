"""`dcr plan`: how much of a model a trainer's ranks can publish directly; of a stream, what its ranks agreed on."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcr_daemon.cli.options import EndpointUrl, Json, Profile, Region, StoreOptions, run_async
from dcr_daemon.cli.output import print_fields, print_json, print_table, share, size
from dcr_daemon.errors import Incompatible, UsageError

if TYPE_CHECKING:
    from dcr_daemon.projection.frameworks.megatron.grid import Grid
    from dcr_daemon.projection.preview import Preview

_GRID = "Parallel layout"
_REFIT = "Refit"
_BAR = 32  #: characters


class Trainer(StrEnum):
    megatron = "megatron"
    fsdp2 = "fsdp2"
    zero3 = "zero3"
    transformers = "transformers"


class Rule(StrEnum):
    dcr = "dcr"
    paper = "paper"


class Dtype(StrEnum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


def _degree(name: str, meaning: str) -> Any:
    return typer.Option(f"--{name}", min=1, metavar="N", help=meaning, rich_help_panel=_GRID)


def command(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG", help="A model's config.json, its directory, the name of a known model, or a stream's URL."
        ),
    ],
    trainer: Annotated[Trainer, typer.Option(help="Framework that shards the model.")] = Trainer.megatron,
    tp: Annotated[int, _degree("tp", "Tensor parallel ranks.")] = 1,
    pp: Annotated[int, _degree("pp", "Pipeline stages.")] = 1,
    vpp: Annotated[int, _degree("vpp", "Virtual pipeline stages per stage.")] = 1,
    cp: Annotated[int, _degree("cp", "Context parallel ranks.")] = 1,
    ep: Annotated[int, _degree("ep", "Expert parallel ranks.")] = 1,
    etp: Annotated[int, _degree("etp", "Tensor parallel ranks of an expert.")] = 1,
    dp: Annotated[
        int | None, _degree("dp", "Data parallel ranks (FSDP2 and ZeRO-3 shard over them); default: as few as fit.")
    ] = None,
    stage_layers: Annotated[
        str | None,
        typer.Option(metavar="N,N,…", help="Layers of each pipeline chunk, where they differ.", rich_help_panel=_GRID),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Dtype of the parameters in memory; default: fp32 with FSDP2, otherwise the model's."),
    ] = None,
    mtp: Annotated[
        bool | None,
        typer.Option("--mtp/--no-mtp", help="Train the multi-token prediction layers; default: as CONFIG says."),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Predict a refit over this link: 10Gbps, 200Mbit/s. CONFIG may then be a size: 1T, 7B.",
            rich_help_panel=_REFIT,
        ),
    ] = None,
    rtt: Annotated[str, typer.Option(metavar="TIME", help="Round trip to the store.", rich_help_panel=_REFIT)] = "50ms",
    changed: Annotated[
        str, typer.Option(metavar="SHARE", help="Elements that change in an update.", rich_help_panel=_REFIT)
    ] = "1%",
    replicas: Annotated[
        int, typer.Option(min=1, metavar="N", help="Replicas, each with a link of its own.", rich_help_panel=_REFIT)
    ] = 1,
    hosts: Annotated[
        int, typer.Option(min=1, metavar="N", help="Hosts that publish together.", rich_help_panel=_REFIT)
    ] = 1,
    cores: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Cores of each of them; default: as measured.", rich_help_panel=_REFIT),
    ] = None,
    replica_hosts: Annotated[
        int, typer.Option(min=1, metavar="N", help="Hosts of one replica's workers.", rich_help_panel=_REFIT)
    ] = 1,
    engine: Annotated[
        str, typer.Option(metavar="KIND", help="dir or vllm, as far as it was measured.", rich_help_panel=_REFIT)
    ] = "dir",
    constants: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measured constants; default: those in the package. benchmarks/rig/constants.py writes them.",
            rich_help_panel=_REFIT,
        ),
    ] = None,
    rule: Annotated[
        Rule, typer.Option(help="paper: count as residual what the published projection does not map.")
    ] = Rule.dcr,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    json: Json = False,
) -> None:
    """Show what share of a checkpoint every rank publishes directly, what is residual and why, and what it costs.

    Only CONFIG is read. For a stream, show what its ranks agreed on: every residual tensor by name,
    with the reason. See docs/PROJECTION.md.

    With --json: model, family, trainer, rule, world, grid, parameters, tensors, bytes, direct_bytes, direct_share,
    classes {bits, cast, add, residual: bytes}, residual {reason: bytes}, exactly_once, gaps, baseline_bytes {min, max,
    total}, regions {min, max, total}, kinds [{kind, tensors, bytes, direct_bytes, regions, classes, why}], notes. Of a
    stream: stream, since_version, world, bytes, direct_bytes, residual_bytes, regions, residual {name: {why, owner,
    overwrite, bytes}}.

    With --link, predict instead how long a refit takes, from constants measured by a benchmark: model, parameters,
    dense_bytes, changed, bytes, replicas, fleet_bytes, seconds, lower_bound, dense_seconds, phases {name: seconds},
    measured_on, benchmark. See docs/OPERATIONS.md.
    """
    if link:
        from dcr_daemon.cli.plan.refit import RefitOptions, parameters_of, print_refit

        parameters = parameters_of(config) or _parameters(config, mtp)
        asked = RefitOptions(link, rtt, changed, replicas, hosts, cores, replica_hosts, engine, constants)
        print_refit(config, parameters, asked, json=json)
        return
    if "://" in config:
        _plan_of_stream(StoreOptions(config, endpoint_url, region, profile), json)
        return
    from dcr_daemon.projection.frameworks.megatron.grid import Grid
    from dcr_daemon.projection.frameworks.models.families import read_architecture
    from dcr_daemon.projection.preview import preview

    architecture = read_architecture(config, prediction=mtp)
    fewest = ep * etp // math.gcd(ep * etp, tp * cp)
    layers = _layers(stage_layers)
    grid = Grid(tp=tp, pp=pp, vpp=vpp, cp=cp, dp=dp or fewest, ep=ep, etp=etp, stage_layers=layers)
    memory = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}[dtype.value] if dtype else None
    found = preview(architecture, trainer.value, grid=grid, rule=rule.value, dtype=memory)
    if json:
        print_json(_document(config, trainer, rule, grid, found))
    else:
        _print(config, trainer, rule, grid, found)
    if found.gaps:
        raise Incompatible(
            f"{len(found.gaps)} tensors do not have exactly one source each, {found.gaps[0]}",
            hint="this is a bug of dcr: please report the configuration",
        )


def _parameters(config: str, prediction: bool | None) -> int:
    from dcr_daemon.projection.frameworks.megatron.grid import Grid
    from dcr_daemon.projection.frameworks.models.families import read_architecture
    from dcr_daemon.projection.preview import preview

    architecture = read_architecture(config, prediction=prediction)
    return preview(architecture, "fsdp2", grid=Grid()).parameters


def _plan_of_stream(options: StoreOptions, json: bool) -> None:
    from dcr_daemon.cli.plan.agreed import print_agreed, read_agreed

    async def main() -> dict[str, Any]:
        async with options.watched() as store:
            return await read_agreed(store)

    found = run_async(main())
    if json:
        print_json(found)
    else:
        print_agreed(found)


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--stage-layers {text} is not a list of numbers", hint="e.g. --stage-layers 16,15,15,15"
        ) from None


def _degrees(trainer: Trainer, grid: Grid) -> dict[str, int]:
    names = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp") if trainer is Trainer.megatron else ("tp", "dp")
    return {name: getattr(grid, name) for name in names}


def _document(config: str, trainer: Trainer, rule: Rule, grid: Grid, found: Preview) -> dict[str, Any]:
    return {
        "model": config,
        "family": found.architecture.family,
        "trainer": trainer.value,
        "rule": rule.value,
        "world": found.world,
        "grid": _degrees(trainer, grid),
        "parameters": found.parameters,
        "tensors": found.tensors,
        "bytes": found.nbytes,
        "direct_bytes": found.direct,
        "direct_share": found.direct / found.nbytes,
        "classes": found.classes,
        "residual": found.reasons,
        "exactly_once": not found.gaps,
        "gaps": found.gaps,
        "baseline_bytes": _extremes(found.baseline),
        "regions": _extremes(found.regions),
        "kinds": [
            {
                "kind": row.kind,
                "tensors": row.tensors,
                "bytes": row.nbytes,
                "direct_bytes": row.direct,
                "regions": row.regions,
                "classes": row.how,
                "why": row.why,
            }
            for row in found.rows
        ],
        "notes": found.architecture.notes,
    }


def _extremes(values: tuple[int, ...]) -> dict[str, int]:
    return {"min": min(values), "max": max(values), "total": sum(values)}


def _print(config: str, trainer: Trainer, rule: Rule, grid: Grid, found: Preview) -> None:
    degrees = " · ".join(f"{name} {n}" for name, n in _degrees(trainer, grid).items() if n > 1)
    ranks = f"{found.world} rank{'s' if found.world > 1 else ''}"
    filled = int(_BAR * found.direct / found.nbytes)
    residual = ", ".join(f"{why} {share(n, found.nbytes)}" for why, n in sorted(found.reasons.items()))
    print_fields(
        {
            "model": f"{config}: {found.architecture.family}, {found.parameters / 1e9:,.3f} B parameters, "
            f"{size(found.nbytes)} in {found.tensors:,} tensors",
            "trainer": f"{trainer.value}, {ranks}" + (f": {degrees}" if degrees else ""),
            "direct": f"{'█' * filled}{'░' * (_BAR - filled)} {share(found.direct, found.nbytes)}"
            + (", by the published rule" if rule is Rule.paper else ""),
            "residual": residual or "none",
            "coverage": "broken" if found.gaps else "every element has exactly one source",
            "baseline": f"{_between(found.baseline, size)} per rank",
            "regions": f"{sum(found.regions):,}; {_between(found.regions, '{:,}'.format)} per rank",
        }
        | {f"note {i + 1}": note for i, note in enumerate(found.architecture.notes)}
    )
    print_table(
        ("kind", "tensors ", "bytes ", "share ", "direct ", "regions ", "class", "why residual"),
        (
            (
                row.kind,
                f"{row.tensors:,}",
                size(row.nbytes),
                share(row.nbytes, found.nbytes),
                share(row.direct, row.nbytes),
                f"{row.regions:,}",
                ", ".join(row.how),
                row.why,
            )
            for row in found.rows
        ),
    )


def _between(values: tuple[int, ...], shown: Any) -> str:
    low, high = shown(min(values)), shown(max(values))
    return low if low == high else f"{low} to {high}"
