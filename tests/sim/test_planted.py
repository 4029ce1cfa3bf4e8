"""A simulation that finds nothing proves nothing: every must has its planted bug, and every planted bug is found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sim.planted.bugs import BUGS
from sim.runner import SCENARIOS, run_scenario

SEEDS = 200  #: tried per scenario until one finds the bug; the rarest shows in 3 seeds of 100
TESTS = Path(__file__).parents[1]
MUSTS = re.findall(r"^\*\*([LPEFT]\d)\b", (TESTS.parent / "docs" / "PROTOCOL.md").read_text(), re.MULTILINE)
#: what no world of one engine and honest hashes can break; the test that fails without it
ELSEWHERE = {
    "L7": ("subscribe/test_status.py", "def test_"),
    "E9": ("vllm_plugin/test_endpoint.py", "test_engines_that_differ_are_of_no_version_and_repaired_by_a_load"),
    "F2": ("canonical/test_fingerprint.py", "multilinear"),
    "T2": ("ledger/test_fold.py", "test_keys_are_remembered"),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    assert set(BUGS[name].scenarios) <= set(SCENARIOS)
    for seed in range(SEEDS):
        for scenario in BUGS[name].scenarios:
            if not run_scenario(scenario, seed, planted=name).ok:
                return
    pytest.fail(f"{SEEDS} seeds each of {', '.join(BUGS[name].scenarios)} do not find it: {BUGS[name].what}")


def test_every_must_has_a_planted_bug() -> None:
    planted = {must for bug in BUGS.values() for must in re.findall(r"[LPEFT]\d", bug.must)}
    assert set(MUSTS) - planted == set(ELSEWHERE), "plant a bug for a new must, or name the test that keeps it"
    for file, name in ELSEWHERE.values():
        assert name in (TESTS / file).read_text()
