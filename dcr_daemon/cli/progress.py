"""Progress on stderr for commands that take long; silent where stderr is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from dcr_daemon.events import Emit, Event, StoreRequest, Waiting, discard


@contextmanager
def transfer(what: str, *, quiet: bool) -> Iterator[Emit]:
    """An `Emit` that shows bytes moved and what is waited for, as long as the block lasts."""
    if quiet or not sys.stderr.isatty():
        yield discard
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def emit(event: Event) -> None:
            match event:
                case StoreRequest():
                    bar.update(task, advance=event.bytes)
                case Waiting():
                    bar.update(task, description=f"{what}: waiting for {event.what}")

        yield emit


@contextmanager
def steps(what: str, *, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A function of (item, done, of how many) that moves a bar, as long as the block lasts."""
    if quiet or not sys.stderr.isatty():
        yield lambda item, done, total: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what)
        yield lambda item, done, total: bar.update(task, description=f"{what} {item}", completed=done, total=total)
