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

GONE = 64  #: newest sources that are remembered although their directory is gone: it may have been renamed


class Source(msgspec.Struct, frozen=True):
    """`source` of a seal: the checkpoint's path below the watched directory, and its files as they were read."""

    path: str
    files: list[FileIdentity]

    @property
    def identity(self) -> frozenset[FileIdentity]:
        return frozenset(self.files)


class _Kept(msgspec.Struct, frozen=True):
    """`version`: the newest one whose source is among `sources`."""

    stream: str
    watch: str
    version: int
    sources: list[Source]


_lists = msgspec.json.Decoder(_Kept)


async def read_published(ledger: Ledger, kept: Path, watch: Path) -> list[Source]:
    """Sources of all versions, and the shortcut `kept` brought up to date."""
    known = _load(kept, ledger.stream.stream, watch)
    seals = await ledger.history.between(known.version + 1)
    # A directory that is gone cannot come back with the same inodes and times, but under another name.
    sources = [source for source in known.sources[:-GONE] if (watch / source.path).exists()] + known.sources[-GONE:]
    sources += [source for seal in seals if (source := _source(seal.source))]
    _save(kept, msgspec.structs.replace(known, version=ledger.state.seal.version, sources=sources))
    return sources


def _source(source: dict[str, Any] | None) -> Source | None:
    """None if a version came from something else than a watched checkpoint."""
    try:
        return msgspec.convert(source, Source)
    except msgspec.ValidationError:
        return None


def _load(kept: Path, stream: str, watch: Path) -> _Kept:
    nothing = _Kept(stream, str(watch.resolve()), 0, [])
    try:
        known = decode_json(_lists, kept.read_bytes())
    except (OSError, ValueError):
        return nothing
    return known if (known.stream, known.watch) == (nothing.stream, nothing.watch) else nothing


def _save(kept: Path, state: _Kept) -> None:
    with contextlib.suppress(OSError):  # without it the next start asks the seals: slower, never wrong
        write_whole(kept, msgspec.json.encode(state), what="published", durable=False)
