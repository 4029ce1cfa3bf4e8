"""No named instant is in no test: the list of sites is what the source says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from support.faults.crash_sites import ELSEWHERE, SITES

import dcr_daemon

PACKAGE = Path(dcr_daemon.__file__).parent
RECORDS = ("open", "seal", "abort", "anchor", "floor", "epoch", "release")
STEPS = {"sync_file": ("sync",), "sync_directory": ("synced",)}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            yield name, node


def constant(call: ast.Call, keyword: str) -> object:
    return next((k.value.value for k in call.keywords if k.arg == keyword and isinstance(k.value, ast.Constant)), None)


def named() -> Iterator[str]:
    """Every failpoint of the package, with the disk's and the ledger's names spelt out."""
    for path in PACKAGE.rglob("*.py"):
        if path.name in ("runtime.py", "disk.py"):
            continue
        for name, call in calls(ast.parse(path.read_text())):
            disk_site = constant(call, "site")
            if name == "failpoint":
                site = call.args[0]
                if isinstance(site, ast.Constant):
                    yield str(site.value)
                else:  # f"ledger.{kind}.known"
                    assert isinstance(site, ast.JoinedStr), f"{path}:{call.lineno}"
                    begin, _, end = site.values
                    assert isinstance(begin, ast.Constant)
                    assert isinstance(end, ast.Constant)
                    assert begin.value == "ledger."
                    yield from (f"ledger.{kind}{end.value}" for kind in RECORDS)
            elif name == "write_atomically" and disk_site:
                durable = constant(call, "durable") is not False
                yield from (f"disk.{disk_site}.{s}" for s in ("write", "rename", *(("sync", "synced") * durable)))
            elif name in STEPS and disk_site:
                yield from (f"disk.{disk_site}.{step}" for step in STEPS[name])


def test_every_failpoint_of_the_package_is_a_site_of_the_matrix() -> None:
    found, listed = set(named()), {site.name for site in SITES} | set(ELSEWHERE)
    assert found - listed == set(), "in no test: add them to tests/support/faults/crash_sites.py"
    assert listed - found == set(), "no longer in the source"


def test_no_site_is_listed_twice() -> None:
    keys = [(site.name, site.scene, site.prior) for site in SITES]
    assert len(keys) == len(set(keys))
