"""Predicts how long a refit takes, from constants that were measured (`refit.json`, written by a benchmark).

A refit is the sum of what does not hide behind anything else:

    open       the record of the attempt: one round trip
    construct  comparing and encoding until the first chunks are full, and what the wire does not hide of the rest
    wire       the version's bytes at the link's rate, times how often they are waited for (1: download behind upload)
    protocol   round trips and looks at the ledger in which nothing is on the wire
    prepare, pause   the engine's own

Work is divided by the hosts that do it: a trainer's hosts each compare a share, a replica's hosts each prepare one.
A publisher has a thread per core, `THREADS` at most. The link is the narrowest one on the way: of all trainer hosts
together, or of one replica.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from typing import Any, Self

import msgspec

THREADS = 16  #: of a publisher, at most (`runtime.Workers`)
PHASES = ("open", "construct", "wire", "protocol", "prepare", "pause")


@dataclass(frozen=True, slots=True)
class Line:
    """`fixed + per_unit * n` seconds."""

    fixed: float
    per_unit: float

    def at(self, n: float) -> float:
        return self.fixed + self.per_unit * n

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Self:
        """Least squares of the relative error, with neither part below 0."""
        weights = [(x, y, 1 / y**2) for x, y in points if y > 0]
        if not weights:
            return cls(0.0, 0.0)
        w, wx, wy, wxx, wxy = (
            math.fsum(value)
            for value in zip(*((v, v * x, v * y, v * x * x, v * x * y) for x, y, v in weights), strict=True)
        )
        spread = w * wxx - wx * wx
        slope = (w * wxy - wx * wy) / spread if spread > 1e-9 * w * wxx else 0.0
        fixed = (wy - slope * wx) / w
        if fixed < 0:
            return cls(0.0, wxy / wxx)
        return cls(fixed, slope) if slope >= 0 else cls(wy / w, 0.0)


@dataclass(frozen=True, slots=True)
class Constants:
    """What was measured, on which machine, by which benchmark.

    Attributes:
        bytes_per_change: (share of the elements that changed, bytes per changed element), by share.
        scan: seconds of comparing and encoding per byte of the model, at the shares of `bytes_per_change`.
        lead_bytes: bytes of a version that are encoded before anything is on the wire.
        wire: how often the bytes are waited for: seconds over the bytes at the link's rate.
        protocol: seconds per round trip time: round trips, looks and what is waited for beside the bytes.
        prepare, pause: of an engine, by its kind: seconds per changed element.
    """

    machine: dict[str, Any]
    benchmark: str
    bytes_per_change: list[tuple[float, float]]
    scan: list[tuple[float, float]]
    lead_bytes: float
    wire: float
    protocol: float
    prepare: dict[str, Line]
    pause: dict[str, Line]

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Raises `ValueError` if these are no constants that something can be predicted from."""
        try:
            found = msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error
        cores = found.machine.get("cores")
        if not isinstance(cores, int) or cores < 1 or not isinstance(found.machine.get("load", [0]), list):
            raise ValueError("the machine has no number of cores")
        for points in (found.bytes_per_change, found.scan):
            if not points or min(share for share, _ in points) <= 0:
                raise ValueError("a share of changes was not measured, or is 0")
        if found.prepare.keys() != found.pause.keys():
            raise ValueError("an engine was measured in part")
        return found

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked. `parameters` elements of `width` bytes, `changed` of them as a share; rate in bytes per second."""

    parameters: float
    changed: float
    rate: float
    rtt: float
    width: int = 2
    hosts: int = 1
    cores: int | None = None  #: of each of them; None: as measured
    replica_hosts: int = 1
    engine: str = "dir"

    @property
    def dense_bytes(self) -> float:
        return self.parameters * self.width


@dataclass(frozen=True, slots=True)
class Prediction:
    """`phases` in seconds, by the names of `PHASES`; `bytes` of the version."""

    case: Case
    bytes: float
    phases: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def lower_bound(self) -> float:
        return self.bytes / self.case.rate + 2 * self.case.rtt

    @property
    def dense_seconds(self) -> float:
        """The whole model over the link, once."""
        return self.case.dense_bytes / self.case.rate


def shipped() -> Constants:
    """The constants in the package."""
    return Constants.from_json(json.loads((files("dcr_daemon.cli.plan") / "refit.json").read_text()))


def predict(case: Case, known: Constants) -> Prediction:
    """Raises `KeyError` if nothing was measured of the engine's kind."""
    changes = case.parameters * case.changed
    size = changes * interpolate(known.bytes_per_change, case.changed)
    threads = min(THREADS, case.cores) / min(THREADS, known.machine["cores"]) if case.cores else 1.0
    construct = case.dense_bytes * interpolate(known.scan, case.changed) / (case.hosts * threads)
    lead = construct * min(1.0, known.lead_bytes * case.hosts / size) if size else construct
    wire = known.wire * size / case.rate
    phases = {
        "open": case.rtt,
        "construct": lead + max(0.0, construct - lead - wire),
        "wire": wire,
        "protocol": known.protocol * case.rtt,
        "prepare": known.prepare[case.engine].at(changes / case.replica_hosts),
        "pause": known.pause[case.engine].at(changes / case.replica_hosts),
    }
    return Prediction(case, size, phases)


