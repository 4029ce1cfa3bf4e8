"""What the time of a refit was spent on: for each version the phases of all its processes, from first to last.

A refit lasts from the beginning of the update at the publisher to the commit on the last replica. Phases overlap, so
their shares add up to more than one. `alone` is the time in which a phase ran and no other did: what would be saved if
it took no time at all. What is left is waiting: round trips and looks at the ledger in which nothing else was done.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dcr_daemon.tracing.timeline import Slice

#: In the order in which they run. `see` lies between two processes: from the seal to the look that found it.
PHASES = (
    "open", "construct", "upload", "seal", "see", "download", "stage", "prepare",
    "rest", "begin", "apply", "sums", "commit", "resume",
)  # fmt: skip
#: A phase, and the one that it consists of as far as that runs: `stage` is a download and what comes with it.
_CONTAINS = {"stage": "download"}

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Phase:
    """`seconds`: in which any process was in it; `alone`: and no process in another."""

    seconds: float
    alone: float


@dataclass(frozen=True, slots=True)
class Refit:
    """One version on its way. Times in seconds since 1970, `bytes` as sealed (None: no trace of the publisher).

    `commits` are the replicas with the time of their commit.
    """

    version: int
    slices: Sequence[Slice]
    begin: float
    end: float
    bytes: int | None
    commits: dict[str, float]
    phases: dict[str, Phase]
    waiting: float
    skew: float = 0.0  #: seconds by which a replica committed before the seal: its clock is wrong by more than that

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def lower_bound(self, rate: float, rtt: float) -> float | None:
        """Seconds that the bytes take at `rate` bytes per second, and two round trips of `rtt` seconds."""
        return None if self.bytes is None else self.bytes / rate + 2 * rtt


def find_refits(slices: Iterable[Slice]) -> list[Refit]:
    """One for each stream and version of which a seal or a commit is in the trace, in order."""
    versions: dict[tuple[str, int], list[Slice]] = {}
    for one in slices:
        versions.setdefault((one.stream, one.version), []).append(one)
    found = (_refit(version, of_version) for (_, version), of_version in sorted(versions.items()))
    return [refit for refit in found if refit]


def _refit(version: int, slices: list[Slice]) -> Refit | None:
    seals = [one for one in slices if one.name == "sealed"]
    commits = {one.process: one.end for one in slices if one.name == "committed"}
    if not seals and not commits:
        return None
    attempt = seals[0].args.get("attempt") if seals else None
    of_attempt = [one for one in slices if attempt is None or one.args.get("attempt", attempt) == attempt]
    phases = [one for one in of_attempt if one.name in PHASES and not one.instant]
    if not phases:
        return None
    skew = 0.0
    if seals:
        sealed = min(one.begin for one in seals)
        skew = max(0.0, sealed - min(commits.values(), default=sealed))
        phases += [_seen(one, sealed) for one in of_attempt if one.name == "seal seen" and one.begin > sealed]
    begin = min(one.begin for one in phases)
    end = max(commits.values(), default=max(one.end for one in phases))
    spans = {
        name: _union((one.begin, min(one.end, end)) for one in phases if one.name == name and one.begin < end)
        for name in PHASES
    }
    spans = {name: some for name, some in spans.items() if some}
    alone, waiting = _alone(spans, begin, end)
    return Refit(
        version=version,
        slices=sorted(phases + [one for one in of_attempt if one.instant], key=lambda one: one.begin),
        begin=begin,
        end=end,
        bytes=seals[0].args.get("bytes") if seals else None,
        commits=commits,
        phases={name: Phase(sum(b - a for a, b in some), alone[name]) for name, some in spans.items()},
        waiting=waiting,
        skew=skew,
    )


def _seen(one: Slice, sealed: float) -> Slice:
    return Slice(one.process, one.role, one.stream, "see", sealed, one.begin, args=one.args)


def _union(spans: Iterable[Span]) -> list[Span]:
    """The same time without overlaps."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _alone(spans: dict[str, list[Span]], begin: float, end: float) -> tuple[dict[str, float], float]:
    """Of each phase the seconds in which no other ran, and the seconds in which none did."""
    alone, waiting = dict.fromkeys(spans, 0.0), 0.0
    moments = sorted({begin, end, *(at for some in spans.values() for span in some for at in span)})
    for left, right in itertools.pairwise(moments):
        if left < begin or right > end:
            continue
        running = {name for name, some in spans.items() if any(a <= left and right <= b for a, b in some)}
        running -= {outer for outer, inner in _CONTAINS.items() if inner in running}
        if not running:
            waiting += right - left
        elif len(running) == 1:
            alone[running.pop()] += right - left
    return alone, waiting
