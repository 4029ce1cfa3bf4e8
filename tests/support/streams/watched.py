"""A watching publisher over a `PublishWorld`, in this process, and the checkpoints that it is to find."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from dcr_daemon.checkpoint.safetensors import pack_safetensors
from dcr_daemon.events import CheckpointSkipped, Sealed
from dcr_daemon.publish.watch.once import OnceReport
from dcr_daemon.publish.watch.watcher import WatchOptions, run_watch
from support.processes.background import going_on
from support.streams.publish_world import PublishWorld

DEADLINE = 60.0  #: seconds


def options(world: PublishWorld, **more: Any) -> WatchOptions:
    """Of a publisher that watches `out` below the world's root."""
    (world.root / "out").mkdir(exist_ok=True)
    defaults: dict[str, Any] = {
        "state": world.state, "base": world.base, "create": True,
        "workers": 2, "watch": world.root / "out", "poll": 0.05,
    }  # fmt: skip
    return WatchOptions(**defaults | more)


def once(world: PublishWorld, **more: Any) -> OnceReport:
    """`dcr publish --once`: what it prints, or the error of its exit code."""
    report = asyncio.run(run_watch(options(world, once=True, **more), world.store(), emit=world.events))
    report.check()
    return report


def watching(world: PublishWorld, **more: Any) -> AbstractAsyncContextManager[None]:
    """It runs as long as this context."""
    return going_on(run_watch(options(world, **more), world.store(), emit=world.events))


async def until(condition: Callable[[], object]) -> None:
    for _ in range(int(DEADLINE / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not happen")


def sealed(world: PublishWorld) -> list[int | None]:
    """Steps of the versions, in their order."""
    return [event.step for event in world.events.of(Sealed)]


def shards(world: PublishWorld, weights: Any, out: Path, count: int = 3) -> list[tuple[Path, bytes]]:
    """The files of a sharded checkpoint, as bytes still to be written."""
    names = [spec.name for spec in world.layout]
    files = []
    for n in range(count):
        items = [(spec, weights[spec.name]) for spec in world.layout if spec.name in names[n::count]]
        files.append((out / f"model-{n + 1:05d}-of-{count:05d}.safetensors", bytes(pack_safetensors(items))))
    return files


def put(path: Path, body: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)


def skipped(world: PublishWorld) -> list[tuple[str, str]]:
    """Path and cause of what was passed by."""
    return [(event.path, event.cause) for event in world.events.of(CheckpointSkipped)]
