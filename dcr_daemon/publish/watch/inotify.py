"""inotify, told to an event loop: which files were written to, closed or moved in below a directory.

Notices make things quick, never right: a lost one costs two timed looks.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from watchdog.events import (
    FileClosedEvent,
    FileCreatedEvent,
    FileModifiedEvent,
    FileMovedEvent,
    FileSystemEvent,
)
from watchdog.observers import Observer

from dcr_daemon.errors import ResourceExhausted
from dcr_daemon.publish.watch.scanner import CheckpointScanner


class InotifyWatcher:
    """An event handler for watchdog; `changed` is set, on the loop, after each notice.

    Raises:
        ResourceExhausted: the kernel has no inotify watches left.
    """

    def __init__(self, root: Path, scanner: CheckpointScanner, changed: asyncio.Event) -> None:
        self._scanner, self._changed = scanner, changed
        self._loop = asyncio.get_running_loop()
        self._observer = Observer()
        try:
            self._observer.schedule(self, str(root), recursive=True)
            self._observer.start()
        except OSError as error:
            raise ResourceExhausted(
                f"{root} cannot be watched by inotify: {error.strerror}",
                hint="raise fs.inotify.max_user_watches and max_user_instances, or use --poll SECONDS",
            ) from error

    def dispatch(self, event: FileSystemEvent) -> None:
        """Called by watchdog, on its thread."""
        if event.event_type in ("opened", "closed_no_write") or self._loop.is_closed():
            return  # our own reading is no news
        match event:
            case FileClosedEvent():
                self._scanner.file_closed(Path(os.fsdecode(event.src_path)))
            case FileMovedEvent():
                self._scanner.file_closed(Path(os.fsdecode(event.dest_path)))
            case FileCreatedEvent():
                self._scanner.file_created(Path(os.fsdecode(event.src_path)))
            case FileModifiedEvent():
                self._scanner.file_written(Path(os.fsdecode(event.src_path)))
            case _:
                pass
        self._loop.call_soon_threadsafe(self._changed.set)

    def close(self) -> None:
        self._observer.stop()
        self._observer.join()
