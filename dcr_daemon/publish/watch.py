"""`dcr publish --watch`: checkpoints that any framework writes below a directory become versions (FORMATS 4)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dcr_daemon.events import Emit
from dcr_daemon.publish.options import PublishOptions
from dcr_daemon.store.port import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions(PublishOptions):
    """A watching publisher's choices, beside those of every publisher.

    `watch`: the directory below which checkpoints appear. `marker`: name of a file that completes a checkpoint
    (`STABLE`). `poll`: seconds between looks for file systems without inotify, None to use inotify.
    `once`: publish what is complete at the start, oldest first, and return. `newest`: of several complete
    checkpoints publish only the newest.
    """

    watch: Path
    marker: str | None = None
    poll: float | None = None
    once: bool = False
    newest: bool = False


async def run_watch(options: WatchOptions, store: Store, emit: Emit) -> None:
    """Publish every checkpoint that appears below `options.watch` until cancelled (or once).

    Raises:
        Fenced: another publisher owns the stream; do not restart.
        Incompatible: base, layout or store do not fit; the names are listed.
        NotFound: no stream there and `create` not given, or no such directory.
        Misuse: options that do not go together.
        Exhausted: the state directory's disk is full.
    """
    raise NotImplementedError
