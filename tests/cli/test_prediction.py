"""The prediction of a refit: constants are fitted to a run, predict that run, and are carried to other sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dcr_daemon.cli.app import run
from dcr_daemon.cli.plan.prediction import Case, Constants, Line, compare, fit, interpolate, join, predict, shipped

RTT, ELEMENTS = 0.05, 540_000_000
LEAD = 1e7  #: bytes that are encoded before anything is on the wire
BYTES = {0.01: 1.25, 0.03: 0.94}  #: per change
FIELDS = {
    "model", "parameters", "dense_bytes", "changed", "bytes", "replicas", "fleet_bytes", "seconds", "lower_bound",
    "dense_seconds", "phases", "measured_on", "benchmark",
}  # fmt: skip


def row(mbit: float, changed: float, *, subscribers: int = 1) -> dict[str, Any]:
    """What a machine shows on which every phase costs what it is said to cost here, exactly."""
    changes = int(ELEMENTS * changed)
    size = changes * BYTES[changed]
    construct = ELEMENTS * 2 * (2e-10 + 3e-9 * changed)
    prepare, pause = 0.1 + 2e-8 * changes, 0.02 + 1e-8 * changes
    alone = construct * min(1, LEAD / size)
    committed = RTT + alone + 1.2 * size / (mbit * 125_000) + 4 * RTT + prepare + pause
    median = {"bytes": size, "changed": changes, "elements": ELEMENTS, "prepare": prepare, "pause": pause,
              "committed": committed * subscribers}  # fmt: skip
    version = {"phases": {"construct": {"seconds": construct, "alone": alone}}}
    return {"mbit": mbit, "rtt": RTT, "subscribers": subscribers, "changed": changed, "engine_kind": "dir",
            "versions": [version, version], "median": median}  # fmt: skip


@pytest.fixture
def measured() -> dict[str, Any]:
    rows = [row(mbit, changed) for mbit in (200, 1000) for changed in BYTES]
    return {"machine": {"cores": 2, "load": [0.1, 0.2]}, "rows": [*rows, row(200, 0.01, subscribers=4)]}


def test_constants_are_those_of_the_machine_and_predict_its_run(measured: dict[str, Any]) -> None:
    known = fit(measured)
    assert (known.wire, known.protocol) == pytest.approx((1.2, 4.0))
    assert known.prepare["dir"].per_unit == pytest.approx(2e-8)
    found = compare(measured, known)
    assert len(found) == 4
    assert all(abs(one["error"]) < 1e-6 for one in found)


def test_a_slower_machine_is_seen_as_an_error(measured: dict[str, Any]) -> None:
    known = fit(measured)
    for one in measured["rows"]:
        one["median"]["committed"] *= 2
    assert all(abs(one["error"] + 0.5) < 1e-6 for one in compare(measured, known))


def test_constants_survive_their_file(measured: dict[str, Any]) -> None:
    known = fit(measured)
    again = Constants.from_json(json.loads(json.dumps(known.as_json())))
    case = Case(parameters=1e12, changed=0.02, rate=1e9, rtt=RTT, hosts=64, replica_hosts=16)
    assert predict(case, again) == predict(case, known)


def test_a_run_with_another_engine_adds_that_engine(measured: dict[str, Any]) -> None:
    known = fit(measured)
    for one in measured["rows"]:
        one["engine_kind"] = "vllm"
        one["median"]["pause"] /= 10
    assert compare(measured, known) == []
    both = join(known, fit(measured))
    assert (both.wire, both.pause["dir"]) == (known.wire, known.pause["dir"])
    assert both.pause["vllm"].per_unit == pytest.approx(1e-9)


def test_hosts_divide_the_work_and_not_the_wire(measured: dict[str, Any]) -> None:
    known = fit(measured)
    one, many = (
        predict(Case(parameters=1e12, changed=0.01, rate=1e9, rtt=RTT, hosts=n, replica_hosts=n), known)
        for n in (1, 64)
    )
    wire = one.phases["wire"]
    assert one.phases["construct"] + wire == pytest.approx(2e12 * 2.3e-10, rel=0.05)  # the wire hides behind it
    assert many.phases["construct"] < 1  # all but the first chunks hides behind the wire
    assert many.phases["wire"] == one.phases["wire"]
    assert many.phases["prepare"] < one.phases["prepare"]
    assert one.lower_bound == pytest.approx(12.5 + 2 * RTT)
    assert one.dense_seconds == pytest.approx(2000)


def test_cores_are_threads_up_to_a_limit(measured: dict[str, Any]) -> None:
    known = fit(measured)
    slow, as_measured, most, more = (
        predict(Case(parameters=1e12, changed=0.01, rate=1e12, rtt=RTT, cores=n), known).phases["construct"]
        for n in (1, 2, 16, 64)
    )
    assert (slow, most) == pytest.approx((2 * as_measured, as_measured / 8), rel=0.01)
    assert more == most


def test_shares_between_the_measured_ones() -> None:
    points = [(0.01, 1.0), (0.04, 2.0)]
    assert [interpolate(points, share) for share in (0.001, 0.01, 0.02, 0.04, 0.5)] == pytest.approx([1, 1, 1.5, 2, 2])


def test_a_line_has_no_negative_part() -> None:
    assert Line.through([(1.0, 1.0), (2.0, 3.0)]).fixed == 0
    assert Line.through([(1.0, 3.0), (2.0, 1.0)]).per_unit == 0
    assert Line.through([]).at(5) == 0


def test_the_shipped_constants_name_their_machine() -> None:
    known = shipped()
    assert known.benchmark.startswith("benchmarks/")
    assert {"processor", "cores", "load", "at"} <= set(known.machine)
    assert known.wire >= 0


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert run(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_the_command_predicts_from_a_size_or_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--link", "3.05Gbps", "--changed", "1%", "--replicas", "64", "--hosts", "64", "--replica-hosts", "16"]
    plan = json.loads(said(capsys, "1T", *options, "--json"))
    assert set(plan) == FIELDS
    assert plan["dense_seconds"] / 60 == pytest.approx(87.4, abs=0.1)
    assert plan["fleet_bytes"] == pytest.approx(64 * plan["bytes"])
    assert "lower bound" in said(capsys, "1T", *options)
    named = json.loads(said(capsys, "qwen3-30b-a3b", "--link", "10Gbps", "--json"))
    assert 29e9 < named["parameters"] < 32e9


@pytest.mark.parametrize(
    ("more", "code"), [(["--engine", "none"], 2), (["--changed", "200%"], 2), (["--constants", "none"], 11)]
)
def test_errors(more: list[str], code: int) -> None:
    assert run(["plan", "1T", "--link", "10Gbps", *more]) == code


@pytest.mark.parametrize(
    "wrong",
    [
        {"machine": None}, {"machine": {"load": [1]}}, {"machine": {"cores": 0}}, {"machine": {"cores": 2, "load": 1}},
        {"scan": []}, {"scan": [["a", 1]]}, {"scan": [[0, 1], [0.5, 2]]}, {"wire": "x"}, {"wire": float("nan")},
        {"prepare": {"dir": {"fixed": "x", "per_unit": 1}}}, {"pause": {}},
    ],
)  # fmt: skip
def test_a_file_that_holds_no_constants(wrong: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps(shipped().as_json() | wrong))
    assert run(["plan", "1T", "--link", "10Gbps", "--constants", str(tmp_path / "c.json")]) == 2
    (tmp_path / "c.json").write_text("{}")
    assert run(["plan", "1T", "--link", "10Gbps", "--constants", str(tmp_path / "c.json")]) == 2


def test_nothing_to_move_and_no_round_trip(capsys: pytest.CaptureFixture[str]) -> None:
    assert "× its" not in said(capsys, "7B", "--link", "1Gbps", "--rtt", "0", "--changed", "0")