def interpolate(points: Sequence[tuple[float, float]], share: float) -> float:
    """Between two measured shares, on a logarithmic scale of shares; beyond them the nearest value."""
    points = sorted(points)
    if share <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if share <= x1:
            return y0 + (y1 - y0) * math.log(share / x0) / math.log(x1 / x0)
    return points[-1][1]


def fit(measured: dict[str, Any], benchmark: str = "benchmarks/refit.py") -> Constants:
    """Constants from what `benchmarks/refit.py --json` prints: of its rows with one subscriber, which has a machine
    with the publisher alone."""
    rows = [row for row in measured["rows"] if row["subscribers"] == 1]
    shares = sorted({row["changed"] for row in rows})

    def mean(changed: float, value: Any) -> float:
        return statistics.median(value(row["median"]) for row in rows if row["changed"] == changed)

    engines = sorted({row["engine_kind"] for row in rows})
    construct = {share: _phase(rows, share, "construct", "seconds") for share in shares}
    alone = {share: _phase(rows, share, "construct", "alone") for share in shares}
    sizes = {share: mean(share, lambda m: m["bytes"]) for share in shares}
    lead = max(alone[share] / construct[share] * sizes[share] for share in shares)
    dense = {share: mean(share, lambda m: m["elements"] * 2) for share in shares}
    rest = [(row, _rest(row, alone[row["changed"]])) for row in rows]
    wires = {id(row): row["median"]["bytes"] / (row["mbit"] * 125_000) for row in rows}
    # Bytes cross the wire once, or twice if the download waits for the upload; all else is no matter of the link.
    wire = min(2.0, max(1.0, Line.through([(wires[id(row)], seconds) for row, seconds in rest]).per_unit))
    protocol = statistics.median((seconds - wire * wires[id(row)]) / row["rtt"] for row, seconds in rest)
    return Constants(
        machine=measured["machine"],
        benchmark=benchmark,
        bytes_per_change=[(share, mean(share, lambda m: m["bytes"] / m["changed"])) for share in shares],
        scan=[(share, construct[share] / dense[share]) for share in shares],
        lead_bytes=lead,
        wire=wire,
        protocol=max(2.0, protocol),
        prepare={kind: _line(rows, kind, "prepare") for kind in engines},
        pause={kind: _line(rows, kind, "pause") for kind in engines},
    )


def join(known: Constants, other: Constants) -> Constants:
    """`known`, with the engines of another run beside its own."""
    return replace(known, prepare=other.prepare | known.prepare, pause=other.pause | known.pause)


def _rest(row: dict[str, Any], construct: float) -> float:
    """What the wire and the protocol took."""
    m = row["median"]
    return float(max(1e-3, m["committed"] - m["prepare"] - m["pause"] - construct - row["rtt"]))


def _phase(rows: Sequence[dict[str, Any]], changed: float, phase: str, what: str) -> float:
    return statistics.median(
        version["phases"].get(phase, {}).get(what, 0.0)
        for row in rows
        if row["changed"] == changed
        for version in row["versions"][1:]
    )


def _line(rows: Sequence[dict[str, Any]], kind: str, what: str) -> Line:
    return Line.through([(row["median"]["changed"], row["median"][what]) for row in rows if row["engine_kind"] == kind])


def compare(measured: dict[str, Any], known: Constants) -> list[dict[str, Any]]:
    """For each row with one subscriber and an engine that is known: what was measured, what is predicted, and the error
    as a share of the first."""
    found = []
    for row in measured["rows"]:
        if row["subscribers"] == 1 and row["engine_kind"] in known.prepare:
            m = row["median"]
            case = Case(
                parameters=m["elements"], changed=m["changed"] / m["elements"], rate=row["mbit"] * 125_000,
                rtt=row["rtt"], engine=row["engine_kind"],
            )  # fmt: skip
            seconds = predict(case, known).seconds
            found.append(
                {"mbit": row["mbit"], "changed": row["changed"], "measured": m["committed"], "predicted": seconds,
                 "error": seconds / m["committed"] - 1}
            )  # fmt: skip
    return found
