"""docs/TESTING.md names a test for every module of the package, and support/README.md names every module of support."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "TESTING.md").read_text()
ROW = re.compile(r"^\| `([\w/]+\.py)` \| (.*) \|$", re.MULTILINE)
TABLE = dict(ROW.findall(PAGE.partition("## Which test covers a module")[2]))


def has_test_file(module: Path) -> bool:
    """Whether a test file of the module's name lies in the folder of its package, or in `tests/` itself."""
    folder = ROOT / "tests" / (module.parts[0] if len(module.parts) > 1 else "")
    found = folder.rglob(f"test_{module.name}") if len(module.parts) > 1 else folder.glob(f"test_{module.name}")
    return any(found)


def test_every_module_has_a_test_by_its_name_or_in_the_table() -> None:
    package = ROOT / "dcr_daemon"
    modules = [path.relative_to(package) for path in package.rglob("*.py")]
    assert len(modules) > 100
    missing = [
        str(module)
        for module in modules
        if not module.name.startswith("__") and not has_test_file(module) and str(module) not in TABLE
    ]
    assert missing == [], "add a row to the table in docs/TESTING.md"


def test_what_the_table_names_exists() -> None:
    for module, tests in TABLE.items():
        assert (ROOT / "dcr_daemon" / module).is_file(), module
        named = re.findall(r"`([\w/]+\.py)`", tests)
        assert named, module
        for test in named:
            assert (ROOT / "tests" / test).is_file(), f"{module}: {test}"


def test_no_row_is_needless() -> None:
    assert [module for module in TABLE if has_test_file(Path(module))] == []


def test_the_readme_of_support_names_every_module() -> None:
    support = ROOT / "tests" / "support"
    named = set(re.findall(r"`([\w.]+)`", (support / "README.md").read_text()))
    modules = [".".join(path.relative_to(support).with_suffix("").parts) for path in support.rglob("*.py")]
    missing = [
        name for name in modules if not name.endswith("__init__") and not {name, name.rpartition(".")[2]} & named
    ]
    assert missing == []
