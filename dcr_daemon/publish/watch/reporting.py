"""What the watcher says of checkpoints that it does not publish: each thing once, until it changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.events import CheckpointSkipped, Degraded, Emit, Notice, TensorFollowed, Waiting
from dcr_daemon.publish.watch.candidate import CheckpointCandidate
from dcr_daemon.publish.watch.ingest import CheckpointMisfit
from dcr_daemon.publish.watch.once import Cause, NotPublished
from dcr_daemon.publish.watch.policy_paths import PolicyPaths, shape_of
from dcr_daemon.publish.watch.selection import Candidates, Choice
from dcr_daemon.wording import shorten

REMEMBERED = 1000  #: things that were said of checkpoints that are gone


class WatchReporter:
    """Emits what is waited for and what is passed by below the directory `watch`."""

    def __init__(self, watch: Path, paths: PolicyPaths, layout: Layout, *, emit: Emit) -> None:
        self._watch, self._paths, self._layout, self._emit = watch, paths, layout, emit
        self._waiting: dict[str, Notice] = {}
        self._followed: set[str] = set()
        self._unread: Collection[str] = ()
        self._told: dict[tuple[Cause | Literal["not_read"], str], int] = {}  #: hashes of texts, by checkpoint or shape

    def scanned(self, found: Candidates, *, unread: Collection[str]) -> None:
        """What a scan found, `unread` being `CheckpointScanner.unread`. What is gone is forgotten in the end."""
        if new := sorted(set(unread).difference(self._unread)):
            old = f"not published, being as old as versions of which the seals were not read: {shorten(new)}"
            self._emit(Degraded(what=f"{old}; to publish one all the same, `touch` its files"))
        self._unread = unread
        if len(self._told) > REMEMBERED:
            present = {*found, *map(shape_of, found)}
            gone = [key for key in self._told if key[1] not in present]
            for key in gone[: max(0, len(gone) - REMEMBERED)]:
                del self._told[key]

    def _was_said(self, kind: Cause | Literal["not_read"], name: str, text: str) -> bool:
        """Whether this is the last that was said of it."""
        return self._told.get((kind, name)) == hash(text)

    def _is_news(self, kind: Cause | Literal["not_read"], name: str, text: str) -> bool:
        """Whether this was not the last that was said of it; from now on it is."""
        news = not self._was_said(kind, name, text)
        self._told[kind, name] = hash(text)
        return news

    def misfit(self, error: CheckpointMisfit) -> NotPublished:
        """A checkpoint does not fit the stream's layout."""
        skipped = NotPublished(error.relative, "misfit", error.message, error.hint)
        self._skip(skipped, key=error.relative)
        return skipped

    def not_read(self, candidate: CheckpointCandidate) -> None:
        """A checkpoint is taken from some of the weight files in its directory."""
        names = shorten(candidate.passed_by)
        if names and self._is_news("not_read", candidate.relative, names):
            read = shorten(sorted(candidate.files))
            self._emit(Degraded(what=f"{candidate.relative}: not read beside {read}, as loaders do: {names}"))

    def followed(self, tensors: Mapping[str, str]) -> None:
        """A checkpoint was published that leaves out tensors, which follow others."""
        for name, source in tensors.items():
            if name not in self._followed:
                self._followed.add(name)
                self._emit(TensorFollowed(name=name, source=source))

    def passed_by(self, choice: Choice) -> list[NotPublished]:
        """Complete checkpoints that are not published because others are."""
        reason = f"the checkpoints that are published are {self._paths.shape}; --select GLOB says which are the policy"
        other = [NotPublished(c.relative, "other_shape", reason) for c in choice.other_shape]
        for skipped in other:
            self._skip(skipped, key=shape_of(skipped.path))
        reason = "a newer checkpoint is published, or was; to publish this one all the same, `touch` its files"
        outdated = [NotPublished(c.relative, "outdated", reason) for c in choice.outdated]
        for skipped in outdated:
            self._skip(skipped, key=skipped.path)
        return other + outdated

    def _skip(self, skipped: NotPublished, *, key: str) -> None:
        if self._is_news(skipped.cause, key, skipped.reason):
            hint = f" ({skipped.hint})" if skipped.hint else ""
            self._emit(CheckpointSkipped(path=skipped.path, cause=skipped.cause, reason=skipped.reason + hint))

    def left_out(self, found: Candidates) -> list[NotPublished]:
        """Checkpoints of the policy that `--once` does not publish because they are incomplete, or were refused."""
        skipped = []
        for name, notice in self._incomplete(found).items():
            self._emit(Degraded(what=f"not published: {notice.what}"))
            cause: Cause = "refused" if found[name].refusal else "incomplete"
            skipped.append(NotPublished(name, cause, found[name].why_incomplete(self._layout)))
        return skipped

    def waiting(self, found: Candidates, *, watched: bool) -> None:
        """There is nothing to publish now. Says what is waited for; `watched` if the directory is there."""
        notices = self._incomplete(found)
        if not notices:
            gone = "" if watched else ", which is not there any more"
            notices = {"": Waiting(what=f"a checkpoint below {self._watch}{gone}")}
        for name, notice in notices.items():
            if self._waiting.get(name) != notice:
                self._emit(notice)
        self._waiting = notices

    def nothing_found(self) -> None:
        """`--once` has found no checkpoint at all."""
        self._emit(Waiting(what=f"nothing to publish: no complete checkpoint below {self._watch} is new"))

    def _incomplete(self, found: Candidates) -> dict[str, Notice]:
        """A notice for each checkpoint of the policy that is not complete, or was refused."""
        notices: dict[str, Notice] = {}
        for name, candidate in found.items():
            if not self._paths.is_policy(name):
                continue
            if candidate.refusal:
                if not self._was_said("misfit", name, candidate.refusal):
                    notices[name] = Degraded(what=f"{name} is refused: {candidate.refusal}")
            elif why := candidate.why_incomplete(self._layout):
                notices[name] = Waiting(what=f"{name} is incomplete: {why}")
        return notices
