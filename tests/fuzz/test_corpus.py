"""Every input that fuzzing kept, and everything that ever broke a parser, again: a value or a typed error, bounded.

It runs without the fuzzer. `run.py` looks for new ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz import seeds, targets

HERE = Path(__file__).parent
KEPT = HERE / "corpus"


@pytest.mark.parametrize("name", sorted(targets.TARGETS))
def test_a_value_or_a_typed_error(name: str) -> None:
    run, kept = targets.TARGETS[name], sorted((KEPT / name).glob("*"))
    inputs = [*seeds.seeds(name), *(path.read_bytes() for path in kept)]
    for body in inputs:
        run(body)  # kernels and caches of the first call are nobody's input
    for body in inputs:
        targets.bounded(run, body)


def test_the_corpus_belongs_to_targets_and_stays_small() -> None:
    assert {path.name for path in KEPT.iterdir()} <= targets.TARGETS.keys()
    assert sum(path.stat().st_size for path in KEPT.rglob("*") if path.is_file()) < 300_000
