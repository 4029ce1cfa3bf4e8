"""Which of the checkpoints that a scan found is to be published next: complete ones oldest first, else the one being
written. Pure decisions; the watcher carries them out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.publish.watch.candidate import CheckpointCandidate
from dcr_daemon.publish.watch.file_identity import FileIdentity, number_in

Candidates = Mapping[str, CheckpointCandidate]  #: what a scan found, by relative path


class CheckpointSelection:
    """Remembers what was published or given up.

    Args:
        marker: a marker file says when a checkpoint is complete.
        newest: of several complete checkpoints select only the newest.
    """

    def __init__(self, layout: Layout, *, marker: bool, newest: bool) -> None:
        self._layout, self._marker, self._newest = layout, marker, newest
        self._newest_number = -1
        self._published: set[str] = set()
        self._abandoned: dict[str, frozenset[FileIdentity]] = {}

    def mark_published(self, relative: str) -> None:
        """The checkpoint at `relative` is a version."""
        self._published.add(relative)
        number = number_in(relative)
        self._newest_number = max(self._newest_number, -1 if number is None else number)

    def mark_abandoned(self, relative: str, identity: frozenset[FileIdentity]) -> None:
        """The attempt for these files was aborted: wait for all files of the checkpoint, or for other ones."""
        self._abandoned[relative] = identity

    def to_publish(self, found: Candidates) -> list[CheckpointCandidate]:
        """Checkpoints to be published as they are, oldest first.

        One to which no files will be added counts even if it lacks tensors: that is an error, and has to be reported.
        """
        ready = [c for c in found.values() if not c.why_incomplete(self._layout) or c.is_final(marker=self._marker)]
        ready.sort(key=lambda candidate: candidate.order)
        if self._newest:
            return [c for c in ready if c.relative in self._published or self._is_new(c)][-1:]
        return ready

    def ready(self, found: Candidates) -> list[CheckpointCandidate]:
        """Those of `to_publish` whose turn it is now: no older checkpoint may turn out to be complete too."""
        return _in_order(self.to_publish(found), found)

    def being_written(self, found: Candidates) -> CheckpointCandidate | None:
        """The oldest checkpoint of which some files are complete.

        One older than the newest version, or one that was abandoned, is left alone until it is complete: most such
        checkpoints are remains of a crash.
        """
        partial = (
            c
            for c in found.values()
            if c.files and not c.in_pieces and self._is_new(c) and self._abandoned.get(c.relative) != c.identity
        )
        return min(_in_order(partial, found), key=lambda candidate: candidate.order, default=None)

    def _is_new(self, candidate: CheckpointCandidate) -> bool:
        return candidate.number is None or candidate.number > self._newest_number


def _in_order(candidates: Iterable[CheckpointCandidate], found: Candidates) -> list[CheckpointCandidate]:
    """Those of the candidates that no older checkpoint may turn out to precede.

    A file that was closed before inotify watched its directory is known to be complete two scans later than its
    successors. A checkpoint that is really being written delays no other.
    """
    undetermined = [other.number for other in found.values() if other.undetermined and other.number is not None]
    return [c for c in candidates if c.number is None or not any(number < c.number for number in undetermined)]
