"""Runs a daemon's coroutine with logs, metrics, probes, systemd notifications and signal handling.

SIGTERM and SIGINT cancel the coroutine and wait until it has ended: it finishes or undoes what is under way (a swap, an
upload). The exit code is 0 after SIGTERM and 130 after SIGINT. SIGHUP ends nothing, unless it comes from the terminal
that closes: the file of `--events` is opened again, for a rotation of logs.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast, get_args

from dcr_daemon import runtime
from dcr_daemon.cli.options import run_async
from dcr_daemon.errors import UsageError
from dcr_daemon.events import Emit, Level
from dcr_daemon.observe import Observer, logs
from dcr_daemon.observe.fanout import EventFile
from dcr_daemon.observe.freshness import LedgerFreshness, limit_for
from dcr_daemon.observe.health import Health, Policy, Role
from dcr_daemon.observe.notify import notify, watchdog_interval
from dcr_daemon.tracing.recorder import TraceRecorder

_LONGEST_STATUS = 15.0  #: seconds after which systemd's STATUS is sent again


@dataclass(frozen=True, slots=True)
class Observation:
    """How a daemon reports: its role, and the options of `cli.options` about logs, events and probes."""

    role: Role
    listen: str | None = None
    events: Path | None = None
    log_level: str = "info"
    json: bool = False
    policy: Policy | None = None
    trace: Path | None = None
    longest_poll: float = 0.0  #: seconds between two looks at the ledger, at most
    disks: Mapping[str, Path] = field(default_factory=dict)  #: directories of which the free space is a metric


def run_daemon(watch: Observation, main: Callable[[Emit], Awaitable[None]], **context: str) -> None:
    """Run `main(emit)` until it returns, raises, or a signal asks it to stop. `context` goes on every log line."""
    if watch.log_level not in get_args(Level):
        raise UsageError(f"there is no log level {watch.log_level!r}", hint=", ".join(get_args(Level)))
    logs.configure(cast(Level, watch.log_level), json=watch.json or None)
    logs.bind(**context)
    interrupted = run_async(_supervise(watch, main, context))
    if interrupted:
        raise KeyboardInterrupt


async def _supervise(watch: Observation, main: Callable[[Emit], Awaitable[None]], context: Mapping[str, str]) -> bool:
    """True if SIGINT ended it."""
    received: list[signal.Signals] = []
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(_watched(watch, main, context))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, number, received, task)
    try:
        await task
    except asyncio.CancelledError:
        if not received:
            raise
    finally:
        notify("STOPPING=1")
    return signal.SIGINT in received


async def _watched(watch: Observation, main: Callable[[Emit], Awaitable[None]], context: Mapping[str, str]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        await main(await _observer(watch, stack, context))


def _stop(number: signal.Signals, received: list[signal.Signals], task: asyncio.Future[None]) -> None:
    received.append(number)
    notify("STOPPING=1", f"STATUS=stopping on {number.name}")
    logs.logger().info("stopping", signal=number.name)
    task.cancel()


def _reload(file: EventFile | None) -> None:
    notify("RELOADING=1", f"MONOTONIC_USEC={int(runtime.monotonic() * 1e6)}")
    try:
        if file:
            file.reopen()
        logs.logger().info("reloaded", signal="SIGHUP", events=bool(file))
    except UsageError as error:
        logs.logger().warning("reload_failed", reason=error.message)
    notify("READY=1")


async def _observer(watch: Observation, stack: contextlib.AsyncExitStack, context: Mapping[str, str]) -> Observer:
    from dcr_daemon.observe.metrics import Metrics
    from dcr_daemon.observe.server import ProbeServer

    health = Health(watch.role, watch.policy)
    health.on_change(lambda: _tell_systemd(health))
    metrics = Metrics(health, info=context, disks=watch.disks)
    listeners: list[Emit] = [metrics, health, logs.LogEvents()]
    file = EventFile(watch.events) if watch.events else None
    if file:
        stack.callback(file.close)
        listeners.append(file)
    if not sys.stderr.isatty():
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload, file)
    if watch.trace:
        name = context.get("replica", "rank 0")
        listeners.append(TraceRecorder(watch.trace, role=watch.role, name=name, stream=context["stream"]))
    if watch.listen:
        server = ProbeServer(watch.listen, health, metrics=metrics, info=context)
        await server.start()
        stack.push_async_callback(server.close)
        logs.logger().info("listening", address=watch.listen, port=server.port)
    observer = Observer(listeners)
    freshness = LedgerFreshness(watch.role, observer, limit=limit_for(watch.longest_poll))
    observer.add(freshness)
    for task in (_signs_of_life(health), freshness.run()):
        stack.callback(asyncio.ensure_future(task).cancel)
    # Up from here on: readiness in systemd's sense is that the process works, not that a version is served; an
    # engine that starts an hour later must not make the unit fail.
    notify("READY=1", f"STATUS={health.status}")
    return observer


def _tell_systemd(health: Health) -> None:
    notify(f"STATUS={health.status}")


async def _signs_of_life(health: Health) -> None:
    """Feed systemd's watchdog from the loop itself, so that a stuck loop is seen."""
    interval = watchdog_interval()
    while True:
        if interval:
            notify("WATCHDOG=1")
        else:
            _tell_systemd(health)
        await runtime.sleep(interval or _LONGEST_STATUS)
