"""A small stream that the commands themselves made: three versions, the last of them with a gap in the step labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dcr_daemon.cli.app import run

STEPS = (1, 2, 5)


@dataclass(frozen=True)
class Streamed:
    """`weights[v]` are the bits of version v."""

    url: str
    home: Path
    base: Path
    watched: Path
    state: Path
    weights: list[dict[str, torch.Tensor]]

    def publish(self, *extra: str) -> int:
        """`dcr publish --once` with the same line every time, as a unit would."""
        return run(
            [
                "publish", "--to", self.url, "--create", "--base", str(self.base), "--watch", str(self.watched),
                "--state", str(self.state), "--once", *extra,
            ]
        )  # fmt: skip


def weights(version: int) -> dict[str, torch.Tensor]:
    """Version 0 is random; each later one changes 1 % of the values of the one before by a unit in the last place."""
    bits = {
        name: np.random.default_rng(7).integers(0x3C00, 0x3F00, shape).astype(np.int16)
        for name, shape in (("embed.weight", (300, 64)), ("layers.0.weight", (64, 64)), ("norm.weight", (64,)))
    }
    for v in range(1, version + 1):
        random = np.random.default_rng(v)
        for name, values in bits.items():
            bits[name] = values + (random.random(values.shape) < 0.01).astype(np.int16)
    return {name: torch.from_numpy(values).view(torch.bfloat16) for name, values in bits.items()}


def save(path: Path, version: int) -> Path:
    path.mkdir(parents=True)
    save_file(weights(version), path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text('{"model_type": "toy"}')
    return path


def make(home: Path) -> Streamed:
    bucket = home / "bucket"
    made = Streamed(
        f"file://{bucket}", bucket, save(home / "base", 0), home / "checkpoints", home / "state",
        [weights(v) for v in range(len(STEPS) + 1)],
    )  # fmt: skip
    for version, step in enumerate(STEPS, start=1):
        save(made.watched / f"step-{step}", version)
    assert made.publish() == 0
    return made


@pytest.fixture(scope="session")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Streamed:
    """For tests that only read it (replicas may report into it)."""
    return make(tmp_path_factory.mktemp("streamed"))


@pytest.fixture
def own_stream(tmp_path: Path) -> Streamed:
    """For tests that write to it or spoil it."""
    return make(tmp_path / "own")
