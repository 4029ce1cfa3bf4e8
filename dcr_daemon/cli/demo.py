"""`dcr demo`: the main job, live, on this machine."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from dcr_daemon import runtime
from dcr_daemon.cli.options import Json
from dcr_daemon.cli.output import print_json, size
from dcr_daemon.errors import DcrError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcr_daemon.demo.run import Finished, Row, Stage


def command(
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Optimizer steps to train and publish.")] = 4,
    tiny: Annotated[bool, typer.Option("--tiny", help="A generated Qwen3 instead of SmolLM2-135M.")] = False,
    s3: Annotated[bool, typer.Option("--s3", help="Through a local SeaweedFS instead of a file:// bucket.")] = False,
    work: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep everything there; default: .demo/run-…")
    ] = None,
    json: Json = False,
) -> None:
    """Train a small real model, serve it with vLLM on CPU, and refit it while it answers requests.

    Every part is a real process: vLLM with the plugins, dcr publish, dcr subscribe, and clients that keep requests in
    flight. It ends with a proof: every parameter and buffer of the served model equals a fresh load of `dcr
    materialize`, bit for bit, and the completions are equal. Exit code 0 only if that holds.
    """
    from dcr_daemon.demo.run import DemoOptions, run_demo

    options = DemoOptions(work=work or Path(".demo") / f"run-{runtime.nonce(3)}", steps=steps, tiny=tiny, s3=s3)
    signal.signal(signal.SIGTERM, _interrupt)
    with contextlib.closing(run_demo(options)) as story:
        finished = _tell(story, Console(stderr=json))
    if json:
        print_json(finished.as_json())
    if not finished.holds:
        raise DcrError("the proof does not hold", hint=f"see the logs in {finished.work}")


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM takes the same way out as Ctrl-C: through every `finally`."""
    raise KeyboardInterrupt


def _tell(story: Iterator[Stage | Row | Finished], console: Console) -> Finished:
    """Draw the story as it happens; returns its end."""
    from dcr_daemon.demo.run import Finished, Row

    rows: list[Row] = []
    with console.status("starting") as status:
        for event in story:
            match event:
                case Row():
                    rows.append(event)
                    console.print(_table(rows[-1:], header=len(rows) == 1), end="")
                    status.update(f"training step {event.step + 1}")
                case Finished():
                    _conclude(event, console)
                    return event
                case _:
                    if not console.is_terminal:
                        console.print(event.what)
                    status.update(event.what)
    raise DcrError("the demo ended without a result")


def _table(rows: list[Row], *, header: bool) -> Table:
    """A slice of the live table; columns keep their width from one slice to the next."""
    table = Table(box=None, show_header=header, header_style="bold", pad_edge=False)
    columns = ("version", "step", "reward", "changed", "payload", "dense", "payload/dense", "to serving", "pause")
    for name in columns:
        table.add_column(name, justify="right", width=max(10, len(name)), no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.version),
            str(row.step),
            f"{row.reward:.3f}",
            f"{row.changed:.3%}",
            size(row.payload),
            size(row.dense),
            f"{row.payload / row.dense:.3%}",
            f"{row.publish_to_serving:.2f} s",
            f"{row.pause * 1000:.1f} ms",
        )
    return table


def _conclude(end: Finished, console: Console) -> None:
    proof = end.proof
    console.print(f"\nrequests kept in flight: {end.requests} ended, {end.failed} failed")
    console.print(
        f"served model against a fresh load of the materialised checkpoint: {proof.tensors} parameters and buffers "
        f"on {proof.ranks} rank(s), {len(proof.differing)} differ; {proof.completions} completions with "
        f"log-probabilities, {len(proof.differing_completions)} differ"
    )
    for name in [*proof.differing[:10], *proof.differing_completions]:
        console.print(f"  differs: {name}")
    console.print("PROVED: bit for bit" if end.holds else "NOT PROVED", style="bold green" if end.holds else "bold red")
    console.print(f"look at it: dcr log {end.stream}    everything is in {end.work}")
    sys.stdout.flush()
