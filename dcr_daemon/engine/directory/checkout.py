"""The files of a checkpoint directory that is changed in place, so that it survives a kill at any instant (must E8).

    .dcr/version.json   the version and the stream of the weights (`Marker`)
    .dcr/journal        the change that is being written, in full
    .dcr/dirty          the mark: weights are between versions; `config.json` is moved to `.dcr/`, so every loader fails
    .dcr/incoming/      a whole checkpoint that will replace the present one
    .dcr/owner.json     the engine that attached last (must E3)

The order: write journal → set mark → move config away → write data → write marker → move config back → remove mark →
remove journal, each step durable before the next. So a journal without a mark never began, and a mark always has a good
journal to redo. Callers hold the lock. This module handles files; `transactions` and `install` know what they mean.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TypeVar

import msgspec

from dcr_daemon import runtime
from dcr_daemon.canonical.layout import Layout, describe_difference
from dcr_daemon.checkpoint.directory import DIRTY, Checkpoint, tensor_files
from dcr_daemon.disk import disk_error, is_at, out_of_handles, sync_directory, try_lock, write_atomically
from dcr_daemon.engine.directory.journal import Install, Journal, Patch, read_journal
from dcr_daemon.engine.directory.shards import Shards, own_files
from dcr_daemon.engine.port import EngineGone
from dcr_daemon.errors import Corrupt, DcrError, EngineRefused, ResourceExhausted
from dcr_daemon.events import Emit, discard
from dcr_daemon.untrusted import decode_json

FORMAT = 1
CONFIG = "config.json"
T = TypeVar("T", bound=msgspec.Struct)


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """The version of the weights. `vector` is the SHA-256 of their fingerprint vector, `txn` the transaction that led
    to it."""

    format: int = FORMAT
    stream: str
    layout: str
    version: int
    label: str
    vector: str
    txn: str = ""


class Dirty(msgspec.Struct, frozen=True, kw_only=True):
    """The mark: this transaction has begun to change the weights."""

    stream: str
    txn: str


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The engine that attached last: `nonce` is its random id, `token` is higher than that of every owner before."""

    token: int = 0
    nonce: str = ""


