"""Triton's kernels answer the same bits as the compiled loops of the host, in Triton's interpreter on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.vllm import interpreted_kernels

TRITON = Path(os.environ.get("DCR_TEST_TRITON", Path(sys.prefix) / "triton"))


@pytest.mark.parametrize("kernels", ["TorchKernels", "TritonKernels"])
def test_widths_strides_repacks_and_large_storages_are_equal(kernels: str) -> None:
    script = Path(interpreted_kernels.__file__)
    path = [str(script.parents[2]), *sys.path]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if kernels == "TritonKernels":
        if not TRITON.is_dir():
            pytest.skip(f"no triton in {TRITON}: make test installs it there, beside the environment")
        path.insert(0, str(TRITON))
        environment["TRITON_INTERPRET"] = "1"
    ran = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment | {"PYTHONPATH": os.pathsep.join(path)},
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["kernels"] == kernels
    assert len(found["differ"]) == 19
    assert {name: what for name, what in found["differ"].items() if what} == {}
