"""A checkpoint with tensors wider than the model that vLLM makes of it: vLLM casts them when it loads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.directory import Checkpoint, write_checkpoint
from dcr_demo.models import copy_side_files

Lanes = list[np.ndarray]


def written_wider(path: Path, out: Path) -> Path:
    """The checkpoint with every norm and router in F32, at values that BF16 does not have."""
    with Checkpoint(path) as found:
        wide = {s.name for s in found.layout if "norm" in s.name or s.name.endswith("mlp.gate.weight")}
        layout = Layout(TensorSpec(s.name, "F32" if s.name in wide else s.dtype, s.shape) for s in found.layout)
        rng = np.random.default_rng(4)

        def bits(name: str) -> np.ndarray:
            if name not in wide:
                return found.bits(name)
            return (1 + rng.normal(size=layout[layout.index(name)].elements) / 10).astype("<f4").view("<u4")

        values = {spec.name: np.array(bits(spec.name)).reshape(-1) for spec in layout}
    write_checkpoint(out, layout, bits_of=values.__getitem__)
    copy_side_files(path, out)
    return out


def redrawn(layout: Layout, lanes: Sequence[np.ndarray], seed: int) -> Lanes:
    """A next version: low bits of BF16 move, every third F32 is another number."""
    rng = np.random.default_rng(seed)
    fresh = [bits.copy() for bits in lanes]
    for spec, bits in zip(layout, fresh, strict=True):
        if spec.dtype == "F32":
            bits[::3] = (1 + rng.normal(size=bits[::3].size) / 10).astype("<f4").view("<u4")
        else:
            bits[::7] ^= 3
    return fresh
