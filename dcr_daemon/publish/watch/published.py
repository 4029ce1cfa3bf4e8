"""Which watched checkpoints are versions already: what the seals say, remembered locally so that a restart does not
read a long chain again. The file is only a shortcut: without it the seals are asked.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec

from dcr_daemon.disk import write_whole
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.publish.watch.file_identity import FileIdentity
from dcr_daemon.untrusted import decode_json

MISSING_KEPT = 64  #: newest sources that are remembered although their directory is gone: it may have been renamed


class PublishedCheckpoint(msgspec.Struct, frozen=True):
    """`source` of a seal: the checkpoint's path below the watched directory, and its files as they were read."""

    path: str
    files: list[FileIdentity]

    @property
    def identity(self) -> frozenset[FileIdentity]:
        return frozenset(self.files)


class _Cache(msgspec.Struct, frozen=True):
    """`version`: the newest one whose source is among `sources`."""

    stream: str
    watch: str
    version: int
    sources: list[PublishedCheckpoint]


_caches = msgspec.json.Decoder(_Cache)


async def read_published(ledger: Ledger, cache: Path, watch: Path) -> list[PublishedCheckpoint]:
    """Sources of all versions, and the shortcut `cache` brought up to date."""
    known = _load(cache, ledger.stream.stream, watch)
    seals = await ledger.history.between(known.version + 1)
    # A directory that is gone cannot come back with the same inodes and times, but under another name.
    sources = [source for source in known.sources[:-MISSING_KEPT] if (watch / source.path).exists()] + known.sources[
        -MISSING_KEPT:
    ]
    sources += [source for seal in seals if (source := _source(seal.source))]
    _save(cache, msgspec.structs.replace(known, version=ledger.state.seal.version, sources=sources))
    return sources


def _source(source: dict[str, Any] | None) -> PublishedCheckpoint | None:
    """None if a version came from something else than a watched checkpoint."""
    try:
        return msgspec.convert(source, PublishedCheckpoint)
    except msgspec.ValidationError:
        return None


def _load(cache: Path, stream: str, watch: Path) -> _Cache:
    nothing = _Cache(stream, str(watch.resolve()), 0, [])
    try:
        known = decode_json(_caches, cache.read_bytes())
    except (OSError, ValueError):
        return nothing
    return known if (known.stream, known.watch) == (nothing.stream, nothing.watch) else nothing


def _save(cache: Path, state: _Cache) -> None:
    with contextlib.suppress(OSError):  # without it the next start asks the seals: slower, never wrong
        write_whole(cache, msgspec.json.encode(state), what="published", durable=False)
