"""Which watched checkpoints are versions already. The seals say what each version came from.

`read_published` reads them, with a local cache. A publisher without the cache reads back as far as directories on disk
may be versions, and `READ_BACK` seals if they are old, however long the history is. Each seal says the newest time of a
file of any version before: what has a newer file is none of those versions, exactly, since the times are part of what
is compared. What has none, and is none of the versions that were read, may be a version that was not read: it is never
published, which is said. That forgets nothing but checkpoints which were passed by while `READ_BACK` newer ones became
versions.

`PublishedFiles` answers the scanner whether files on disk are a version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dcr_daemon.disk import write_atomically
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.records import Seal
from dcr_daemon.projection.files.piece_map import METADATA
from dcr_daemon.publish.watch.file_identity import (
    FileIdentity,
    checkpoint_identity,
    is_digest,
    newest_time,
    without_inodes,
)
from dcr_daemon.untrusted import decode_json

READ_BACK = 32  #: seals that are read back for the sake of directories that are older than all of them
MISSING_KEPT = 64  #: newest sources that are remembered although their directory is gone: it may have been renamed


class PublishedCheckpoint(msgspec.Struct, frozen=True):
    """`source` of a seal: the checkpoint's path below the watched directory, and its files as they were read.

    `earlier_ns`: no file of an earlier version, of any path, has a later modification time; None in seals from before
    DCR recorded it.
    """

    path: str
    files: list[FileIdentity]
    earlier_ns: int | None = None

    @property
    def identity(self) -> frozenset[FileIdentity]:
        return frozenset(self.files)

    @property
    def newest_ns(self) -> int:
        """The modification time of its newest file."""
        return newest_time(self.files)


class FileTimes(NamedTuple):
    """Modification times of the files in a directory on disk that may be a checkpoint's."""

    path: str
    oldest_ns: int
    newest_ns: int


