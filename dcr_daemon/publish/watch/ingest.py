"""One watched checkpoint on its way to a version. Each of its files is diffed when it is complete; a checkpoint in
pieces is diffed as a whole, once all its files are there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dcr_daemon import runtime
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.safetensors import SafetensorsFile
from dcr_daemon.errors import DcrError, Incompatible
from dcr_daemon.events import Emit, Rounded, ShardTaken
from dcr_daemon.projection.files.piece_map import METADATA
from dcr_daemon.publish.group.leader import Leader
from dcr_daemon.publish.inputs.sources import FileSource, Source, SourceChanged
from dcr_daemon.publish.inputs.tied import TiedTensors
from dcr_daemon.publish.inputs.validator import UpdateValidator
from dcr_daemon.publish.version.attempt import Attempt
from dcr_daemon.publish.version.versions import SealedVersion
from dcr_daemon.publish.watch.candidate import CheckpointCandidate, CompleteFile, CompletePieces
from dcr_daemon.publish.watch.file_identity import FileIdentity, checkpoint_identity, identify
from dcr_daemon.publish.watch.pieces.reader import PiecedSource
from dcr_daemon.publish.watch.published import PublishedCheckpoint


class CheckpointMisfit(Incompatible):
    """The checkpoint at `relative`, with the files of `identity`, does not fit the stream's layout."""

    kind = Incompatible.kind

    def __init__(self, error: Incompatible, relative: str, identity: frozenset[FileIdentity]) -> None:
        super().__init__(error.message, hint=error.hint)
        self.relative, self.identity = relative, identity


@contextlib.contextmanager
def _judging(relative: str, identity: Callable[[], frozenset[FileIdentity]]) -> Iterator[None]:
    try:
        yield
    except Incompatible as error:
        raise CheckpointMisfit(error, relative, identity()) from error


