"""`dcr plan --link`: how long a refit of a model of this size over this link takes, and on which phases."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcr_daemon.cli.output import print_fields, print_json, print_table, share, size
from dcr_daemon.cli.plan.prediction import Case, Constants, Prediction, predict, shipped
from dcr_daemon.cli.units import count, duration, fraction, link_rate
from dcr_daemon.errors import NotFound, UsageError
from dcr_daemon.untrusted import load_json


@dataclass(frozen=True, slots=True)
class RefitOptions:
    """The options as given on the command line."""

    link: str
    rtt: str
    changed: str
    replicas: int
    hosts: int
    cores: int | None
    replica_hosts: int
    engine: str
    constants: Path | None


def parameters_of(config: str) -> float | None:
    """Of `1T` or `7B`; None if CONFIG is the name of a model or a file."""
    try:
        return count(config)
    except UsageError:
        return None


def print_refit(config: str, parameters: float, options: RefitOptions, *, json: bool) -> None:
    """Predict and print.

    Raises:
        UsageError: an option is not understood, or nothing was measured of the engine.
        NotFound: the file of constants cannot be read.
    """
    known = _constants(options.constants)
    if options.engine not in known.prepare:
        measured = ", ".join(sorted(known.prepare))
        raise UsageError(
            f"--engine {options.engine} was not measured", hint=f"--engine {measured}, or other --constants"
        )
    case = Case(
        parameters=parameters,
        changed=fraction(options.changed),
        rate=link_rate(options.link),
        rtt=duration(options.rtt),
        hosts=options.hosts,
        cores=options.cores,
        replica_hosts=options.replica_hosts,
        engine=options.engine,
    )
    found = predict(case, known)
    document = _document(config, options, found, known)
    if json:
        print_json(document)
    else:
        _print(document, found)


def _constants(path: Path | None) -> Constants:
    if path is None:
        return shipped()
    try:
        return Constants.from_json(load_json(path.read_bytes()))
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror or error}", hint="check --constants") from error
    except ValueError as error:
        raise UsageError(
            f"{path} holds no constants: {error}", hint="write it with benchmarks/rig/constants.py"
        ) from error


def _document(config: str, options: RefitOptions, found: Prediction, known: Constants) -> dict[str, Any]:
    return {
        "model": config,
        "parameters": found.case.parameters,
        "dense_bytes": found.case.dense_bytes,
        "changed": found.case.changed,
        "bytes": found.bytes,
        "replicas": options.replicas,
        "fleet_bytes": found.bytes * options.replicas,
        "seconds": found.seconds,
        "lower_bound": found.lower_bound,
        "dense_seconds": found.dense_seconds,
        "phases": found.phases,
        "measured_on": known.machine,
        "benchmark": known.benchmark,
    }


def _print(document: dict[str, Any], found: Prediction) -> None:
    machine, total, case = document["measured_on"], found.seconds, found.case
    bound = found.lower_bound  # 0 for no bytes and no round trip
    against = f", {total / bound:.2f} × its lower bound of {bound:,.2f} s" if bound else ""
    print_fields(
        {
            "model": f"{document['model']}: {case.parameters / 1e9:,.3f} B parameters, {size(case.dense_bytes)}",
            "version": f"{share(case.changed, 1)} changed, {size(found.bytes)}",
            "refit": f"{total:,.2f} s" + against,
            "dense": f"{found.dense_seconds:,.1f} s for the whole model over the link once, "
            f"{found.dense_seconds / total:,.1f} × as long",
            "fleet": f"{size(document['fleet_bytes'])} downloaded by {document['replicas']} replicas",
            "measured": f"{document['benchmark']} on {machine.get('cores')} cores of {machine.get('processor')}, "
            f"load {(machine.get('load') or ['?'])[0]}, {machine.get('at')}",
        }
    )
    rows = ((name, f"{seconds:,.3f} s", share(seconds, total)) for name, seconds in found.phases.items())
    print_table(("PHASE", "TIME ", "SHARE "), rows)
