"""A simulation that finds nothing proves nothing: every must has its planted bug, and every planted bug is found."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from sim.planted.bugs import BUGS, Bug, planted
from sim.runner import SCENARIOS, run_scenario

from dcr_daemon.engine import deltas
from dcr_daemon.engine.directory import engine
from dcr_daemon.engine.directory.checkout import Checkout

SEEDS = 200  #: tried per scenario until one finds the bug; the rarest shows in 3 seeds of 100
TESTS = Path(__file__).parents[1]
MUSTS = re.findall(r"^\*\*([LPEFT]\d)\b", (TESTS.parent / "docs" / "PROTOCOL.md").read_text(), re.MULTILINE)
MISWRITTEN = re.compile("TypeError|AttributeError|NameError|ImportError")
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
            outcome = run_scenario(scenario, seed, planted=name)
            if not outcome.ok:
                assert not MISWRITTEN.search(outcome.violation), "the patch itself fails, instead of doing wrong"
                return
    pytest.fail(f"{SEEDS} seeds each of {', '.join(BUGS[name].scenarios)} do not find it: {BUGS[name].what}")


def test_every_must_has_a_planted_bug() -> None:
    planted = {must for bug in BUGS.values() for must in re.findall(r"[LPEFT]\d", bug.must)}
    assert set(MUSTS) - planted == set(ELSEWHERE), "plant a bug for a new must, or name the test that keeps it"
    for file, name in ELSEWHERE.values():
        assert name in (TESTS / file).read_text()


def test_a_patch_without_effect_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(owner: Any, attribute: str, wrong: Any, why: str) -> None:
        monkeypatch.setitem(BUGS, "no_bug", Bug("no_bug", "", "", (), lambda put: put(owner, attribute, wrong)))
        right = vars(owner).get(attribute)
        with pytest.raises(AssertionError, match=why), planted("no_bug"):
            pass
        assert vars(owner).get(attribute) is right

    refused(Checkout, "_hide", lambda self: None, "has no _hide")
    refused(engine, "SHARD_BYTES", 1, "looks up")  # read once, for a default
    refused(Checkout, "_hide_config", lambda: None, "takes other arguments")
    refused(deltas, "check_chain", lambda *_, **__: None, "imported by name")
