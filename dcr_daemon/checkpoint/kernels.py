"""Compiled loops over scattered elements of a tensor. Imported on first use only (numba is slow to import).

Numpy needs several passes for each, and keeps the interpreter locked meanwhile. Nothing is checked here: positions are
ascending and inside, which is the caller's promise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numba import int64

from dcr_daemon.canonical.dtypes import bits_dtype
from dcr_daemon.canonical.jit import kernel


@kernel
def patch(bits: Any, positions: Any, values: Any, start: Any) -> Any:
    """Put `values` at `positions` less `start` into `bits`; returns how many of them were another value before."""
    changed = int64(0)
    for i in range(positions.size):
        at = positions[i] - start
        changed += int64(bits[at] != values[i])
        bits[at] = values[i]
    return changed


@kernel
def holds(bits: Any, positions: Any, values: Any) -> Any:
    """Whether `bits` has `values` at `positions`."""
    differing = int64(0)
    for i in range(positions.size):
        differing += int64(bits[positions[i]] != values[i])
    return differing == 0


def warm(widths: Iterable[int]) -> None:
    """Compile both for elements of these widths, with the types that `SafetensorsFile` passes."""
    positions = np.zeros(1, dtype=np.int64)
    positions.flags.writeable = False
    for width in set(widths):
        values = np.zeros(1, dtype=bits_dtype(width))
        target = values.copy()
        values.flags.writeable = False
        patch(target, positions, values, 0)
        holds(values, positions, values)
