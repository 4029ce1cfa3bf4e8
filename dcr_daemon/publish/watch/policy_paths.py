"""What the path of a checkpoint says: its training step, and whether it is the policy.

Paths are relative to the watched directory. The *shape* of a path is the path with `*` for each number:
`global_step_7/actor/huggingface` has the shape `global_step_*/actor/huggingface`. An average, a copy of the best
checkpoint or a critic has another shape than the policy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from dcr_daemon.errors import UsageError

DEPTH = 4  #: levels below the watched directory at which checkpoints are looked for
_NUMBER = re.compile(r"\d+")
#: Words before a number that is a training step, and words before one that probably is.
_STEP = re.compile(r"(?:step|iter|iteration|update)s?[-_=.]?$", re.IGNORECASE)
_SAVED = re.compile(r"(?:checkpoint|ckpt)s?[-_=.]?$", re.IGNORECASE)
#: Names that writers give a directory before they rename it to its own.
_TEMPORARY = re.compile(r"^(?:tmp|temp|partial)[-_.]+|[-_.]+(?:tmp|temp|partial|incomplete)$", re.IGNORECASE)
_STEP_LIMIT = 1 << 63


def shape_of(relative: str) -> str:
    """The path with `*` for each number, and without marks of a directory that is renamed when it is written."""
    return "/".join(_NUMBER.sub("*", _TEMPORARY.sub("", part) or part) for part in relative.split("/"))


def is_temporary(relative: str) -> bool:
    """Whether a directory of this name is probably renamed when it is written, as `tmp-checkpoint-3` is."""
    return any(_TEMPORARY.search(part) for part in relative.split("/"))


def step_in(relative: str, pattern: re.Pattern[str] | None = None, *, earlier: str | None = None) -> int | None:
    """The training step of the checkpoint at a path; None if the path has none.

    It is the number behind a word for steps, else the one behind a word for checkpoints, else one that differs from
    the path `earlier`, else any; of several equally good ones the last.

    Args:
        pattern: finds the step instead: its first group, or what it matches.
        earlier: the path of another checkpoint of the same shape.
    """
    if pattern:
        found = pattern.search(relative)
        digits = _NUMBER.search(found[1 if pattern.groups else 0] or "") if found else None
        return _bounded(digits[0]) if digits else None
    numbers = list(_NUMBER.finditer(relative))
    others = _NUMBER.findall(earlier) if earlier is not None and shape_of(earlier) == shape_of(relative) else []

    def rank(place: int) -> tuple[bool, bool, bool, int]:
        number = numbers[place]
        before = relative[: number.start()]
        varies = len(others) == len(numbers) and others[place] != number[0]
        return bool(_STEP.search(before)), bool(_SAVED.search(before)), varies, place

    best = max(range(len(numbers)), key=rank, default=None)
    return None if best is None else _bounded(numbers[best][0])


def _bounded(digits: str) -> int | None:
    """The number, if a record can hold it."""
    return int(digits) if len(digits) < 20 and int(digits) < _STEP_LIMIT else None


def _compiled(step: str) -> re.Pattern[str]:
    try:
        return re.compile(step)
    except re.error as error:
        raise UsageError(
            f"--step-pattern {step!r} is not a regular expression: {error}", hint="such as 'step_([0-9]+)'"
        ) from error


class PolicyPaths:
    """Which checkpoints below the watched directory are the policy: those that `select` names, or without it those of
    the shape that was published last. Remembers the path that was published last.

    Args:
        select: globs of whole paths, component by component.
        step: a regular expression that finds the training step in a path; None for the known patterns.

    Raises:
        UsageError: a glob that no checkpoint can match, or no regular expression.
    """

    def __init__(self, select: Sequence[str] = (), step: str | None = None) -> None:
        self._pattern = None if step is None else _compiled(step)
        self._select = [glob.strip("/").split("/") for glob in select]
        for glob, parts in zip(select, self._select, strict=True):
            if not 1 <= len(parts) <= DEPTH or any(part in ("", ".", "..") for part in parts):
                raise UsageError(
                    f"--select {glob!r} names no directory 1 to {DEPTH} levels below the watched one",
                    hint="such as 'checkpoint-*' or 'global_step_*/actor/huggingface'",
                )
        self._newest: str | None = None  #: path of the checkpoint that was published last

    def selects(self, relative: str) -> bool:
        """Whether the path is among those that the user selected; every path, if nothing was selected."""
        parts = relative.split("/")
        return not self._select or any(
            len(globs) == len(parts) and all(map(fnmatchcase, parts, globs)) for globs in self._select
        )

    def learn(self, relative: str) -> None:
        """The checkpoint at this path is the newest version. One that will be renamed tells nothing."""
        if not is_temporary(relative):
            self._newest = relative

    @property
    def shape(self) -> str | None:
        """The shape that a checkpoint must have to be published; None while any will do."""
        return None if self._select or self._newest is None else shape_of(self._newest)

    def is_policy(self, relative: str) -> bool:
        """Whether a checkpoint that was found may be published, by its path."""
        return self.shape in (None, shape_of(relative))

    def step(self, relative: str) -> int | None:
        """The training step of the checkpoint at a path."""
        return step_in(relative, self._pattern, earlier=self._newest)