class PublishedFiles:
    """The files of all versions below `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._paths: dict[frozenset[FileIdentity], set[str]] = {}
        self._newest: dict[str, frozenset[FileIdentity]] = {}  # by path: the last version that lay there
        self._by_table: dict[FileIdentity, frozenset[FileIdentity]] = {}
        self.newest_ns = 0  #: the modification time of the newest file of any version
        self.unread_ns = -1  #: the same of the versions that were not read

    def add(self, relative: str, identity: frozenset[FileIdentity]) -> None:
        """The checkpoint at `relative` with these files is a version."""
        self.newest_ns = max(self.newest_ns, newest_time(identity))
        if not any(map(is_digest, identity)):  # it may have been sealed when more files were listed
            identity = checkpoint_identity(identity, METADATA)
        self._paths.setdefault(identity, set()).add(relative)
        self._newest[relative] = identity
        table = next((file for file in identity if file.name == METADATA), None)
        if table and not any(map(is_digest, identity)):
            self._by_table[table] = identity

    def contains(self, relative: str, identity: frozenset[FileIdentity]) -> bool:
        """Whether the files at `relative` are a version.

        A directory that was renamed since is that version still. One that holds links to the files of another, which is
        still there, is a checkpoint of its own: somebody may be waiting for its number.
        """
        paths = self._paths.get(identity)
        if not paths:
            # Moved to another disk with their times, as `rsync -a` does, files have other inodes and are the same.
            return bool(identity) and without_inodes(self.newest_at(relative)) == without_inodes(identity)
        if relative not in paths and any((self._root / path).is_dir() for path in paths):
            return False
        paths.add(relative)
        self._newest[relative] = identity
        return True

    def may_be_unread(self, identity: frozenset[FileIdentity]) -> bool:
        """Whether files that are no version that was read may be one that was not."""
        return bool(identity) and newest_time(identity) <= self.unread_ns

    def contains_part(self, relative: str, files: Collection[FileIdentity]) -> bool:
        """Whether these are some files of the version at `relative`: the others were taken away."""
        return without_inodes(frozenset(files)) < without_inodes(self.newest_at(relative))

    def newest_at(self, relative: str) -> frozenset[FileIdentity]:
        """The files of the last version that came from this path; empty if none did."""
        return self._newest.get(relative, frozenset())

    def with_table(self, table: FileIdentity) -> frozenset[FileIdentity] | None:
        """The files of the version whose distributed checkpoint has this very `.metadata`."""
        return self._by_table.get(table)


@dataclass(frozen=True, slots=True)
class Published:
    """What the seals say, oldest version first; the times as in `PublishedFiles`."""

    sources: list[PublishedCheckpoint]
    newest_ns: int
    unread_ns: int


class _Cache(msgspec.Struct, frozen=True):
    """`version`: the newest one whose source is among `sources`; the times as in `PublishedFiles`."""

    stream: str
    watch: str
    version: int
    sources: list[PublishedCheckpoint]
    newest_ns: int
    unread_ns: int


_caches = msgspec.json.Decoder(_Cache)


async def read_published(
    ledger: Ledger, cache: Path, *, watch: Path, on_disk: Callable[[], Awaitable[list[FileTimes]]]
) -> Published:
    """Sources of the versions that files on disk may be; updates the file `cache`.

    Args:
        on_disk: the directories that are there now; called if there is no cache.
    """
    known, head = _load(cache, ledger.stream.stream, watch), ledger.state.seal.version
    reading = _Reading(await on_disk() if known.version == 0 else [], known.version)
    async for seal in ledger.history.seals_back(head if head > known.version else 0, known.version + 1):
        if not reading.take(seal):
            break
    # A directory that is gone can come back with the same inodes and times only under another name.
    older, newest = known.sources[:-MISSING_KEPT], known.sources[-MISSING_KEPT:]
    sources = [source for source in older if (watch / source.path).exists()] + newest + reading.sources[::-1]
    newest_ns = max([known.newest_ns, *(max(one.newest_ns, one.earlier_ns or 0) for one in sources)])
    known = msgspec.structs.replace(
        known,
        version=head,
        sources=sources,
        newest_ns=newest_ns,
        unread_ns=max(known.unread_ns, reading.unread_ns),
    )
    _save(cache, known)
    return Published(sources, known.newest_ns, known.unread_ns)


class _Reading:
    """Takes seals from the newest down, until no directory on disk can be an older version.

    Attributes:
        sources: of the versions taken, newest first.
        unread_ns: no version that was not taken has a newer file; -1 if all were taken.
    """

    def __init__(self, on_disk: list[FileTimes], known: int) -> None:
        self._on_disk, self._known = on_disk, known
        self._paths = set[str]()
        self._oldest_taken_ns = 1 << 64
        self.sources: list[PublishedCheckpoint] = []
        self.unread_ns = -1

    def take(self, seal: Seal) -> bool:
        """Whether the seals before it are needed too."""
        if seal.version <= self._known:
            return False
        source = _source(seal.source)
        if source is None:
            return True
        self.sources.append(source)
        self._paths.add(source.path)
        self._oldest_taken_ns = min(self._oldest_taken_ns, source.newest_ns)
        if self._known or source.earlier_ns is None or self._may_lie_there(source.earlier_ns):
            return True
        self.unread_ns = source.earlier_ns
        return False

    def _may_lie_there(self, earlier_ns: int) -> bool:
        """Whether a version that was not taken may lie on disk, `earlier_ns` being the time of their newest file."""
        # A time in the future, once recorded, makes every directory look old: then all seals are read.
        if earlier_ns >= self._oldest_taken_ns:
            return True
        old = [times for times in self._on_disk if times.newest_ns <= earlier_ns]
        rewritten = [t for t in self._on_disk if t.oldest_ns <= earlier_ns < t.newest_ns and t.path not in self._paths]
        return bool(rewritten) or (bool(old) and len(self.sources) < READ_BACK)


def _source(source: dict[str, Any] | None) -> PublishedCheckpoint | None:
    """None if the version came from something else than a watched checkpoint."""
    try:
        return msgspec.convert(source, PublishedCheckpoint)
    except msgspec.ValidationError:
        return None


def _load(cache: Path, stream: str, watch: Path) -> _Cache:
    empty = _Cache(stream, str(watch.resolve()), 0, [], 0, -1)
    try:
        known = decode_json(_caches, cache.read_bytes())
    except (OSError, ValueError):
        return empty
    return known if (known.stream, known.watch) == (empty.stream, empty.watch) else empty


def _save(cache: Path, state: _Cache) -> None:
    with contextlib.suppress(OSError):  # the next start then reads the seals
        write_atomically(cache, msgspec.json.encode(state), site="published", durable=False)
