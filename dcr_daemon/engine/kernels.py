"""Compiled loop over the elements of composed deltas. Imported on first use only (numba is slow to import)."""

from __future__ import annotations

from typing import Any

from dcr_daemon.canonical.jit import kernel


@kernel
def match(earlier: Any, later: Any, found: Any) -> Any:
    """For each of `later` its number in `earlier` (both ascending) into `found`, or leave -1; returns how many."""
    i = 0
    hits = 0
    for j in range(later.size):
        while i < earlier.size and earlier[i] < later[j]:
            i += 1
        if i == earlier.size:
            break
        if earlier[i] == later[j]:
            found[j] = i
            hits += 1
    return hits
