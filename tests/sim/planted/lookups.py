"""Which names the functions of `dcr_daemon` look up when they run, from its source: only those can be patched."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import dcr_daemon

ROOT = Path(dcr_daemon.__file__).parent


@dataclass(frozen=True)
class Source:
    """What one module's functions read. `imported`: what its top level imports `from` elsewhere, by the local name."""

    names: frozenset[str]
    attributes: frozenset[tuple[str, str]]  #: with the name before the dot, "" if there is more than a name
    imported: dict[str, str]


@cache
def sources() -> dict[str, Source]:
    """All modules of `dcr_daemon`, by name."""
    return {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): _read(path)
        for path in sorted(ROOT.rglob("*.py"))
    }


@cache
def attributes_used() -> frozenset[tuple[str, str]]:
    """Attributes that are read inside functions anywhere, each as ("", attribute); those of a module that is imported
    as a whole also as (module, attribute)."""
    return frozenset(
        (owner, attribute)
        for source in sources().values()
        for name, attribute in source.attributes
        for owner in ("", source.imported.get(name, ""))
    )


def importers(module: str, attribute: str) -> list[tuple[str, str]]:
    """Where `from module import attribute` stands at the top level and functions read it: module and local name."""
    return [
        (name, local)
        for name, source in sources().items()
        for local, what in source.imported.items()
        if what == f"{module}.{attribute}" and local in source.names
    ]


def _read(path: Path) -> Source:
    tree = ast.parse(path.read_text())
    names, attributes = set[str](), set[tuple[str, str]]()
    for node in _inside_functions(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            attributes.add((node.value.id if isinstance(node.value, ast.Name) else "", node.attr))
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return Source(frozenset(names), frozenset(attributes), imported)


def _inside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of the bodies of all functions: what stands outside is read once, at import."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for statement in node.body:
            yield from ast.walk(statement)
    elif isinstance(node, ast.Lambda):
        yield from ast.walk(node.body)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _inside_functions(child)
