"""Real Megatron ranks train and publish; every version is Megatron-Bridge's own export, bit for bit.

Four processes over gloo (tests/support/megatron/program.py): `GPTModel`s of megatron-core, its schedules, gradient
buckets and optimizers, with real losses. After each step Bridge's mappings export the model, and `publish` gets the
chunks on every rank. `make oracle-megatron` runs it, with checkouts of both libraries.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.megatron.cases import CASES, OTHERS, REFUSED, WORLD, Case
from support.ranks.launch import Group
from support.ranks.stream_checks import check_stream, layout_of, weights_of

ABSENT = [name for name in ("MEGATRON_LM", "MEGATRON_BRIDGE") if name not in os.environ]
SECONDS = 840.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(ABSENT), reason=f"no checkout is named by {' and '.join(ABSENT)}: see `make help`"),
]

#: what one group of processes goes through, since most of its time goes into imports
GROUPS = {
    "experts": [name for name in CASES if name.startswith("moe")],
    "others": [*(name for name in CASES if not name.startswith("moe")), REFUSED],
}


@pytest.mark.parametrize("names", GROUPS.values(), ids=GROUPS)
def test_versions_are_the_exports_of_megatron_bridge(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).mkdir()
    group = Group("support.megatron.program", [str(tmp_path), *names], WORLD, tmp_path)
    assert group.wait(SECONDS), group.said()
    wrong = {name: text for name in names if (text := judged(name, tmp_path / name))}
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())


def judged(name: str, place: Path) -> str:
    """What is wrong with a case, in words; empty if nothing is. The other cases are judged all the same."""
    try:
        check_refusals(place) if name == REFUSED else check_case(name, CASES[name], place)
    except AssertionError as error:
        return str(error)
    return ""


def check_case(name: str, case: Case, place: Path) -> None:
    base, taken = weights_of(place / "step-0"), weights_of(place / "start-0")
    assert all(np.array_equal(taken[one], bits) for one, bits in base.items()), "Bridge does not give what it took"
    steps = (len(case.rates) + case.early) * len(case.starts)
    exports = {step: weights_of(place / f"step-{step}") for step in range(1, steps + 1)}
    layout = layout_of(place / "step-0")
    told = asyncio.run(check_stream((place / "bucket").as_uri(), place / "built", exports, layout))
    assert [len(one.parts) for one in told] == [WORLD] * steps
    shares = [one.seal.changed / one.seal.elements for one in told]
    print(f"{name}: {steps} versions; {', '.join(f'{share:.2%}' for share in shares)} of the elements changed")
    for number in range(len(case.starts)):
        check_report(case, json.loads((place / f"mapped-{number}.json").read_text()))


def check_report(case: Case, reports: Sequence[str]) -> None:
    """What is residual is named, with its reason, once in each start."""
    assert len(reports) == 1, reports
    assert ("residual  none" in reports[0]) == (not case.residual), reports
    words = {"paper": ["left out", "q_proj", "embed_tokens"], "marks": ["split along dimension 0", "o_proj"]}
    assert all(word in reports[0] for word in words.get(case.residual, ())), reports


def check_refusals(place: Path) -> None:
    """Every rank tells the reason, whoever found it first."""
    for rank in range(WORLD):
        said = json.loads((place / f"refusals-{rank}.json").read_text())
        assert len(said) == len(OTHERS), said
        assert all("num_attention_heads is 8 in the model" in one for one in said), said
