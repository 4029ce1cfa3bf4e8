"""docs/PROTOCOL.md tells the truth: every must that is cited exists, and what it points to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "PROTOCOL.md").read_text()
SECTIONS = dict(re.findall(r"^\*\*([LPEFT]\d) (.*?)(?=^\*\*[LPEFT]\d |^## )", PAGE, re.MULTILINE | re.DOTALL))
MUSTS = [f"L{n}" for n in range(9)] + [f"P{n}" for n in range(1, 9)] + [f"E{n}" for n in range(1, 10)]
MUSTS += ["F1", "F2", "F3", "T1", "T2"]


def test_every_must_has_its_place() -> None:
    assert sorted(SECTIONS) == sorted(MUSTS)


@pytest.mark.parametrize("must", MUSTS)
def test_what_a_must_points_to_exists(must: str) -> None:
    """Files of the package after *Where*, files and names in them after *Tests*."""
    where, tests = re.search(r"\*Where\*(.*?)\*Tests\*(.*)", SECTIONS[must], re.DOTALL).groups()  # type: ignore[union-attr]
    places = re.findall(r"`([\w/]+\.py)`", where)
    assert places
    for place in places:
        assert (ROOT / "dcr_daemon" / place).is_file(), place
    cited = re.findall(r"`([\w/]+\.py)`((?:\s*\((?:`\w+`,?\s*)+\))?)", tests)
    assert cited
    for file, names in cited:
        source = (ROOT / "tests" / file).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"(def|class) {name}\b", source), f"{file} has no {name}"


def test_what_keeps_a_failure_from_us_exists() -> None:
    """The tests named in the table of what went wrong elsewhere."""
    table = re.search(r"^## What went wrong elsewhere.*?(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    assert table
    cited = re.findall(r"`([\w/]+\.py)`((?:\s*\((?:`\w+`,?\s*)+\))?)", table.group())
    assert len(cited) > 30
    for file, names in cited:
        source = (ROOT / "tests" / file).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert f"def {name}(" in source, f"{file} has no {name}"
    named = {name for _, names in cited for name in re.findall(r"`(\w+)`", names)} | {file for file, _ in cited}
    for path in (ROOT / "tests" / "field").glob("test_*.py"):
        tests = re.findall(r"def (test_\w+)\(", path.read_text())
        assert f"field/{path.name}" in named
        assert tests


def test_every_must_that_code_and_tests_cite_is_on_the_page() -> None:
    for folder in ("dcr_daemon", "tests", "docs", "systemd", "docker"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".service", ".yaml") and path.is_file():
                for run in re.findall(r"\bmusts? ((?:[LPEFT]\d+(?:, | and | to |-)?)+)", path.read_text()):
                    for cited in re.findall(r"[LPEFT]\d+", run):
                        assert cited in MUSTS, f"{path.relative_to(ROOT)} cites must {cited}"
