"""Real training ranks publish what they hold: every version is the framework's own export, and nobody gathers.

Four processes (tests/support/ranks/programs/training.py) train small real models, cut in every way that
`training_cases.py` lists. The export that each version is compared with is made by the framework itself, by gathering,
before `publish` is called.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from support.ranks.launch import Group
from support.ranks.stream_checks import Told, changed_elements, check_stream, layout_of, weights_of
from support.ranks.training_cases import BY_NAME, CASES, Case

pytestmark = pytest.mark.slow

#: what one group of processes goes through, since most of its time goes into imports
GROUPS = {
    "fsdp": ["fsdp", "fsdp_tied", "uneven", "columns", "hybrid"],
    "tensor_parallel": ["fsdp_over_tp", "fsdp_over_tp_bf16", "tp_plan", "fsdp_over_tp_plan", "replicas"],
    "alone": ["alone"],
}
SECONDS = 600.0  #: for a group, on a machine that does other things as well


def test_every_case_is_in_a_group() -> None:
    assert sorted(name for group in GROUPS.values() for name in group) == sorted(case.name for case in CASES)


@pytest.mark.parametrize("names", GROUPS.values(), ids=GROUPS)
def test_versions_are_the_exports_of_the_framework_and_no_rank_gathers(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).mkdir()
    group = Group("support.ranks.programs.training", [str(tmp_path), *names], BY_NAME[names[0]].world, tmp_path)
    through = group.wait(SECONDS)
    wrong = [text for name in names if (text := judged(BY_NAME[name], tmp_path / name))]
    assert through, "\n".join([*wrong, group.said()])
    assert not wrong, "\n".join(wrong)


def judged(case: Case, place: Path) -> str:
    """What is wrong with a case, in words; empty if nothing is. The other cases are judged all the same."""
    reports = sorted(place.glob("rank-*.json"))
    if len(reports) < case.world:
        return f"{case.name}: only {len(reports)} of {case.world} ranks came to its end"
    try:
        told = asyncio.run(check_versions(case, place))
        check_rates(case, place, told)
        check_memory(case, place, reports)
    except AssertionError as error:
        return f"{case.name}: {error}"
    return ""


async def check_versions(case: Case, place: Path) -> list[Told]:
    base = weights_of(place / "base")
    exports = {step: weights_of(place / f"step-{step}") for step in range(len(case.rates) + 1)}
    assert all((exports[0][name] == bits).all() for name, bits in base.items()), "the export itself is wrong"
    del exports[0]
    told = await check_stream((place / "bucket").as_uri(), place / "materialised", exports)
    assert [len(one.parts) for one in told] == [case.world] * len(exports)
    return told


def check_rates(case: Case, place: Path, told: list[Told]) -> None:
    """A quiet step changes about one value in a hundred, a loud one most; what is sent is that and no more."""
    before = weights_of(place / "base")
    for rate, one in zip(case.rates, told, strict=True):
        after = weights_of(place / f"step-{one.step}")
        changed = changed_elements(before, after)
        assert one.seal.changed == changed
        assert (changed > 0) == (rate > 0)
        print(f"{case.name}: rate {rate:g}: {changed / one.seal.elements:.2%} changed, {one.seal.bytes} bytes")
        before = after


def check_memory(case: Case, place: Path, reports: list[Path]) -> None:
    """The largest piece of memory that a publisher takes is smaller than the largest tensor of the model.

    Numpy's are judged where no rank owns that tensor whole, since scratch takes four bytes for each element of a block;
    and not on rank 0, which makes the stream from the base checkpoint.
    """
    whole = max(spec.elements for spec in layout_of(place / "base")) * case.dtype.itemsize
    for report in reports:
        largest = json.loads(report.read_text())
        print(f"{case.name}: {report.stem}: {largest}, the largest tensor has {whole}")
        assert largest["torch"] < whole, largest
        assert largest["numpy"] < whole or report == reports[0] or not case.cut, largest
