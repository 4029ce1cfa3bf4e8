"""The check for a GPU runs without one, and says what it could not check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tools" / "validate_gpu.py"
ON_A_GPU_ONLY = {"large", "little memory", "graphs", "streams"}


def test_on_a_cpu_what_needs_a_gpu_is_skipped_and_the_rest_passes(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu", "--report", str(report)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    checks = {check["name"]: check for check in json.loads(report.read_text())["checks"]}
    servers = {name for name in checks if name.startswith("server: ")}
    assert len(servers) == 5
    for name, check in checks.items():
        expected = "skipped" if name in ON_A_GPU_ONLY | servers else "passed"
        assert check["state"] == expected, check
        assert check["reason"] == ("needs a GPU" if expected == "skipped" else "")
    assert {"kernels", "bits", "speed", "second transaction"} <= checks.keys()
    assert checks["bits"]["figures"]["cases"] == 19