class Checkout:
    """The directory at `path`, and DCR's files in `path/.dcr`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.marks = path / ".dcr"
        self.journal = self.marks / "journal"
        self.incoming = self.marks / "incoming"
        self._marker = self.marks / "version.json"
        self._dirty = path / DIRTY
        self._owner = self.marks / "owner.json"
        self._hidden = self.marks / CONFIG

    def try_lock(self) -> contextlib.ExitStack | None:
        """Lock the directory against every other process and caller until the context ends; None if it is locked.

        Raises:
            EngineGone: the directory is not there, or not any more.
            ResourceExhausted: its file system cannot lock.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise EngineGone(f"{self.path} was removed", hint="attach again") from error
        with contextlib.ExitStack() as held:
            held.callback(os.close, descriptor)
            if not try_lock(descriptor, self.path):
                return None
            if not is_at(descriptor, self.path):
                raise EngineGone(f"{self.path} was removed or replaced", hint="attach again")
            return held.pop_all()

    @property
    def empty(self) -> bool:
        """Whether the directory holds nothing, except perhaps `.dcr`."""
        return all(entry == self.marks for entry in self.path.iterdir())

    def marker(self) -> Marker | None:
        """The marker, if there is one. Raises `EngineRefused` if it cannot be read or has a newer format."""
        return self._read(self._marker, Marker)

    def dirty(self) -> Dirty | None:
        return self._read(self._dirty, Dirty)

    def owner(self) -> Owner:
        return self._read(self._owner, Owner) or Owner()

    def claim(self, nonce: str) -> int:
        """Become the owner; the new token is higher than any before."""
        token = self.owner().token + 1
        self.marks.mkdir(exist_ok=True)
        self._replace(self._owner, Owner(token=token, nonce=nonce))
        runtime.failpoint("engine.dir.claimed")
        return token

    def _read(self, path: Path, kind: type[T]) -> T | None:
        try:
            body = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            if out_of_handles(error):
                raise disk_error(error, path) from error
            raise EngineRefused(f"{path} cannot be read: {error.strerror}", hint="check this disk") from error
        try:
            found = decode_json(msgspec.json.Decoder(kind), body)
        except ValueError as error:
            hint = "empty the directory, then start again" if path != self._owner else "remove this file"
            raise EngineRefused(f"{path} cannot be read: {error}", hint=hint) from error
        if isinstance(found, Marker) and found.format > FORMAT:
            raise EngineRefused(f"{path} has format {found.format}", hint="upgrade dcr-daemon")
        return found

    def _replace(self, path: Path, value: msgspec.Struct) -> None:
        try:
            write_atomically(path, msgspec.json.encode(value), site="engine")
        except OSError as error:
            raise disk_error(error, path) from error

    def check_links(self) -> None:
        """Refuse to work through a link to a directory that DCR did not make: it may be used by its own name too.

        Raises `EngineRefused`. Links to files are accepted: `own_files` replaces them.
        """
        if self.marks.is_symlink():
            raise EngineRefused(f"{self.marks} is a link", hint="remove it: DCR makes a directory of this name")
        if self.path.is_symlink() and self.marker() is None and self.dirty() is None and not self.empty:
            target = self.path.resolve()
            raise EngineRefused(
                f"{self.path} is a link to {target}, which is not DCR's to change",
                hint=f"name an empty directory, or a copy; or {target} itself, if nothing else uses it",
            )

    def own_files(self, emit: Emit = discard) -> bool:
        """Before anything is written: replace every shard that has another name by a copy, and reserve disk space.

        Returns:
            Whether a file was replaced; what was opened before still shows the old one.

        Raises:
            ResourceExhausted: the disk has no room; the files have the same content as before.
        """
        return own_files(tensor_files(self.path), self.marks, emit=emit)

    def recover(self, layout: Layout, emit: Emit = discard) -> str:
        """Finish a change that was begun, and remove files of changes that were not.

        Returns:
            Why the directory is still between versions; empty when it is clean.
        """
        if not self.marks.is_dir():
            return ""
        if self.dirty() is not None:
            journal = read_journal(self.journal)
            if journal is None:
                return "a change was begun and its journal is damaged"
            with contextlib.closing(journal):
                if journal.head.layout != layout.digest:
                    return "a change was begun under another layout"
                try:
                    if isinstance(journal.head, Patch):
                        self.own_files(emit)
                    self.redo(journal, layout)
                except ResourceExhausted:
                    raise  # it can be finished when the disk has space again
                except DcrError as error:
                    return f"a change was begun and cannot be finished: {error.message}"
        self.sweep()
        return ""

    def begin(self, prepared: Path, stream: str, txn: str) -> None:
        """Make `prepared` the journal and set the mark. After this the change is finished, now or by `recover`."""
        prepared.rename(self.journal)
        sync_directory(self.marks, site="engine")
        runtime.failpoint("engine.dir.journal")
        self._replace(self._dirty, Dirty(stream=stream, txn=txn))
        runtime.failpoint("engine.dir.dirty")

    def redo(self, journal: Journal, layout: Layout) -> None:
        """Write what a journal contains, and its marker. May be repeated after a stop at any point.

        Raises:
            Corrupt: the weights do not read back as they were written.
        """
        head = journal.head
        self._hide_config()
        runtime.failpoint("engine.dir.hidden")
        if isinstance(head, Patch):
            self.write(journal, layout)
        else:
            self._move(head)
        runtime.failpoint("engine.dir.data")
        self.finish(
            Marker(
                stream=head.stream,
                layout=head.layout,
                version=head.version,
                label=head.label,
                vector=head.vector,
                txn=head.txn,
            )
        )

    def write(self, journal: Journal, layout: Layout, *, back: bool = False) -> None:
        """Scatter the new (or, `back`, the old) values into the shards, durably; then read them back."""
        with Shards(self.path) as shards:
            for entry in journal.entries(layout):
                name, wanted = layout[entry.tensor].name, entry.old if back else entry.new
                shards.home(name).write_elements(name, entry.positions, values=wanted)
                runtime.failpoint("engine.dir.write")
            shards.sync()
            for entry in journal.entries(layout):
                name, wanted = layout[entry.tensor].name, entry.old if back else entry.new
                if not shards.home(name).holds_elements(name, entry.positions, values=wanted):
                    raise Corrupt(f"{self.path}: {name} does not read back as written", hint="check this disk")

    def _move(self, head: Install) -> None:
        """Put the incoming files in place; `config.json` waits with the marks until all else is durable."""
        config = self.incoming / CONFIG
        if config.exists():
            config.rename(self._hidden)
        for name in head.files:
            if (self.incoming / name).exists():
                (self.incoming / name).rename(self.path / name)
                runtime.failpoint("engine.dir.move")
        for name in head.stale:
            (self.path / name).unlink(missing_ok=True)
        sync_directory(self.path, site="engine")

    def finish(self, marker: Marker) -> None:
        """The weights are durably at `marker`'s version: write the marker and remove the mark."""
        self.marks.mkdir(exist_ok=True)
        self._replace(self._marker, marker)
        runtime.failpoint("engine.dir.version")
        self.clear()

    def clear(self) -> None:
        """Remove the mark; the weights must be what `version.json` says."""
        self._show_config()
        runtime.failpoint("engine.dir.shown")
        self._dirty.unlink(missing_ok=True)
        sync_directory(self.marks, site="engine")
        runtime.failpoint("engine.dir.clean")
        self.journal.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what never began: journals without a mark, prepared changes, incoming files."""
        self._show_config()
        self.journal.unlink(missing_ok=True)
        for path in [*self.marks.glob("prepared-*"), *self.marks.glob(".*.partial")]:
            path.unlink(missing_ok=True)
        for path in [*self.marks.glob("incoming*"), *self.marks.glob(".incoming*")]:
            shutil.rmtree(path, ignore_errors=True)

    def _hide_config(self) -> None:
        if os.path.lexists(self.path / CONFIG):  # it may be a link, which leads nowhere from another place
            (self.path / CONFIG).rename(self._hidden)
            sync_directory(self.path, site="engine")
            sync_directory(self.marks, site="engine")

    def _show_config(self) -> None:
        if os.path.lexists(self._hidden):
            self._hidden.rename(self.path / CONFIG)
            sync_directory(self.path, site="engine")


def open_checkpoint(path: Path, layout: Layout) -> Checkpoint:
    """The directory's checkpoint, which must have exactly the tensors of `layout`.

    Raises:
        DcrError: it has no readable checkpoint.
        EngineRefused: it has other tensors, which are named.
    """
    checkpoint = Checkpoint(path)
    if difference := describe_difference(checkpoint.layout, layout):
        checkpoint.close()
        raise EngineRefused(f"{path} does not hold the stream's tensors: {difference}")
    return checkpoint
