"""Progress on stderr for commands that take long; silent where stderr is no terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from dcr_daemon import runtime
from dcr_daemon.events import Emit, Event, Notice, StoreRequest, discard, kind_of
from dcr_daemon.observe.streams import put

SILENCE = 3.0  #: seconds without a first answer that are worth a word


@asynccontextmanager
async def waits(url: str, emit: Emit = discard) -> AsyncIterator[Emit]:
    """An `Emit` that passes everything on, and says on stderr what a command waits for: within seconds, once each.

    A store that swallows requests gives no sign of life for long; so silence is told of as well.
    """
    said, answers = set[str](), [0]

    def say(text: str) -> None:
        if text not in said:
            said.add(text)
            with suppress(OSError):
                put(sys.stderr, f"dcr: {text}\n")

    def told(event: Event) -> None:
        match event:
            case StoreRequest():
                answers[0] += 1
            case Notice():
                say(f"{kind_of(type(event))}: {event.what}")
        emit(event)

    async def listen() -> None:
        await runtime.sleep(SILENCE)
        if not answers[0]:
            say(f"waiting: {url} has not answered for {SILENCE:.0f} s")

    listening = asyncio.ensure_future(listen())
    try:
        yield told
    finally:
        listening.cancel()


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
                case Notice():
                    bar.update(task, description=f"{what}: {kind_of(type(event))}: {event.what}")

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
