"""A rank dies, or sleeps, at every instant that it passes: the group starts again, and the next version is right.

Which instants there are is written down by ranks that pass them (`instants.py`); a test compares the lists.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.faults.sampling import parameters
from support.processes.fork_server import ForkServer
from support.ranks.failpoints import IN_FAILURE, LEADER, MEMBER, OUTSIDE
from support.ranks.group_scenes import Ranks
from support.ranks.programs.steps import FENCED

pytestmark = pytest.mark.crash

MESH, WORLD = "3", 3
STEPS = 3
FAILING, FAILED = 1, 2  #: a rank, and the step at which it cannot take part at first
EVERY_TIME = {"killed": 8, "stopped": 2, "left over": 3}  #: cases of each test in `make test`
NAP = 0.5  #: seconds that a stopped rank sleeps after its group has nothing left to do but wait for it


@dataclass(frozen=True)
class Case:
    """Rank `rank` meets its fate at its n-th pass of an instant, in a run in which one rank fails or none does."""

    rank: int
    instant: str
    n: int = 1
    failing: bool = False

    def __str__(self) -> str:
        return f"rank-{self.rank}-{self.instant}-{self.n}"

    def failpoint(self, action: str) -> str:
        return f"{self.instant}:{self.n}={action}"

    @property
    def spoilt(self) -> dict[int, int]:
        return {FAILING: FAILED} if self.failing else {}


def cases(*, without: Container[str] = ()) -> list[Case]:
    """Rank 0 at its instants, a middle one and the last at theirs; the second pass too where there is one."""
    of_rank = {0: LEADER, 1: MEMBER, WORLD - 1: MEMBER}
    every = [
        Case(rank, instant, n)
        for rank, instants in of_rank.items()
        for instant, passes in instants.items()
        for n in range(1, min(passes, 2) + 1)
    ]
    every += [Case(rank, instant, failing=True) for rank, instants in enumerate(IN_FAILURE) for instant in instants]
    return [case for case in every if case.instant not in without]


CASES = cases()


@pytest.mark.parametrize("case", parameters(CASES, EVERY_TIME["killed"], group=lambda case: case.instant))
async def test_a_rank_is_killed_and_the_group_starts_again(
    case: Case, ranks: ForkServer, tmp_path: Path, s3_stream: str, record_property: Callable[[str, object], None]
) -> None:
    group = Ranks(ranks, tmp_path, s3_stream)
    group.go(*range(1, STEPS + 1))
    armed = {case.rank: case.failpoint("kill")}
    await group.killed(group.start(MESH, STEPS, armed=armed, spoilt=case.spoilt), case.rank)
    await group.through(group.start(MESH, STEPS))
    await group.check(STEPS, worlds=[WORLD] * STEPS)
    record_property("site", f"rank {case.instant}")
    record_property("kills", 1)


@pytest.mark.parametrize("case", parameters(CASES, EVERY_TIME["stopped"], group=lambda case: case.instant))
async def test_a_rank_that_sleeps_is_waited_for(case: Case, ranks: ForkServer, tmp_path: Path, s3_stream: str) -> None:
    group = Ranks(ranks, tmp_path, s3_stream)
    group.go(*range(1, STEPS + 1))
    life = group.start(MESH, STEPS, armed={case.rank: case.failpoint("stop")}, spoilt=case.spoilt)
    await group.stopped(life, case.rank)
    await asyncio.sleep(NAP)
    life[case.rank].send(signal.SIGCONT)
    await group.through(life)
    await group.check(STEPS, worlds=[WORLD] * STEPS)


@pytest.mark.parametrize(
    "case",
    parameters(cases(without=OUTSIDE), EVERY_TIME["left over"], group=lambda case: case.instant),
)
async def test_a_rank_of_an_older_group_never_gets_into_a_seal(
    case: Case, ranks: ForkServer, tmp_path: Path, s3_stream: str, record_property: Callable[[str, object], None]
) -> None:
    """It sleeps; its group is ended and started elsewhere, publishes, and goes on when the sleeper wakes up."""
    group = Ranks(ranks, tmp_path, s3_stream)
    group.go(1, 2)
    old = group.start(MESH, STEPS, armed={case.rank: case.failpoint("stop")}, spoilt=case.spoilt)
    await group.stopped(old, case.rank)
    await old.end(spare=[case.rank])
    new = group.start(MESH, STEPS, state="elsewhere")
    await group.sealed(2)
    old[case.rank].send(signal.SIGCONT)
    group.go(3)
    await group.through(new)
    assert await old[case.rank].wait() == FENCED, old[case.rank].said()
    await group.check(STEPS, worlds=[WORLD] * STEPS)
    record_property("zombies", 1)


@pytest.mark.parametrize("step", [1, 2])
async def test_a_rank_that_cannot_take_part_fails_the_update_on_all_and_the_next_is_right(
    step: int, ranks: ForkServer, tmp_path: Path, s3_stream: str
) -> None:
    """Half of its weights are missing at first: before the ranks have agreed on who holds what, and after."""
    group = Ranks(ranks, tmp_path, s3_stream)
    group.go(*range(1, STEPS + 1))
    life = group.start(MESH, STEPS, spoilt={FAILING: step})
    await group.through(life)
    assert all(f"step {step}, again" in process.said() for process in life.processes)
    await group.check(STEPS, worlds=[WORLD] * STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("failing", [False, True], ids=["smooth", "failing"])
async def test_every_instant_that_a_rank_passes_is_tried(
    failing: bool, ranks: ForkServer, tmp_path: Path, s3_stream: str
) -> None:
    group = Ranks(ranks, tmp_path, s3_stream)
    group.go(*range(1, STEPS + 1))
    await group.through(group.start(MESH, STEPS, spoilt={FAILING: FAILED} if failing else {}, passed=True))
    for rank, listed in enumerate((LEADER, MEMBER, MEMBER)):
        passed = (tmp_path / f"passed-0-{rank}").read_text().split()
        besides = set(IN_FAILURE[rank] if failing else {})
        assert set(listed) <= set(passed) <= set(listed) | besides, f"rank {rank}"
        # A rank that reads the abort before it has begun to diff has nothing to undo.
        assert rank > FAILING or besides <= set(passed), f"rank {rank}"
        assert {name: passed.count(name) >= n for name, n in listed.items()} == dict.fromkeys(listed, True)
