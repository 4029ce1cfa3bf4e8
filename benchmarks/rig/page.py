"""Writes docs/BENCHMARKS.md and its plots from the runs in docs/benchmarks/, which benchmarks printed with --json.

    python benchmarks/refit.py --json > docs/benchmarks/refit.json
    python benchmarks/refit.py --engine vllm --subscribers 1 --no-dense --json > docs/benchmarks/refit-vllm.json
    python benchmarks/rig/page.py

Nothing on the page is written by hand, and every figure
stands beside the machine that it was measured on, and its load.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.rig.machine import describe  # noqa: E402
from benchmarks.rig.plot import Bar, bars  # noqa: E402
from dcr_daemon.cli.plan.prediction import compare, shipped  # noqa: E402

HEAD = """\
# Benchmarks

Written by `python benchmarks/rig/page.py` from the runs in `docs/benchmarks/`; `make bench` runs every benchmark.
Compare figures of one run with each other: another machine gives others, and so does the same one with other work
beside it. A load above the number of cores means that every figure in seconds is too long.
"""
REFIT = """\
## A refit over a slow link, {engine}

`benchmarks/refit.py`, a model of {gb:g} GB, one real SeaweedFS, a link of its own for each process, options at their
defaults. Seconds after the call of `publish()`, and as multiples of the bound: the bytes at the link's rate and two
round trips. `engine` is the engine's own prepare and pause; `wire` is committed without it, as a multiple of the bound.
Memory: of the publisher above what it had before, of a subscriber in all. Medians over {versions} versions.

{machine}. Load at the end: {after:g}.
"""
COLUMNS = (
    "link, round trip", "subscribers, engine", "changed", "MB", "bound", "sealed", "staged", "committed", "engine",
    "wire", "publisher", "subscriber",
)  # fmt: skip
WAITS = ("open", "construct", "upload", "seal", "see", "download", "stage", "prepare", "apply", "waiting")


def table(*rows: tuple[str, ...]) -> list[str]:
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return [head, "|" + "---|" * len(rows[0]), *body, ""]


ENGINES = {"dir": "directory engine", "vllm": "vLLM"}


def refit(name: str, run: dict[str, Any], plots: dict[str, str]) -> list[str]:
    lines = [
        REFIT.format(
            engine=ENGINES[run["rows"][0]["engine_kind"]],
            gb=run["model_gb"],
            versions=len(run["rows"][0]["versions"]) - 1,
            machine=describe(run["machine"]),
            after=run["load_after"][0],
        )
    ]
    rows: list[tuple[str, ...]] = [COLUMNS]
    rows += map(_row, run["rows"])
    plots[f"{name}-phases"] = bars(
        "Where the time of a refit goes: seconds in which nothing else runs", "s",
        [Bar(_name(row), _alone(row), row["median"]["bound"]) for row in run["rows"]], mark="bytes and two round trips",
    )  # fmt: skip
    lines += [*table(*rows), f"![Phases of a refit](benchmarks/{name}-phases.svg)", ""]
    return lines + _dense(name, run, plots) + _prediction(run)


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    m = row["median"]
    return (
        f"{row['mbit']:g} Mbit/s, {row['rtt'] * 1000:g} ms",
        f"{row['subscribers']}, {row['engine_kind']}",
        f"{row['changed']:.0%}",
        f"{m['bytes'] / 1e6:.2f}",
        f"{m['bound']:.2f} s",
        *(f"{m[name]:.2f} s, {m[f'{name}_ratio']:.1f} ×" for name in ("sealed", "staged", "committed")),
        f"{m['engine']:.2f} s",
        f"{m['wire_ratio']:.1f} ×",
        f"+{m['publisher_peak_mb'] - m['publisher_before_mb']:.0f} MB",
        f"{m['subscriber_peak_mb']:.0f} MB",
    )


def _name(row: dict[str, Any]) -> str:
    return f"{row['mbit']:g} Mbit/s, {row['subscribers']} sub, {row['changed']:.0%}"


def _alone(row: dict[str, Any]) -> dict[str, float]:
    """Of the version whose commit is the median."""
    versions = sorted(row["versions"][1:], key=lambda one: one["committed"])
    phases = versions[len(versions) // 2]["phases"]
    return {name: phases[name]["alone"] for name in WAITS if name in phases}


def _dense(name: str, run: dict[str, Any], plots: dict[str, str]) -> list[str]:
    if not run["dense"]:
        return []
    found: list[tuple[str, ...]] = [
        ("link", "dense, up and down", "memory up, down", "changed", "subscribers", "dense takes")
    ]
    shown = []
    for way in run["dense"]:
        shown.append(Bar(f"dense, {way['mbit']:g} Mbit/s", {"seconds": way["seconds"]}))
        for row in run["rows"]:
            if row["mbit"] == way["mbit"]:
                seconds = row["median"]["committed"]
                shown.append(Bar(_name(row), {"seconds": seconds}))
                memory = f"{way['up']['peak_mb']:.0f} MB, {way['down']['peak_mb']:.0f} MB"
                found.append(
                    (f"{way['mbit']:g} Mbit/s", f"{way['seconds']:.1f} s", memory, f"{row['changed']:.0%}",
                     f"{row['subscribers']}", f"{way['seconds'] / seconds:.1f} × as long")
                )  # fmt: skip
    plots[f"{name}-dense"] = bars("The whole model over the link, and a refit", "s", shown)
    text = (
        "The dense way in the same run: boto3 uploads the model in parts of 16 MiB, ten at a time, then downloads it."
    )
    return [text, "", *table(*found), f"![Dense and refit](benchmarks/{name}-dense.svg)", ""]


def _prediction(run: dict[str, Any]) -> list[str]:
    known = shipped()
    rows = [("link", "changed", "measured", "predicted", "error")]
    rows += [
        (f"{one['mbit']:g} Mbit/s", f"{one['changed']:.0%}", f"{one['measured']:.2f} s", f"{one['predicted']:.2f} s",
         f"{one['error']:+.0%}")
        for one in compare(run, known)
    ]  # fmt: skip
    machine = known.machine
    text = (
        f"What `dcr plan --link` predicts of this run, with constants of {machine['at']}, load {machine['load'][0]:g}"
    )
    text += ", which were fitted to this very run:" if machine == run["machine"] else ":"
    return [text, "", *table(*rows)]


#: What makes a section of the run `docs/benchmarks/NAME.json`, by NAME.
SECTIONS: dict[str, Callable[[str, dict[str, Any], dict[str, str]], list[str]]] = {"refit": refit, "refit-vllm": refit}


def pages(runs: Path) -> dict[str, str]:
    """The page and its plots, by path below docs/."""
    lines, plots = [HEAD], dict[str, str]()
    for name, section in SECTIONS.items():
        path = runs / f"{name}.json"
        if path.exists():
            lines += section(name, json.loads(path.read_text()), plots)
    found = {f"benchmarks/{name}.svg": svg for name, svg in plots.items()}
    return {"BENCHMARKS.md": "\n".join(lines), **found}


def main() -> None:
    for name, text in pages(ROOT / "docs" / "benchmarks").items():
        (ROOT / "docs" / name).write_text(text)


if __name__ == "__main__":
    main()
