"""What the pages for users name in Python exists: a script that is copied from a page can import what it says."""

from __future__ import annotations

import importlib
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
IMPORT = re.compile(r"^from (dcr_daemon[\w.]*) import (.+)$", re.MULTILINE)
DOTTED = re.compile(r"\bdcr_daemon(?:\.\w+)+")


def is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # no package of the name before the last dot
        return False


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    owner, _, attribute = name.rpartition(".")
    return is_module(name) or (is_module(owner) and hasattr(importlib.import_module(owner), attribute))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_name_on_a_page_exists(page: Path) -> None:
    text = page.read_text()
    names = set(DOTTED.findall(text))
    names |= {f"{module}.{name.strip()}" for module, listed in IMPORT.findall(text) for name in listed.split(",")}
    assert [name for name in sorted(names) if not exists(name)] == []
