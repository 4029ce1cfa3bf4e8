"""The counts of `make faults` are those of its parts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def faults() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tests_faults", HERE / "faults.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_tests_did_is_added_up(faults: ModuleType) -> None:
    case = '<testcase name="{}"><properties>{}</properties>{}</testcase>'
    told = '<property name="{}" value="{}"/>'
    cases = [
        case.format("a", told.format("site", "publisher disk.mark.write") + told.format("kills", 2), ""),
        case.format("b", told.format("site", "publisher disk.mark.write") + told.format("kills", 1), ""),
        case.format("c", told.format("site", "subscriber disk.mark.write"), "<failure/>"),
        case.format("d", told.format("zombies", 1), ""),
        case.format("e", "", "<skipped/>"),
    ]
    report = f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"
    assert faults.tested(report) == {
        "tests": 4,
        "failed": 1,
        "kills": 3,
        "zombies": 1,
        "skipped": 1,
        "publisher sites": 1,
        "subscriber sites": 1,
    }


def test_what_the_check_of_architectures_says_is_understood(faults: ModuleType) -> None:
    said = "3 architectures: 1 **wrong**, 2 exact.\n\n| | why | architectures |\n"
    assert faults.served(said) == {"architectures": 3, "wrong": 1, "exact": 2}


def test_what_the_simulation_says_is_understood(faults: ModuleType) -> None:
    said = (
        "300 seeds in 10.0 s (30.0/s), 0 failed; 12 steps, 34 store requests, 5 versions sealed, 6 commits, "
        "1.5 virtual hours\nfaults: lost 3, slow 4\ncrashes: publish.open 7\npassed: a 1"
    )
    assert faults.simulated(said) == {
        "seeds": 300,
        "failed": 0,
        "steps": 12,
        "store requests": 34,
        "versions sealed": 5,
        "commits": 6,
        "virtual hours": 1.5,
        "faults": 7,
        "crashes": 7,
    }


def test_what_the_soak_says_is_understood(faults: ModuleType) -> None:
    said = (
        "seed 7: 8 rounds in 40 s, 20 versions\n"
        "24 rounds, 0 failed, 40 faults, 70 versions, 123 comparisons, 30 restarts\n"
        "struck: full disk 7\nseconds of a round: median 5.0, most 9.0\n"
    )
    assert faults.soaked(said) == {
        "rounds": 24,
        "failed": 0,
        "faults": 40,
        "versions": 70,
        "comparisons": 123,
        "restarts": 30,
    }


def test_the_table_goes_between_the_marks(faults: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- counts -->\nold\n<!-- end of counts -->\nafter\n")
    part = faults.Part("simulation", ok=True, seconds=90, counts={"seeds": 3000.0, "virtual hours": 1.5})
    faults.put_on_page(page, faults.table([part], "full"))
    text = page.read_text()
    assert "old" not in text
    assert "| simulation | 3,000 seeds, 1.5 virtual hours | 1.5 | passed |" in text
    assert text.startswith("before\n<!-- counts -->\n`make faults` (full)")
    assert text.endswith("<!-- end of counts -->\nafter\n")


def test_the_page_has_its_marks(faults: ModuleType) -> None:
    page = (HERE.parent / "docs" / "PROTOCOL.md").read_text()
    assert page.index(faults.MARKS[0]) < page.index(faults.MARKS[1])
