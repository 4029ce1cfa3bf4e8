"""Architectures of vLLM, each with a small model of its own: a dozen per commit, all of them in `make faults`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from architectures.outcome import Outcome, table
from architectures.processes import Checks, open_checks
from support.faults.sampling import drawn

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def checks() -> Iterator[Checks]:
    with open_checks() as opened:
        yield opened


def test_a_dozen_architectures_are_refitted_exactly_or_refused(checks: Checks) -> None:
    outcomes = [checks.check(name) for name in drawn(checks.names(), 12)]
    assert not [outcome.line() for outcome in outcomes if outcome.bad]


def test_the_table_has_one_row_for_each_reason() -> None:
    outcomes = [Outcome("A", "exact"), Outcome("B", "refused", "it | is"), Outcome("C", "exact", computed=1)]
    text = table([*outcomes, Outcome("D", "exact")])
    assert text.startswith("4 architectures: 3 exact, 1 refused.\n")
    assert "| exact |  | A, D |\n" in text
    assert "| refused | it / is | B |\n" in text
