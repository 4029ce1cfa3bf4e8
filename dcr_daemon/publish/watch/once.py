"""What `dcr publish --once` published and what not: its result, and the error that its exit code comes from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from dcr_daemon.errors import Incompatible, InputIncomplete
from dcr_daemon.wording import LIMIT, cut, shorten

LISTED = 200  #: checkpoints of either kind that the result lists
REASON_LENGTH = 500  #: characters of a reason in it

#: Why a checkpoint was not published. The last two are no failure: another one is the policy, or is newer.
Cause = Literal["misfit", "refused", "incomplete", "other_shape", "outdated"]
_NEEDS_A_PERSON: tuple[Cause, ...] = ("misfit", "refused")


@dataclass(frozen=True, slots=True)
class Published:
    """A checkpoint that is a version now; `not_read` names weight files in its directory that are no part of it."""

    path: str
    version: int
    step: int | None
    not_read: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NotPublished:
    """A checkpoint that is not, and why: `reason` is for people, `hint` says what to do."""

    path: str
    cause: Cause
    reason: str
    hint: str = ""


@dataclass(slots=True)
class OnceReport:
    """All checkpoints below the watched directory that were no versions at the start, each in one of the lists."""

    published: list[Published] = field(default_factory=list)
    not_published: list[NotPublished] = field(default_factory=list)

    def check(self) -> None:
        """Raise if a checkpoint of the policy was left out.

        Raises:
            Incompatible: one does not fit the stream, or contradicts itself.
            InputIncomplete: one is incomplete, or changed while it was read; it may be published later.
        """
        if wrong := [skipped for skipped in self.not_published if skipped.cause in _NEEDS_A_PERSON]:
            raise Incompatible(_named(wrong), hint=wrong[0].hint)
        if unfinished := [skipped for skipped in self.not_published if skipped.cause == "incomplete"]:
            raise InputIncomplete(_named(unfinished), hint="run the command again when they are complete")

    def as_json(self) -> dict[str, Any]:
        """The result for programs: the first `LISTED` of each list, and how many there are."""
        published = [
            {"path": p.path, "version": p.version, "step": p.step, "not_read": p.not_read[:LIMIT]}
            for p in self.published[:LISTED]
        ]
        skipped = [
            {"path": s.path, "cause": s.cause, "reason": cut(s.reason, REASON_LENGTH)}
            for s in self.not_published[:LISTED]
        ]
        return {
            "published": published, "not_published": skipped,
            "published_total": len(self.published), "not_published_total": len(self.not_published),
        }  # fmt: skip


def _named(skipped: list[NotPublished]) -> str:
    if len(skipped) == 1:
        return f"{skipped[0].path} is not published: {skipped[0].reason}"
    named = shorten([f"{one.path}: {cut(one.reason, REASON_LENGTH)}" for one in skipped], separator="; ")
    return f"{len(skipped)} checkpoints are not published: {named}"
