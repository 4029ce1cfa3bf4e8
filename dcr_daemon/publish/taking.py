"""One watched checkpoint on its way to a version: its files are taken up as they become complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from dcr_daemon import runtime
from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.safetensors import SafetensorsFile
from dcr_daemon.errors import DcrError
from dcr_daemon.events import Emit, Rounded, ShardTaken
from dcr_daemon.publish.attempt import Attempt
from dcr_daemon.publish.intake import Intake
from dcr_daemon.publish.published import Source as PublishedSource
from dcr_daemon.publish.session import Session
from dcr_daemon.publish.sources import FileSource, SourceChanged
from dcr_daemon.publish.survey import CompleteFile, FileIdentity, Found, identify
from dcr_daemon.publish.versions import SealedVersion


class Taking:
    """An attempt whose input is the checkpoint at `relative`. Its files stay open until it ends."""

    def __init__(self, session: Session, attempt: Attempt, relative: str, ignore: tuple[str, ...], emit: Emit) -> None:
        self.relative = relative
        self._session, self._attempt, self._emit = session, attempt, emit
        self._intake = Intake(relative, session.layout, ignore)
        self._taken: dict[str, CompleteFile] = {}
        self._open: list[SafetensorsFile] = []

    def wants(self, found: Found) -> list[CompleteFile]:
        """Complete files not taken yet."""
        return [file for name, file in sorted(found.files.items()) if name not in self._taken]

    @property
    def identity(self) -> frozenset[FileIdentity]:
        return frozenset(file.identity for file in self._taken.values())

    async def take(self, complete: CompleteFile) -> None:
        """Diff one file; its header is judged before its first byte of weights is read.

        Raises:
            Incompatible: tensors that do not fit the layout; all of them are named.
            SourceChanged: it is not the file any more that was found complete.
        """
        started = runtime.monotonic()
        try:
            file = SafetensorsFile(complete.path)
        except DcrError as error:
            raise SourceChanged(f"{complete.path} was taken away or rewritten: {error.message}") from error
        self._open.append(file)
        self._taken[complete.path.name] = complete
        self.check()
        inputs = []
        for spec in file.specs:
            source = FileSource(file, spec)
            if (index := self._intake.take(source)) is not None:
                inputs.append((index, source))
        self._intake.check()
        await self._attempt.diff(inputs)
        runtime.failpoint("publish.shard.taken")
        self.check()
        took = runtime.monotonic() - started
        self._emit(ShardTaken(path=f"{self.relative}/{complete.path.name}", tensors=len(inputs), seconds=took))

    def check(self) -> None:
        """Raise `SourceChanged` if a file that was read is not the same any more."""
        for file in self._taken.values():
            now = identify(file.path)
            if now != file.identity:
                what = "is gone" if now is None else "was changed"
                raise SourceChanged(f"{file.path} {what} after it was read", hint="it is tried again when complete")

    async def seal(self) -> SealedVersion:
        """Every file is taken: make the version.

        Raises:
            Incompatible: tensors are missing or added, all named.
            SourceChanged: as `check`.
        """
        await self._attempt.finish()
        await self._session.workers.run(self._intake.finish, self._session.read)
        for (given, canonical), tensors in self._intake.rounded.items():
            self._emit(Rounded(tensors=tensors, given=given, canonical=canonical))
        return await self._session.seal(self._attempt, source=self._source(), check=self.check)

    def _source(self) -> dict[str, Any]:
        plain: dict[str, Any] = msgspec.to_builtins(PublishedSource(self.relative, sorted(self.identity)))
        return plain

    def close(self) -> None:
        for file in self._open:
            file.close()


@dataclass(frozen=True, slots=True)
class _HeaderSource:
    """A tensor of which only the header is looked at."""

    given: TensorSpec

    def read(self, start: int, count: int, dtype: str) -> Bits:
        raise AssertionError("a header has no bits")


def check_headers(found: Found, layout: Layout, ignore: tuple[str, ...]) -> None:
    """Judge a checkpoint whose files are all there by its headers alone, before an attempt is opened for it.

    Raises:
        Incompatible: tensors added, missing, retyped or reshaped, all named, or an index that disagrees.
    """
    found.check_index()
    intake = Intake(found.relative, layout, ignore)
    for file in found.files.values():
        for spec in file.header.specs:
            intake.take(_HeaderSource(spec))
    intake.check_complete()
