"""The trainer is a real one: its steps change about as many BF16 weights as an RL run's, and no more names."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file

from dcr_demo.models import Kind, write_tiny
from dcr_demo.trainer import Trainer, _spread


def weights(model: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        found |= load_file(file)
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def test_spreading_masters_never_changes_their_bf16_value() -> None:
    """Every BF16 pattern, several times: zeros, denormals, the largest, infinities and NaNs included."""
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).repeat(8)
    original = patterns.view(torch.bfloat16)
    master = original.float()
    _spread(master, torch.Generator().manual_seed(0))
    same = torch.isnan(original) | (bits(master.to(torch.bfloat16)) == patterns)
    assert bool(same.all())
    assert bool((master != original.float()).float().mean() > 0.9)


@pytest.mark.parametrize("kind", ["dense", "tied", "moe"])
def test_a_saved_step_has_the_checkpoints_own_names_and_a_few_changed_bits(kind: Kind, tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base", kind=kind, seed=3)
    trainer = Trainer(base, seed=3)
    before = weights(base)
    untouched = weights(trainer.save(tmp_path / "0"))
    assert untouched.keys() == before.keys()
    assert all(torch.equal(bits(untouched[n]), bits(before[n])) for n in before)
    for number in (1, 2, 3):
        assert trainer.step().number == number
        after = weights(trainer.save(tmp_path / str(number), shard_bytes=100_000))
        changed = sum(int((bits(after[n]) != bits(before[n])).sum()) for n in before)
        assert 0.0005 < changed / sum(t.numel() for t in before.values()) < 0.05
        before = after


def test_the_same_seed_trains_the_same_policy(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base", seed=1)
    states = []
    for _ in range(2):
        trainer = Trainer(base, seed=9)
        trainer.step()
        states.append(trainer.state_dict())
    assert all(torch.equal(states[0][n], states[1][n]) for n in states[0])


def test_a_step_can_be_taken_by_its_own_command(tmp_path: Path) -> None:
    import subprocess
    import sys

    base = write_tiny(tmp_path / "base", seed=1)
    command = [sys.executable, "-P", "-m", "dcr_demo.trainer", str(base), str(tmp_path / "out"), "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("step 1 reward")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["step-000001", "step-000002"]
