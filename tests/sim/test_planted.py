"""A simulation that finds nothing proves nothing: every planted bug is found, and by a rule that is written down."""

from __future__ import annotations

from pathlib import Path

import pytest
from sim.planted.bugs import BUGS
from sim.play import run_scenario

SEEDS = 60  #: tried per scenario
PAGE = Path(__file__).parents[2] / "docs" / "PROTOCOL.md"


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    for seed in range(SEEDS):
        for scenario in BUGS[name].scenarios:
            if not run_scenario(scenario, seed, planted=name).ok:
                return
    pytest.fail(f"{SEEDS} seeds each of {', '.join(BUGS[name].scenarios)} do not find it: {BUGS[name].what}")
