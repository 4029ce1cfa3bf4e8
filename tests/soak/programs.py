"""What the processes of a soak run: the production entries, with small chunks, and with the longest pauses shortened.

Pauses decide nothing (must L8); with those of production a round would take minutes.
"""

from __future__ import annotations

import functools
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

#: A version of the small model has many chunks, and undo information that does not fit into memory.
SMALL: dict[str, Any] = {
    "chunk_bytes": 16_000, "spool_memory": 32_000, "upload_backlog": 64_000, "look": 0.3, "patience": 20.0,
}  # fmt: skip
LONGEST_PAUSE = 2.0  #: seconds before what failed is tried again
OBJECT_PATIENCE = 3.0  #: seconds that a missing object is waited for


def watch() -> NoReturn:
    """`dcr publish --watch`."""
    from dcr_daemon.cli.app import run
    from dcr_daemon.publish.watch import watcher

    shorten_pauses()
    watcher.SCAN_INTERVAL, watcher.STORE_PAUSE, watcher.RETRY_DELAY_LIMIT = 0.2, 0.5, LONGEST_PAUSE
    watcher.WatchOptions = functools.partial(watcher.WatchOptions, **SMALL)  # type: ignore
    sys.exit(run(sys.argv[1:]))


def subscribe() -> NoReturn:
    """`dcr subscribe`."""
    from dcr_daemon.cli.app import run

    shorten_pauses()
    sys.exit(run(sys.argv[1:]))


def shorten_pauses() -> None:
    """In this process."""
    from dcr_daemon.ledger.objects import Objects
    from dcr_daemon.subscribe.backoff import back_off

    back_off.__kwdefaults__["longest"] = LONGEST_PAUSE
    Objects.__init__.__kwdefaults__["patience"] = OBJECT_PATIENCE


def publish() -> NoReturn:
    """A training process with a `Publisher`: its steps lie in `inbox` as checkpoints, and are published in order.

    It ends with the exit code of the error that its publisher raises, as a training script would.
    """
    from dcr_daemon.errors import DcrError
    from dcr_daemon.publish import publisher

    shorten_pauses()
    publisher.PublishOptions = functools.partial(publisher.PublishOptions, **SMALL)  # type: ignore
    try:
        _train(json.loads(sys.argv[1]))
    except DcrError as error:
        print(json.dumps({"event": "failed", "kind": error.kind, "exit_code": error.exit_code, "message": str(error)}))
        sys.exit(error.exit_code)
    sys.exit(0)


def _train(options: dict[str, Any]) -> None:
    from dcr_daemon.errors import Fenced
    from dcr_daemon.events import Event, FencedOut
    from dcr_daemon.observe.fanout import EventFile
    from dcr_daemon.publish.publisher import Publisher

    inbox, events = Path(options.pop("inbox")), EventFile(Path(options.pop("events")))
    stopping, fenced = list[int](), list[FencedOut]()
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))

    def emit(event: Event) -> None:
        events(event)
        if isinstance(event, FencedOut):
            fenced.append(event)

    stream, patience = options.pop("stream"), SMALL["patience"]
    with Publisher(stream, **options, rank=0, world=1, patience=patience, emit=emit) as publisher:
        sealed = _sealed_steps(stream, options["endpoint_url"])
        while not stopping:
            if fenced:
                raise Fenced(f"{fenced[0].what} is held by {fenced[0].by}")
            for step in sorted(int(path.name) for path in inbox.iterdir() if path.name.isdigit()):
                if step not in sealed and not stopping:
                    publisher.publish(_weights(inbox / str(step)), step=step).wait_sealed()
                    sealed.add(step)
            time.sleep(0.02)


def _sealed_steps(stream: str, endpoint_url: str) -> set[int | None]:
    """What a trainer that starts again asks the stream: which of its steps are versions."""
    import asyncio

    from dcr_daemon.ledger.ledger import Ledger
    from dcr_daemon.store import open_store

    async def read() -> set[int | None]:
        store = await open_store(stream, endpoint_url=endpoint_url)
        try:
            ledger = Ledger(store)
            await ledger.read()
            return {seal.step for seal in await ledger.history.between(1)}
        finally:
            await store.close()

    return asyncio.run(read())


def _weights(checkpoint: Path) -> dict[str, Any]:
    import torch

    from dcr_daemon.checkpoint.directory import Checkpoint
    from dcr_daemon.projection.values import torch_dtype

    with Checkpoint(checkpoint) as found:
        return {
            spec.name: torch.frombuffer(bytearray(found.bits(spec.name).tobytes()), dtype=torch_dtype(spec.dtype))
            .reshape(spec.shape) if spec.elements else torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
            for spec in found.layout
        }  # fmt: skip
