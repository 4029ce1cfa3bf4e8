"""Options that several commands share, the store that they open, and how a command's coroutine is run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from dcr_daemon.cli import Stopped

if TYPE_CHECKING:
    from dcr_daemon.events import Emit
    from dcr_daemon.store.port import Store

T = TypeVar("T")
_STORE = "Store"
_OBSERVE = "Observation"

StreamArgument = Annotated[
    str, typer.Argument(metavar="STREAM", envvar="DCR_STREAM", help="file:///directory or s3://bucket/prefix.")
]
EndpointUrl = Annotated[
    str | None,
    typer.Option(
        envvar="DCR_ENDPOINT_URL", metavar="URL", help="URL of an S3-compatible service.", rich_help_panel=_STORE
    ),
]
Region = Annotated[
    str | None, typer.Option(envvar="DCR_REGION", metavar="NAME", help="AWS region.", rich_help_panel=_STORE)
]
Profile = Annotated[
    str | None, typer.Option(envvar="DCR_PROFILE", metavar="NAME", help="AWS profile.", rich_help_panel=_STORE)
]
Json = Annotated[bool, typer.Option("--json", help="Print results, errors and logs as JSON.")]
State = Annotated[
    Path | None,
    typer.Option(
        envvar="DCR_STATE",
        metavar="DIR",
        help="State directory of the daemon; default: $STATE_DIRECTORY, else $XDG_STATE_HOME/dcr.",
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(
        envvar="DCR_LISTEN",
        metavar="HOST:PORT",
        help="Serve /metrics, /livez, /readyz and /status at this address.",
        rich_help_panel=_OBSERVE,
    ),
]
Events = Annotated[
    Path | None,
    typer.Option(
        envvar="DCR_EVENTS",
        metavar="FILE",
        help="Append every event to FILE, one JSON object per line.",
        rich_help_panel=_OBSERVE,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        envvar="DCR_TRACE",
        metavar="FILE",
        help="Write when each phase ran to FILE, as a trace that Perfetto opens; `dcr trace` merges several.",
        rich_help_panel=_OBSERVE,
    ),
]
LogLevel = Annotated[
    str,
    typer.Option(
        envvar="DCR_LOG_LEVEL",
        metavar="LEVEL",
        help="Lowest level to log: debug, info, warning or error.",
        rich_help_panel=_OBSERVE,
    ),
]


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The stream's URL and how to reach its store, as given on the command line."""

    url: str
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None

    @asynccontextmanager
    async def watched(self, emit: Emit | None = None) -> AsyncIterator[Store]:
        """The store for an interactive command: what the store waits for or retries is printed on stderr."""
        from dcr_daemon.cli.progress import report_notices
        from dcr_daemon.events import discard

        async with report_notices(self.url, emit or discard) as reporting, self.open(reporting) as store:
            yield store

    @asynccontextmanager
    async def open(self, emit: Emit) -> AsyncIterator[Store]:
        from dcr_daemon.store import open_store

        store = await open_store(
            self.url, endpoint_url=self.endpoint_url, region=self.region, profile=self.profile, emit=emit
        )
        try:
            yield store
        finally:
            await store.close()


def state_root(given: Path | None) -> Path:
    """Root of the daemons' state. Raises `UsageError` for a relative path."""
    if given is not None:
        return given.absolute()
    from dcr_daemon.publish.options import default_state

    return default_state()


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine; uvloop where it is installed."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_until_stopped(main))


async def _until_stopped(main: Coroutine[Any, Any, T]) -> T:
    """SIGTERM cancels `main`, as Ctrl-C does, so that it cleans up. A daemon has its own handler (`cli.daemon`)."""
    task, stopped = asyncio.ensure_future(main), list[int]()

    def stop() -> None:
        stopped.append(signal.SIGTERM)
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    try:
        return await task
    except asyncio.CancelledError:
        if stopped:
            raise Stopped from None
        raise


def loop_factory() -> Any:
    """uvloop's loop, or None for asyncio's own (`DCR_NO_UVLOOP=1`, or not installed)."""
    if os.environ.get("DCR_NO_UVLOOP"):
        return None
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
