"""The check for a GPU runs without one, and says what it could not check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "validate_gpu.py"
ON_A_GPU_ONLY = {"large", "little memory", "graphs", "streams"}


def checks_on_a_cpu(home: Path, *more: str) -> dict[str, dict[str, Any]]:
    """The report's checks by name; none has failed."""
    report = home / "report.json"
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu", "--report", str(report), *more],
        capture_output=True,
        text=True,
        timeout=800,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return {check["name"]: check for check in json.loads(report.read_text())["checks"]}


def test_on_a_cpu_what_needs_a_gpu_is_skipped_and_the_rest_passes(tmp_path: Path) -> None:
    checks = checks_on_a_cpu(tmp_path, "--skip-servers")
    for name, check in checks.items():
        expected = "skipped" if name in ON_A_GPU_ONLY else "passed"
        assert check["state"] == expected, check
        assert check["reason"] == ("needs a GPU" if expected == "skipped" else "")
    assert checks.keys() == ON_A_GPU_ONLY | {"kernels", "bits", "speed", "second transaction"}
    assert checks["bits"]["figures"]["cases"] == 19


SAID = "Unquantized MoE backend 'FlashInfer TRTLLM' does not support the deployment configuration since it is Hopper."


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (f"(Worker pid=7) ERROR Traceback\n(Worker pid=7) ERROR ValueError: {SAID}\n", SAID),
        ("ValueError: Selected backend FLASHINFER is not valid for this configuration. Reason: [sinks]\n", "[sinks]"),
        ("ValueError: No available memory for the cache blocks.\n", None),
    ],
)
def test_a_backend_that_vllm_does_not_offer_is_told_from_a_failure(
    log: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu_servers

    if reason is None:
        gpu_servers.raise_if_not_offered(log)
        return
    with pytest.raises(gpu_servers.NotOffered) as caught:
        gpu_servers.raise_if_not_offered(log)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.vllm
@pytest.mark.slow
def test_a_server_is_refitted_under_load_and_equals_a_fresh_one(tmp_path: Path) -> None:
    """The one command for a GPU, with all servers; a CPU can serve one of them."""
    pytest.importorskip("vllm")
    checks = checks_on_a_cpu(tmp_path)
    servers = {name: check for name, check in checks.items() if name.startswith("server: ")}
    assert len(servers) == 5
    dense = servers.pop("server: dense, TP 1, compiled, graphs")
    assert dense["state"] == "passed"
    figures = dense["figures"]
    assert len(figures["pauses in ms"]) == 3
    assert figures["requests"] >= 4, "each client was answered"
    assert figures["compared"] > 20
    assert {check["state"] for check in servers.values()} == {"skipped"}
