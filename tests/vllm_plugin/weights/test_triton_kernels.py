"""Triton's kernels answer the same bits as the compiled loops of the host, in Triton's interpreter on a CPU.

Triton lies beside the environment, so these are programs of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TRITON = Path(os.environ.get("DCR_TEST_TRITON", Path(sys.prefix) / "triton"))
TESTS = Path(__file__).parents[2]


def run(program: str, *, triton: bool, **variables: str) -> Any:
    """What a program of `support/vllm` prints."""
    path = [str(TESTS), *sys.path]
    if triton:
        if not TRITON.is_dir():
            pytest.skip(f"no triton in {TRITON}: make test installs it there, beside the environment")
        path.insert(0, str(TRITON))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    ran = subprocess.run(
        [sys.executable, str(TESTS / "support" / "vllm" / program)],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment | {"PYTHONPATH": os.pathsep.join(path)} | variables,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("kernels", ["TorchKernels", "TritonKernels"])
def test_widths_strides_repacks_and_large_storages_are_equal(kernels: str) -> None:
    interpreted = {"TRITON_INTERPRET": "1"} if kernels == "TritonKernels" else {}
    found = run("device_cases.py", triton=bool(interpreted), **interpreted)
    assert found["kernels"] == kernels
    assert len(found["differ"]) == 19
    assert {name: what for name, what in found["differ"].items() if what} == {}


def test_they_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    sizes = run("compiled_kernels.py", triton=True, TRITON_CACHE_DIR=str(tmp_path))
    assert len(sizes) == 24
    assert min(sizes.values()) > 0
