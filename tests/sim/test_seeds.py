"""Seeds, played: whatever dies, whenever, nothing is lost and nobody serves a mixture.

`DCR_SIM_SEEDS` and `DCR_SIM_FIRST` choose how many and which; a failure names the command that replays it.
"""

from __future__ import annotations

import os

import pytest
from sim.runner import SCENARIOS, run_scenario, run_seed

SEEDS = int(os.environ.get("DCR_SIM_SEEDS", "1000"))
FIRST = int(os.environ.get("DCR_SIM_FIRST", "0"))
BLOCK = 20


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, BLOCK))
def test_nothing_is_lost_whatever_dies(first: int) -> None:
    for seed in range(first, min(first + BLOCK, FIRST + SEEDS)):
        outcome = run_seed(seed)
        again = f"python tests/sim/run.py --scenario {outcome.scenario} --seed {seed} --trace"
        assert outcome.ok, f"{outcome.violation}\nreplay: {again}"


def test_a_seed_says_all() -> None:
    for seed in range(2 * len(SCENARIOS)):
        assert run_seed(seed).trace == run_seed(seed).trace, f"seed {seed} does not repeat"


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_reaches_its_end(name: str) -> None:
    outcome = run_scenario(name, 0)
    assert outcome.ok, outcome.violation
    assert outcome.sealed
    assert outcome.commits
