"""Which watched checkpoints are versions already. The seals say what each version came from.

`read_published` reads them, with a local cache so that a restart does not read a long chain again: without the cache it
is slower, never wrong. `PublishedFiles` answers the scanner whether files on disk are a version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from dcr_daemon.disk import write_atomically
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.projection.files.piece_map import METADATA
from dcr_daemon.publish.watch.file_identity import FileIdentity, checkpoint_identity, is_digest, without_inodes
from dcr_daemon.untrusted import decode_json

MISSING_KEPT = 64  #: newest sources that are remembered although their directory is gone: it may have been renamed


class PublishedCheckpoint(msgspec.Struct, frozen=True):
    """`source` of a seal: the checkpoint's path below the watched directory, and its files as they were read."""

    path: str
    files: list[FileIdentity]

    @property
    def identity(self) -> frozenset[FileIdentity]:
        return frozenset(self.files)


class PublishedFiles:
    """The files of all versions below `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._paths: dict[frozenset[FileIdentity], set[str]] = {}
        self._newest: dict[str, frozenset[FileIdentity]] = {}  # by path: the last version that lay there
        self._by_table: dict[FileIdentity, frozenset[FileIdentity]] = {}

    def add(self, relative: str, identity: frozenset[FileIdentity]) -> None:
        """The checkpoint at `relative` with these files is a version."""
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

    def contains_part(self, relative: str, files: Collection[FileIdentity]) -> bool:
        """Whether these are some files of the version at `relative`: the others were taken away."""
        return without_inodes(frozenset(files)) < without_inodes(self.newest_at(relative))

    def newest_at(self, relative: str) -> frozenset[FileIdentity]:
        """The files of the last version that came from this path; empty if none did."""
        return self._newest.get(relative, frozenset())

    def with_table(self, table: FileIdentity) -> frozenset[FileIdentity] | None:
        """The files of the version whose distributed checkpoint has this very `.metadata`."""
        return self._by_table.get(table)


class _Cache(msgspec.Struct, frozen=True):
    """`version`: the newest one whose source is among `sources`."""

    stream: str
    watch: str
    version: int
    sources: list[PublishedCheckpoint]


_caches = msgspec.json.Decoder(_Cache)


async def read_published(ledger: Ledger, cache: Path, *, watch: Path) -> list[PublishedCheckpoint]:
    """Sources of all versions; updates the file `cache`."""
    known = _load(cache, ledger.stream.stream, watch)
    seals = await ledger.history.between(known.version + 1)
    # A directory that is gone can come back with the same inodes and times only under another name.
    older, newest = known.sources[:-MISSING_KEPT], known.sources[-MISSING_KEPT:]
    sources = [source for source in older if (watch / source.path).exists()] + newest
    sources += [source for seal in seals if (source := _source(seal.source))]
    _save(cache, msgspec.structs.replace(known, version=ledger.state.seal.version, sources=sources))
    return sources


def _source(source: dict[str, Any] | None) -> PublishedCheckpoint | None:
    """None if the version came from something else than a watched checkpoint."""
    try:
        return msgspec.convert(source, PublishedCheckpoint)
    except msgspec.ValidationError:
        return None


def _load(cache: Path, stream: str, watch: Path) -> _Cache:
    empty = _Cache(stream, str(watch.resolve()), 0, [])
    try:
        known = decode_json(_caches, cache.read_bytes())
    except (OSError, ValueError):
        return empty
    return known if (known.stream, known.watch) == (empty.stream, empty.watch) else empty


def _save(cache: Path, state: _Cache) -> None:
    with contextlib.suppress(OSError):  # the next start then reads the seals
        write_atomically(cache, msgspec.json.encode(state), site="published", durable=False)