class CheckpointIngest:
    """An attempt whose input is the checkpoint at `relative`.

    Files that hold tensors outside the layout stay open until it ends: one may be a copy of a tensor still to come.
    """

    def __init__(
        self, leader: Leader, attempt: Attempt, *, relative: str, ignore: tuple[str, ...], tied: TiedTensors, emit: Emit
    ) -> None:
        self.relative = relative
        self._leader, self._attempt, self._emit = leader, attempt, emit
        self._validator = UpdateValidator(relative, leader.layout, ignore=ignore, tied=tied)
        self._ingested: dict[Path, FileIdentity] = {}
        self._open: list[SafetensorsFile] = []

    def pending(self, candidate: CheckpointCandidate) -> list[CompleteFile] | list[CompletePieces]:
        """Complete files that were not ingested yet, or the pieces."""
        if candidate.in_pieces:
            return [candidate.pieces] if candidate.pieces and not self._ingested else []
        return [file for _, file in sorted(candidate.files.items()) if file.path not in self._ingested]

    @property
    def identity(self) -> frozenset[FileIdentity]:
        """Of the files ingested so far."""
        return checkpoint_identity(self._ingested.values(), METADATA)

    def lost_files(self, candidate: CheckpointCandidate) -> list[str]:
        """Names of the files ingested so far that the checkpoint, as the last scan found it, does not hold any more."""
        held = {file.path: file.identity for file in candidate.files.values()}
        return sorted(known.name for path, known in self._ingested.items() if held.get(path) != known)

    async def ingest(self, unit: CompleteFile | CompletePieces) -> None:
        """Diff one file, or all pieces. Names and shapes are judged before the first byte of weights is read.

        Raises:
            CheckpointMisfit: tensors that do not fit the layout; all of them are named.
            SourceChanged: a file is not the one any more that was found complete.
        """
        started = runtime.monotonic()
        if isinstance(unit, CompletePieces):
            path, directory = self.relative, unit.files.directory
            files = {directory / name: file for name, file in unit.files.identities.items()}
            tensors = await self._diff(files, [PiecedSource(unit.files, tensor) for tensor in unit.fit.tensors])
        else:
            path = f"{self.relative}/{unit.path.name}"
            tensors = await self._ingest_file(unit)
        self._emit(ShardTaken(path=path, tensors=tensors, seconds=runtime.monotonic() - started))

    async def _ingest_file(self, complete: CompleteFile) -> int:
        try:
            file = SafetensorsFile(complete.path)
        except DcrError as error:
            raise SourceChanged(f"{complete.path} was taken away or rewritten: {error.message}") from error
        self._open.append(file)
        sources = [FileSource(file, spec) for spec in file.specs]
        tensors = await self._diff({complete.path: complete.identity}, sources)
        if tensors == len(sources):
            self._open.pop().close()
        return tensors

    async def _diff(self, files: Mapping[Path, FileIdentity], sources: Sequence[Source]) -> int:
        """How many of the tensors are the layout's. Files that were read before are left to `check`."""
        self._ingested |= files
        _check_unchanged(files)
        with _judging(self.relative, lambda: self.identity):
            inputs = self._validator.accept_all(sources)
            self._validator.check()
        await self._attempt.diff(inputs)
        runtime.failpoint("publish.shard.taken")
        _check_unchanged(files)
        return len(inputs)

    def check(self) -> None:
        """Raise `SourceChanged` if a file that was read is not the same any more."""
        _check_unchanged(self._ingested)

    @property
    def followed(self) -> Mapping[str, str]:
        """Tensors that the checkpoint leaves out, each with the one that it follows; known when it is sealed."""
        return self._validator.followed

    async def finish_and_seal(self, earlier_ns: int) -> SealedVersion:
        """All files are ingested: make the version.

        Args:
            earlier_ns: the modification time of the newest file of any version before.

        Raises:
            CheckpointMisfit: tensors are missing or added, all named.
            SourceChanged: as `check`.
        """
        await self._attempt.diff(self._validator.followers(self._leader.read))
        await self._attempt.finish()
        with _judging(self.relative, lambda: self.identity):
            await self._leader.context.workers.run(self._validator.finish, self._leader.read)
        for (given, canonical), tensors in self._validator.rounded.items():
            self._emit(Rounded(tensors=tensors, given=given, canonical=canonical))
        source: dict[str, Any] = msgspec.to_builtins(
            PublishedCheckpoint(self.relative, sorted(self.identity), earlier_ns)
        )
        return await self._leader.seal(self._attempt, source=source, check=self.check)

    def close(self) -> None:
        for file in self._open:
            file.close()


def _check_unchanged(files: Mapping[Path, FileIdentity]) -> None:
    """Raise `SourceChanged` if a file is not the one that it was found to be."""
    for path, known in files.items():
        now = identify(path, known.name)
        if now != known:
            change = "is gone" if now is None else "was changed"
            raise SourceChanged(f"{path} {change} after it was read", hint="it is tried again when complete")


def check_headers(candidate: CheckpointCandidate, layout: Layout, *, ignore: tuple[str, ...], whole: bool) -> None:
    """Judge a checkpoint by headers and tables alone, before an attempt is opened for it.

    Args:
        whole: its files are all there; else what the others may hold is not judged.

    Raises:
        CheckpointMisfit: tensors added, missing, retyped or reshaped, all named, or an index that disagrees.
    """
    with _judging(candidate.relative, lambda: candidate.identity):
        if whole:
            candidate.check_index(layout)
        if candidate.pieces:
            candidate.pieces.fit.check(candidate.relative)
            given = [tensor.given for tensor in candidate.pieces.fit.tensors]
        else:
            given = [spec for file in candidate.files.values() if file.header for spec in file.header.specs]
        validator = UpdateValidator(candidate.relative, layout, ignore=ignore, tied=candidate.tied)
        for spec in given:
            validator.accept(spec)
        if whole:
            validator.check_complete()
        else:
            validator.check()
