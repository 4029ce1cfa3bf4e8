"""Which of the checkpoints that a scan found is to be published next: complete ones oldest first, else the one being
written. Pure decisions; the watcher carries them out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dcr_daemon import runtime
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.publish.watch.candidate import CheckpointCandidate
from dcr_daemon.publish.watch.file_identity import FileIdentity
from dcr_daemon.publish.watch.policy_paths import PolicyPaths, is_temporary

Candidates = Mapping[str, CheckpointCandidate]  #: what a scan found, by relative path


@dataclass(frozen=True, slots=True)
class Choice:
    """The complete checkpoints of a scan.

    Attributes:
        publish: those to be published, oldest first.
        other_shape: those of another shape than the one that is published.
        outdated: those of the policy that are not published because a newer one is, or was before.
    """

    publish: list[CheckpointCandidate]
    other_shape: list[CheckpointCandidate]
    outdated: list[CheckpointCandidate]


class CheckpointSelection:
    """Remembers what was published or given up.

    Args:
        paths: which checkpoints are the policy; it is told of each that is published.
        marker: a marker file says when a checkpoint is complete.
        newest: of several complete checkpoints select only the newest.
    """

    def __init__(self, layout: Layout, paths: PolicyPaths, *, marker: bool, newest: bool) -> None:
        self._layout, self._paths, self._marker, self._newest = layout, paths, marker, newest
        self._published_until: tuple[int, int, str] = (-1, -1, "")  #: greatest `order` of a published checkpoint
        self._abandoned: dict[str, frozenset[FileIdentity]] = {}
        self._misfits: set[str] = set()
        self._postponed: dict[str, float] = {}  #: when the next try is due, on `runtime.monotonic`

    def mark_published(self, relative: str, identity: frozenset[FileIdentity]) -> None:
        """The checkpoint at `relative` with these files is the newest version."""
        self._paths.learn(relative)
        step, written_ns = self._paths.step(relative), max((file.mtime_ns for file in identity), default=-1)
        if written_ns <= runtime.now().timestamp() * 1e9:  # a time to come would outdate every later checkpoint
            self._published_until = max(self._published_until, (written_ns, -1 if step is None else step, relative))

    def mark_abandoned(self, relative: str, identity: frozenset[FileIdentity]) -> None:
        """The attempt for these files was aborted: wait for all files of the checkpoint, or for other ones."""
        self._abandoned[relative] = identity

    def mark_misfit(self, relative: str) -> None:
        """A file at `relative` does not fit the layout: wait for all files of the checkpoint."""
        self._misfits.add(relative)

    def postpone(self, relative: str, seconds: float) -> None:
        """The checkpoint could not be read to its end. Until it is tried again, others are published."""
        self._postponed[relative] = runtime.monotonic() + seconds

    def forget_except(self, found: Candidates) -> None:
        """Forget what was given up and is gone."""
        self._abandoned = {name: identity for name, identity in self._abandoned.items() if name in found}
        self._postponed = {name: due for name, due in self._postponed.items() if name in found}
        self._misfits &= found.keys()

    def choose(self, found: Candidates) -> Choice:
        """Divide the checkpoints that are complete, or to which no files will be added (what such a one lacks is an
        error, and has to be reported).

        While no version tells the shape of the policy's paths, those with a step come before `best` or `final`.
        """
        whole = sorted(filter(self.is_whole, found.values()), key=lambda c: c.order)
        policy = [c for c in whole if self._paths.is_policy(c.relative)]
        other = [c for c in whole if not self._paths.is_policy(c.relative) and not is_temporary(c.relative)]
        if self._paths.shape is None:
            policy.sort(key=lambda c: c.step is None)
        publish = [c for c in policy if self._is_new(c)]
        if self._newest:
            publish = ([c for c in publish if self._is_due(c)] or publish)[-1:]
        return Choice(publish, other, [c for c in policy if c not in publish])

    def is_whole(self, candidate: CheckpointCandidate) -> bool:
        """Whether a checkpoint is complete, or no files will be added to it."""
        return not candidate.why_incomplete(self._layout) or candidate.is_final(marker=self._marker)

    def ready(self, choice: Choice, found: Candidates) -> list[CheckpointCandidate]:
        """Those to be published whose turn it is now: no older checkpoint may turn out to be complete too. Those that
        could not be read before come last."""
        due = self._in_order(filter(self._is_due, choice.publish), found)
        return sorted(due, key=lambda candidate: candidate.relative in self._postponed)

    def being_written(self, found: Candidates) -> CheckpointCandidate | None:
        """The oldest checkpoint of which some files are complete.

        One older than the newest version, or one that was abandoned, is left alone until it is complete: most such
        checkpoints are remains of a crash.
        """
        partial = (
            c
            for c in found.values()
            if c.files
            and not (c.in_pieces or c.refusal or c.relative in self._misfits)
            and self._paths.is_policy(c.relative)
            and self._is_new(c)
            and self._is_due(c)
            and self._abandoned.get(c.relative) != c.identity
        )
        return min(self._in_order(partial, found), key=lambda candidate: candidate.order, default=None)

    def _is_new(self, candidate: CheckpointCandidate) -> bool:
        return candidate.order >= self._published_until

    def _is_due(self, candidate: CheckpointCandidate) -> bool:
        return runtime.monotonic() >= self._postponed.get(candidate.relative, 0.0)

    def _in_order(self, candidates: Iterable[CheckpointCandidate], found: Candidates) -> list[CheckpointCandidate]:
        """Those of the candidates that no older checkpoint may turn out to precede.

        A file that was closed before inotify watched its directory is known to be complete two scans later than its
        successors. For no longer than that a checkpoint delays others: not while it is being written, nor for the many
        scans after which a file counts as complete whose writers nobody knows.
        """
        undetermined = [
            c for c in found.values() if c.undetermined and self._paths.is_policy(c.relative) and self._is_new(c)
        ]
        return [c for c in candidates if not any(other.order < c.order for other in undetermined)]
