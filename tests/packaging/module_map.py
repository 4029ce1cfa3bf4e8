"""The module map of docs/ARCHITECTURE.md: one line a module, the first sentence of its docstring.

python tests/packaging/module_map.py    writes the map anew; tests/packaging/test_architecture_page.py compares it
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "ARCHITECTURE.md"
BEGIN, END = "<!-- module map: python tests/packaging/module_map.py -->", "<!-- end of the module map -->"
LIMIT = 150  #: characters of a sentence


def sentence(module: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = " ".join((ast.get_docstring(ast.parse(module.read_text())) or "").split("\n\n")[0].split())
    first = re.split(r"(?<=[^.][.:]) (?=[A-Z`])", text)[0].rstrip(".:")
    return first if len(first) <= LIMIT else first[: first.rindex(" ", 0, LIMIT)] + " …"


def packages() -> list[Path]:
    return sorted(path.parent for path in (ROOT / "dcr_daemon").rglob("__init__.py"))


def module_map() -> str:
    """All packages with their modules, in Markdown."""
    lines = []
    for package in packages():
        name = package.relative_to(ROOT).as_posix()
        lines += ["", f"**`{name}/`** {sentence(package / '__init__.py')}.", "", "| module | |", "|---|---|"]
        modules = [path for path in sorted(package.glob("*.py")) if path.stem != "__init__"]
        lines += [f"| `{path.stem}` | {sentence(path).replace('|', ' ')} |" for path in modules]
        if not modules:
            lines = lines[:-3]
    return "\n".join([*lines[1:], ""])


def written() -> str:
    """The map as the page has it."""
    return PAGE.read_text().partition(BEGIN + "\n")[2].partition(END)[0]


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN + "\n")
    PAGE.write_text(before + BEGIN + "\n" + module_map() + END + rest.partition(END)[2])
