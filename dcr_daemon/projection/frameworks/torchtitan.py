"""torchtitan: its state-dict adapters, traced; and in closed form, the tensors that differ from a checkpoint's.

`adapter_conversion` needs only the adapter; the closed forms are for training code with the same tensors and no
adapter. Their names follow torchtitan: E experts, F inner (expert) size, D model size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dcr_daemon.canonical.region import Region, normalise
from dcr_daemon.projection.tracing import Conversion, trace


def adapter_conversion(adapter: Any, tensors: Mapping[str, Any]) -> Conversion:
    """What `adapter.to_hf` does to whole tensors (a state dict, or anything by name that has shapes and dtypes)."""
    return trace(lambda table: adapter.to_hf(table), tensors)


def grouped_experts(names: Sequence[str], rows: int, *, columns: int) -> list[Region]:
    """A parameter of shape (E, rows, columns), expert e of which is the canonical tensor `names[e]` of (rows, columns).

    So for `w1_EFD`, `w2_EDF` and `w3_EFD`, whose experts are gate, down and up projections as they are.
    """
    size = rows * columns
    return [Region(name, (size,), expert * size, (1,), 0, (1,)) for expert, name in enumerate(names)] if size else []


def rotary_rows(name: str, heads: int, *, head_dim: int, columns: int) -> list[Region]:
    """A q or k projection for complex rotary embedding, whose canonical form rotates halves.

    Local rows count (head, pair, part), canonical ones (head, part, pair); the parts are the two sides of a rotation.
    For a bias, `columns` is 1.
    """
    pairs = head_dim // 2
    region = Region(
        name,
        (heads, 2, pairs, columns),
        0,
        (head_dim * columns, columns, 2 * columns, 1),
        0,
        (head_dim * columns, pairs * columns, columns, 1),
    )
    return [normalise(region)]
