"""What the ranks of a run read through their maps, put together: every element of the checkpoint, once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.dtypes import bits_dtype
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.projection.binding.bind import Live
from dcr_daemon.projection.binding.reader import Reader, blocks

Reading = tuple[int, Box, np.ndarray[Any, Any]]


def readings(live: Live, layout: Layout, limit: int = 1 << 10) -> list[Reading]:
    """Every block of one rank with its bits."""
    reader = Reader(live, layout)
    made = blocks(live.map, layout, limit)
    reader.plan(made)
    return [(tensor, box, reader.read(tensor, box).copy()) for tensor, box in made]


def assembled(layout: Layout, read: Iterable[Reading], *, residual: Iterable[str] = ()) -> list[np.ndarray[Any, Any]]:
    """The bits of every tensor of the layout.

    Raises:
        AssertionError: an element was read twice or never, but for those of `residual` tensors.
    """
    bits = [np.zeros(spec.elements, bits_dtype(spec.width)) for spec in layout]
    seen = [np.zeros(spec.elements, np.uint8) for spec in layout]
    for tensor, box, values in read:
        where = box.canonical(np.arange(box.elements))
        bits[tensor][where] = values
        seen[tensor][where] += 1
    skipped = set(residual)
    for spec, counts in zip(layout, seen, strict=True):
        assert (counts == (spec.name not in skipped)).all(), f"{spec.name} was read {set(counts.tolist())} times"
    return bits
