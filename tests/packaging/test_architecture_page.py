"""docs/ARCHITECTURE.md tells the truth: its module map, and the modules, classes and functions that it names."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ARCHITECTURE.md").read_text()


def test_the_module_map_is_that_of_the_code() -> None:
    spec = importlib.util.spec_from_file_location("module_map", Path(__file__).with_name("module_map.py"))
    assert spec
    assert spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.written() == tool.module_map(), "run python tests/packaging/module_map.py"


def test_every_call_on_the_main_path_exists() -> None:
    """Lines of the form `folder/module.py  Class.method  …`."""
    calls = re.findall(r"^ {4}([\w/]+\.py) +([\w.]+)  ", PAGE, re.MULTILINE)
    assert len(calls) > 12
    for file, name in calls:
        source = (ROOT / "dcr_daemon" / file).read_text()
        for part in name.split("."):
            assert re.search(rf"(def|class) {part}\b", source), f"{file} has no {part}"


def test_every_file_that_the_page_names_exists() -> None:
    for file in re.findall(r"`((?:\w+/)+\w+\.py)`", PAGE):
        assert (ROOT / "dcr_daemon" / file).exists() or (ROOT / file).exists(), file
