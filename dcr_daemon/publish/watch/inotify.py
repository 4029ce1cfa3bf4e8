"""File events of inotify: which files below a directory were created, written to, closed or moved in.

Events make a publisher quick; it is right without them: a lost event costs two timed scans.
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
from watchdog.observers.inotify import InotifyObserver

from dcr_daemon.errors import ResourceExhausted
from dcr_daemon.publish.watch.file_stability import FileStability


class InotifyWatcher:
    """An event handler for watchdog. Reports events to `files`, and then sets `changed` on the running event loop.

    Raises:
        ResourceExhausted: the kernel has no inotify watches left.
    """

    def __init__(self, root: Path, files: FileStability, *, changed: asyncio.Event) -> None:
        self._files, self._changed = files, changed
        self._loop = asyncio.get_running_loop()
        self._observer = InotifyObserver(generate_full_events=True)  # else what is moved in counts as created
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
            return  # the publisher itself reads files
        match event:
            case FileClosedEvent():
                self._files.closed(Path(os.fsdecode(event.src_path)))
            case FileMovedEvent() if event.dest_path:
                self._files.closed(Path(os.fsdecode(event.dest_path)))
            case FileCreatedEvent(is_synthetic=True):  # it is in a directory that was moved in from elsewhere
                self._files.moved_in(Path(os.fsdecode(event.src_path)))
            case FileCreatedEvent():
                self._files.created(Path(os.fsdecode(event.src_path)))
            case FileModifiedEvent():
                self._files.written(Path(os.fsdecode(event.src_path)))
            case _:
                pass
        self._loop.call_soon_threadsafe(self._changed.set)

    def close(self) -> None:
        self._observer.stop()
        self._observer.join()


class DirectoryEvents:
    """File events below the directory that has a name now: it may have been moved away, and another one made.

    Args:
        poll: there are no events, so the directory is only looked for.

    Attributes:
        changed: is set by each event.
    """

    def __init__(self, root: Path, *, poll: bool) -> None:
        self.changed = asyncio.Event()
        self._root, self._poll = root, poll
        self._inode: tuple[int, int] | None = None  #: device and inode of the directory; None while there is none
        self._watcher: InotifyWatcher | None = None

    @property
    def found(self) -> bool:
        """Whether the directory was there when it was last looked for."""
        return self._inode is not None

    def follow(self, files: FileStability) -> None:
        """Look for the directory, and report its events to `files` from now on. Raises as `InotifyWatcher`."""
        try:
            stat = self._root.stat()
            inode = stat.st_dev, stat.st_ino
        except OSError:
            inode = None
        if inode == self._inode:
            return
        self.close()
        self._inode = inode
        if inode and not self._poll:
            self._watcher = InotifyWatcher(self._root, files, changed=self.changed)

    def close(self) -> None:
        if self._watcher:
            self._watcher.close()
            self._watcher = None
