"""`dcr demo`: options, the live table and the verdict. `run` does the work; `dcr_daemon.cli.demo` imports this."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from dcr_daemon import runtime
from dcr_daemon.cli.options import Json
from dcr_daemon.cli.output import print_json, size
from dcr_daemon.errors import DcrError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dcr_demo.run import Finished, Row, Stage

_COLUMNS = ("version", "step", "reward", "changed", "payload", "dense", "of dense", "publish→serving", "pause")
_WIDTHS = (7, 4, 6, 8, 9, 9, 8, 15, 9)
_PLAIN: dict[str, Any] = {"soft_wrap": True, "highlight": False}


def command(
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Optimizer steps to train and publish.")] = 4,
    tiny: Annotated[bool, typer.Option("--tiny", help="Use a small generated Qwen3 instead of SmolLM2-135M.")] = False,
    s3: Annotated[bool, typer.Option("--s3", help="Use a local SeaweedFS (S3) instead of a file:// bucket.")] = False,
    work: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory for all files, kept afterwards; default: .demo/run-…")
    ] = None,
    json: Json = False,
) -> None:
    """Train a small real model, serve it with vLLM on CPU, and refit it while it answers requests.

    Every part is a real process: vLLM with the plugins, dcr publish, dcr subscribe, and clients that keep requests in
    flight. It ends with a proof: every parameter and buffer of the served model equals a fresh load of `dcr
    materialize`, bit for bit, and the completions are equal. Exit code 0 only if that holds.
    """
    from dcr_demo.run import DemoOptions, run_demo

    options = DemoOptions(work=work or Path(".demo") / f"run-{runtime.nonce(3)}", steps=steps, tiny=tiny, s3=s3)
    signal.signal(signal.SIGTERM, _interrupt)
    with contextlib.closing(run_demo(options)) as story:
        finished = _draw(story, Console(stderr=json))
    if json:
        print_json(finished.as_json())
    if not finished.holds:
        raise DcrError("the proof does not hold", hint=f"see the logs in {finished.work}")


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM ends the demo as Ctrl-C does: every `finally` runs."""
    raise KeyboardInterrupt


def _draw(story: Iterator[Stage | Row | Finished], console: Console) -> Finished:
    """Draw the stages and rows as they come; returns the result."""
    from dcr_demo.run import Finished, Row

    with console.status("starting") as status:
        for event in story:
            match event:
                case Row():
                    if event.version == 1:
                        console.print(_line(_COLUMNS), style="bold", **_PLAIN)
                    console.print(_line(_cells(event)), **_PLAIN)
                    status.update(f"training step {event.step + 1}")
                case Finished():
                    _conclude(event, console)
                    return event
                case _:
                    if not console.is_terminal:
                        console.print(event.what)
                    status.update(event.what)
    raise DcrError("the demo ended without a result")


def _line(cells: Sequence[str]) -> str:
    """One line of the live table: plain text, so that it reads the same in a terminal and in a log."""
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))


def _cells(row: Row) -> tuple[str, ...]:
    return (
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


def _conclude(end: Finished, console: Console) -> None:
    proof = end.proof
    lines = [
        f"\nrequests kept in flight: {end.requests} ended, {end.failed} failed",
        "the served model against a fresh vLLM that loaded the materialised checkpoint:",
        f"  {proof.tensors} parameters and buffers on {proof.ranks} rank(s): {len(proof.differing)} differ",
        f"  {proof.completions} completions with log-probabilities: {len(proof.differing_completions)} differ",
        *(f"  differs: {name}" for name in [*proof.differing[:10], *proof.differing_completions]),
    ]
    for line in lines:
        console.print(line, **_PLAIN)
    verdict, style = ("PROVED: bit for bit", "bold green") if end.holds else ("NOT PROVED", "bold red")
    console.print(verdict, style=style)
    console.print(f"logs, bucket and checkpoints are in {end.work}", **_PLAIN)
