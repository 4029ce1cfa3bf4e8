"""docs/BENCHMARKS.md and its plots are what their script makes of the runs in docs/benchmarks/."""

from __future__ import annotations

import runpy
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    module: dict[str, Any] = runpy.run_path(str(ROOT / "benchmarks" / "rig" / "page.py"))
    made: dict[str, str] = module["pages"](ROOT / "docs" / "benchmarks")
    return made


def test_the_page_and_its_plots_are_those_of_the_runs(pages: dict[str, str]) -> None:
    differing = [name for name, text in pages.items() if (ROOT / "docs" / name).read_text() != text]
    assert differing == [], "run python benchmarks/rig/page.py"


def test_every_section_names_the_machine_and_its_load(pages: dict[str, str]) -> None:
    for section in pages["BENCHMARKS.md"].split("\n## ")[1:]:
        assert " cores of " in section
        assert "load " in section


def test_plots_are_well_formed_and_on_the_page(pages: dict[str, str]) -> None:
    plots = {name: text for name, text in pages.items() if name.endswith(".svg")}
    assert plots
    for name, text in plots.items():
        assert ET.fromstring(text).tag.endswith("svg")
        assert f"({name})" in pages["BENCHMARKS.md"]
