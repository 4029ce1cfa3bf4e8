"""Which files are completely written, as far as file events, repeated scans and the kernel tell.

A file is stable when its writer was seen closing it (or it was moved in), or when `STABLE_SCANS` timed scans in a row
found it unchanged and nobody was seen writing to it; and when the kernel says that nobody has it open for writing.
One that came in a directory that was moved in from elsewhere needs no scans, only the kernel's word.
Where the kernel cannot tell, one that nobody was seen closing must be unchanged for `STABLE_SCANS_UNCLOSED` scans.
Events come from any thread; everything else is for the scanner's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from pathlib import Path

from dcr_daemon.publish.watch.file_identity import FileIdentity, identify, only_attributes_changed
from dcr_daemon.publish.watch.write_state import Writers, WriteState

STABLE_SCANS = 2  #: timed scans that must find a file unchanged, if nobody was seen writing to it
STABLE_SCANS_UNCLOSED = 30  #: the same for one that was written to and not closed: a stalled writer, or a lost event
OPEN = "somebody has it open for writing"
WRITTEN = "still being written"


class FileStability:
    """Remembers file events and what earlier scans found, by path.

    Args:
        kernel: is asked who writes to a file.
        unknown_scans: timed scans that must find a file unchanged of which the kernel cannot tell who writes to it.

    Attributes:
        unknown: the first file of which the kernel could not tell.
    """

    def __init__(self, kernel: WriteState, *, unknown_scans: int = STABLE_SCANS_UNCLOSED) -> None:
        self.unknown: Path | None = None
        self._kernel, self._unknown_scans = kernel, unknown_scans
        self._events: deque[tuple[Path, str]] = deque()
        self._closed: dict[Path, FileIdentity] = {}
        self._unclosed: dict[Path, None] = {}
        self._unchanged: dict[Path, tuple[FileIdentity, int]] = {}  # and for how many timed scans
        self._stable: dict[Path, FileIdentity] = {}

    def closed(self, path: Path) -> None:
        """A writer closed the file, or it was moved in. From any thread."""
        self._events.append((path, "closed"))

    def moved_in(self, path: Path) -> None:
        """The file is in a directory that was moved in from elsewhere: it had its name before, so its writer may go on,
        and only the kernel can tell. From any thread."""
        self._events.append((path, "moved in"))

    def created(self, path: Path) -> None:
        """There is a new file; it may have been closed before anybody watched its directory. From any thread."""
        self._events.append((path, "created"))

    def written(self, path: Path) -> None:
        """The file was written to, so its writer will be seen closing it. From any thread."""
        self._events.append((path, "written"))

    def apply_events(self) -> None:
        """Take note of the events since the last scan."""
        while self._events:
            path, event = self._events.popleft()
            identity, known = identify(path), self._closed.get(path)
            if event == "written" and known and identity and only_attributes_changed(known, identity):
                self._closed[path] = identity
                continue
            for table in (self._closed, self._unclosed, self._unchanged, self._stable):
                table.pop(path, None)
            if event == "closed" and identity:
                self._closed[path] = identity
            elif event == "moved in" and identity:
                self._unchanged[path] = identity, STABLE_SCANS
            elif event == "written":
                self._unclosed[path] = None

    def why_unstable(self, path: Path, identity: FileIdentity, *, timed: bool) -> str:
        """Why the file that has this identity now may not be complete; empty if it is. To be asked once a scan.

        Args:
            timed: the scan counts for files that nobody was seen closing.
        """
        if self._stable.get(path) == identity:
            return ""
        closed = self._closed.get(path) == identity
        scans = 0 if closed else self._count_scans(path, identity, timed=timed)
        if not closed and scans < (STABLE_SCANS_UNCLOSED if path in self._unclosed else STABLE_SCANS):
            return WRITTEN
        writers = self._kernel.writers(path)
        if writers is Writers.SOME:
            return OPEN
        if writers is Writers.UNKNOWN:
            self.unknown = self.unknown or path
            if not closed and scans < self._unknown_scans:
                return f"still being written, or unchanged for less than {self._unknown_scans} scans"
        self._stable[path] = identity
        return ""

    def is_open(self, path: Path, identity: FileIdentity) -> bool:
        """Whether somebody has the file that has this identity now open for writing. Once nobody had, it is not asked
        again."""
        if self._stable.get(path) != identity and self._kernel.writers(path) is Writers.SOME:
            return True
        self._stable[path] = identity
        return False

    def _count_scans(self, path: Path, identity: FileIdentity, *, timed: bool) -> int:
        """For how many timed scans in a row, this one included, the file has been unchanged."""
        before, scans = self._unchanged.get(path, (None, 0))
        scans = timed + (scans if before == identity else 0)
        self._unchanged[path] = (identity, scans)
        return scans

    def may_be_complete(self, path: Path, identity: FileIdentity) -> bool:
        """Whether a file that is not stable yet may be complete: nobody was seen writing to it, and it does not change.

        To be asked before `why_unstable`.
        """
        return self._unchanged.get(path, (None, 0))[0] in (None, identity) and path not in self._unclosed

    def forget_except(self, seen: Container[Path]) -> None:
        """Forget files that the last scan did not meet."""
        for table in (self._closed, self._unclosed, self._unchanged, self._stable):
            for path in [path for path in table if path not in seen]:
                del table[path]
