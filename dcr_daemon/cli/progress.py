"""Progress and notices on stderr for commands that take long. Bars are shown only where stderr is a terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from dcr_daemon import runtime
from dcr_daemon.events import Emit, Event, Notice, StoreRequest, discard, kind_of
from dcr_daemon.observe.streams import put
from dcr_daemon.wording import LINE_BYTES, cut, printable

SILENCE = 3.0  #: seconds without a first answer of the store before a line says so


class _Description(TextColumn):
    """What is being done, in text that may hold names from outside."""

    def __init__(self) -> None:
        super().__init__("{task.description}", markup=False)

    def render(self, task: Task) -> Text:
        return Text(printable(task.description), style=self.style)


@asynccontextmanager
async def report_notices(url: str, emit: Emit = discard) -> AsyncIterator[Emit]:
    """An `Emit` that passes every event on to `emit`, and prints each different notice once on stderr.

    A store that swallows requests causes no event for minutes; so a first answer that is late is reported as well.
    """
    printed, answers = set[str](), [0]

    def report(text: str) -> None:
        if text not in printed:
            printed.add(text)
            with suppress(OSError):
                put(sys.stderr, f"dcr: {cut(printable(text), LINE_BYTES)}\n")

    def pass_on(event: Event) -> None:
        match event:
            case StoreRequest():
                answers[0] += 1
            case Notice():
                report(f"{kind_of(type(event))}: {event.what}")
        emit(event)

    async def report_silence() -> None:
        await runtime.sleep(SILENCE)
        if not answers[0]:
            report(f"waiting: {url} has not answered for {SILENCE:.0f} s")

    silence = asyncio.ensure_future(report_silence())
    try:
        yield pass_on
    finally:
        silence.cancel()


@contextmanager
def transfer(what: str, *, quiet: bool) -> Iterator[Emit]:
    """An `Emit` that shows the bytes moved and the last notice, as long as the block lasts."""
    if quiet or not sys.stderr.isatty():
        yield discard
        return
    columns = (SpinnerColumn(), _Description(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def emit(event: Event) -> None:
            match event:
                case StoreRequest():
                    bar.update(task, advance=event.bytes)
                case Notice():
                    bar.update(task, description=f"{what}: {kind_of(type(event))}: {event.what}")

        yield emit


@contextmanager
def progress_bar(what: str, *, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A function of (item, number done, total) that moves a progress bar, as long as the block lasts."""
    if quiet or not sys.stderr.isatty():
        yield lambda item, done, total: None
        return
    columns = (SpinnerColumn(), _Description(), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what)
        yield lambda item, done, total: bar.update(task, description=f"{what} {item}", completed=done, total=total)
