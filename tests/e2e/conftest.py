"""Real vLLM servers on CPU: one per model, started on first use and kept for the session."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.vllm.server import Rig, rig

from dcr_demo.models import write_tiny


@pytest.fixture(scope="session")
def short_tmp() -> Iterator[Path]:
    """A directory whose paths are short enough for a unix socket (107 bytes)."""
    pytest.importorskip("vllm")
    with tempfile.TemporaryDirectory(prefix="dcr-") as path:
        yield Path(path)


@pytest.fixture(scope="session")
def dense(short_tmp: Path) -> Iterator[Rig]:
    """A tiny Qwen3 on one worker, with a staging cap small enough to be reached."""
    model = write_tiny(short_tmp / "dense-model")
    with rig(model, short_tmp / "d", "dense", env={"DCR_STAGE_CAP": str(1 << 20)}) as made:
        yield made


@pytest.fixture(scope="session")
def moe(short_tmp: Path) -> Iterator[Rig]:
    """A tiny Qwen3-MoE on two workers (tensor parallel), whose port opens before it is proved."""
    model = write_tiny(short_tmp / "moe-model", kind="moe")
    with rig(
        model, short_tmp / "m", "moe", tensor_parallel=2, env={"DCR_GATE": "health", "DCR_WATCHDOG": "90"}
    ) as made:
        yield made
