"""The high-water mark: how far this publisher or replica has read a stream, on its own disk (must T1).

A bucket can be rolled back, replayed or replaced by another; a reader with a mark refuses a ledger that does not extend
what it has read. The mark is written before anybody acts on a record, atomically (temporary file, fsync, rename, fsync
of the directory), and never goes down.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from dcr_daemon.disk import write_atomically
from dcr_daemon.errors import Corrupt, Incompatible, ResourceExhausted, UsageError
from dcr_daemon.ledger.fold import Tip
from dcr_daemon.ledger.records import State
from dcr_daemon.untrusted import decode_json

FORMAT = 1


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """`served` is the highest version a replica has served, for the subscriber (must E2)."""

    format: int = FORMAT
    stream: str
    seq: int
    digest: str
    state: State
    served: int | None = None

    @property
    def tip(self) -> Tip:
        return Tip(self.stream, self.seq, self.digest, self.state)


_marks = msgspec.json.Decoder(Mark)


class HighWaterMark:
    """One mark in one file. The directory is made if absent.

    Raises:
        Corrupt: the file is there and is not a mark.
        Incompatible: it was written by a newer DCR, or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mark = self._load()

    @property
    def mark(self) -> Mark | None:
        return self._mark

    @property
    def served(self) -> int | None:
        """Highest version this replica ever served; None if it never did."""
        return self._mark.served if self._mark else None

    def saw(self, tip: Tip) -> None:
        """Remember that the ledger reaches `tip`. Durable on return; a lower tip changes nothing.

        Another tip of the same seq corrects the mark: a second reading of the ledger has shown that it was wrong.
        """
        mark = self._mark
        if mark and (tip.seq < mark.seq or tip == mark.tip):
            return
        served = mark.served if mark else None
        self._save(Mark(stream=tip.stream, seq=tip.seq, digest=tip.digest, state=tip.state, served=served))

    def serves(self, version: int) -> None:
        """Remember that `version` was served. Durable on return; a lower version changes nothing."""
        mark = self._mark
        if mark is None:
            raise UsageError(f"version {version} cannot be served before its ledger was read ({self.path})")
        if mark.served is None or version > mark.served:
            self._save(msgspec.structs.replace(mark, served=version))

    def _load(self) -> Mark | None:
        try:
            body = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Incompatible(
                f"cannot read the high-water mark {self.path}: {error.strerror}",
                hint="fix the permissions of the state directory",
            ) from error
        try:
            mark = decode_json(_marks, body)
        except ValueError as error:
            raise Corrupt(
                f"high-water mark {self.path} does not parse: {error}",
                hint="remove it only if you know that the bucket was not rolled back",
            ) from error
        if mark.format > FORMAT:
            raise Incompatible(f"high-water mark {self.path} has format {mark.format}", hint="upgrade DCR here")
        return mark

    def _save(self, mark: Mark) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, msgspec.json.encode(mark), site="mark")
        except OSError as error:
            raise ResourceExhausted(
                f"cannot write the high-water mark {self.path}: {error.strerror}",
                hint="nothing was acted on; make room or fix the permissions of the state directory",
            ) from error
        self._mark = mark
