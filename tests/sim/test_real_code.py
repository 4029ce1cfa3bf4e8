"""The simulation judges with production code, never with rules of its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: not `planted/`: a planted bug is there to decide otherwise
FILES = sorted(path for path in HERE.glob("*.py") if not path.name.startswith("test_"))

#: what only production code may decide: which records count, what stands in a slot, whether a change is right
OURS = {
    "fold", "judge", "begin", "tip_before", "append", "occupy", "read_slot", "put_if_absent", "claim", "seal", "settle",
    "check_chain", "verify_hop", "verify_composed", "compare_written", "plan_floor", "plan_route", "locate",
    "fingerprint", "sum_run", "decode_record", "undo_chunk", "verdict", "abort_unless_sealed",
}  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_here_folds_appends_or_judges(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            assert node.name not in OURS, f"{path.name}:{node.lineno} defines {node.name}"
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base) for base in node.bases}
            ours = {"Ledger", "History", "Objects", "Leader", "Member", "Core", "WorkerSession", "Driver"}
            assert not bases & ours, f"{path.name}:{node.lineno}: {node.name} replaces part of what is simulated"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_record_is_made_here(path: Path) -> None:
    """Every record in the bucket comes from the code that is tested."""
    kinds = {"Epoch", "Open", "Seal", "Abort", "Floor", "Release", "Stream", "Keys", "Anchor", "State"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            assert name not in kinds, f"{path.name}:{node.lineno} makes a {name} record"


def test_the_truth_about_the_ledger_is_the_real_fold() -> None:
    source = ast.parse((HERE / "invariants.py").read_text())
    imported = {
        (node.module, name.name) for node in ast.walk(source) if isinstance(node, ast.ImportFrom) for name in node.names
    }
    assert ("dcr_daemon.ledger.fold", "fold") in imported
    assert ("dcr_daemon.codec.decode", "open_chunk") in imported
