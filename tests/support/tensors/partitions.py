"""How trainers cut canonical tensors: the boxes that the chunks and anchors of many ranks name.

Whatever is drawn here covers a tensor exactly once. Nothing follows from one cut about the next: the world size, the
degrees and the framework may change between two versions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.canonical.region import Region, boxes, row_major
from dcr_daemon.projection.binding.blocks import blocks
from dcr_daemon.projection.frameworks.megatron.grid import Grid
from dcr_daemon.projection.frameworks.megatron.shards import of_rank
from dcr_daemon.projection.frameworks.models.architecture import Architecture

Cut = Callable[[Layout, int], list[Box]]
Axes = list[tuple[int, int]]  #: extent and stride, in canonical elements

SPLITS = ("flat", "columns", "interleaved", "transposed", "any")
MANY = 14  #: boxes of one tensor, about


def split(how: str, shape: Sequence[int], ranks: int, rng: np.random.Generator) -> list[Box]:
    """A tensor in boxes; what cannot be cut in this way is cut along its flat order."""
    elements = int(np.prod(shape))
    if not elements:
        return []
    rows, columns = (shape[0], elements // shape[0]) if shape else (1, 1)
    axes = [(n, s) for n, s in zip(shape, row_major(shape), strict=True) if n > 1] or [(1, 1)]
    if how == "any" and len(axes) <= 4:
        return _anyhow(axes, rng)
    if how == "columns" and columns >= ranks:
        edges = np.linspace(0, columns, ranks + 1).astype(int).tolist()
        return [Box(a, (rows, b - a), (columns, 1)) for a, b in itertools.pairwise(edges)]
    if how == "interleaved" and rows % ranks == 0 and rows > ranks:
        # Query groups, gate and up in turn: a rank has every so-and-so-manieth row.
        return [Box(at * columns, (rows // ranks, columns), (ranks * columns, 1)) for at in range(ranks)]
    if how == "transposed" and len(shape) == 2:
        whole = Box(0, (columns, rows), (1, columns))
        return list(whole.split(-(-columns // ranks) * rows))
    edges = sorted({0, elements, *rng.integers(0, elements + 1, ranks - 1).tolist()})
    return [Box.flat(a, b - a) for a, b in itertools.pairwise(edges)]


def _anyhow(axes: Axes, rng: np.random.Generator) -> list[Box]:
    """Cut, deal out and split axes at random, some down to single elements; then the axes of each box in any order."""
    pieces: list[tuple[int, Axes]] = [(0, axes)]
    for _ in range(int(rng.integers(1, MANY))):
        first, chosen = pieces.pop(int(rng.integers(len(pieces))))
        axis = int(rng.integers(len(chosen)))
        n, stride = chosen[axis]

        def with_axis(*instead: tuple[int, int], of: Axes = chosen, at: int = axis) -> Axes:
            return [*of[:at], *instead, *of[at + 1 :]]

        way = rng.integers(3)
        if n > 1 and way == 0:
            keep = int(rng.integers(1, n))
            pieces += [(first, with_axis((keep, stride))), (first + keep * stride, with_axis((n - keep, stride)))]
        elif n > 1 and way == 1:
            by = int(rng.integers(2, min(n, 4) + 1))
            pieces += [(first + i * stride, with_axis((-(-(n - i) // by), stride * by))) for i in range(by)]
        elif n > 3 and n % 2 == 0 and len(chosen) < 6:
            pieces.append((first, with_axis((n // 2, 2 * stride), (2, stride))))
        else:
            pieces.append((first, chosen))
    made = []
    for first, chosen in pieces:
        shape, strides = zip(*chosen, strict=True)
        for box in boxes(Region("", shape, first, strides, first, strides)):
            order = rng.permutation(len(box.shape))
            made.append(Box(box.dst, tuple(box.shape[a] for a in order), tuple(box.strides[a] for a in order)))
    return [made[i] for i in rng.permutation(len(made))]


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """A way to cut every tensor of a layout, each in its own way."""
    seed, ranks = draw(st.integers(0, 1 << 30)), draw(st.integers(1, 8))
    how = draw(st.sampled_from([*SPLITS, "mixed"]))

    def cut(layout: Layout, tensor: int) -> list[Box]:
        rng = np.random.default_rng((seed, tensor))
        return split(how if how != "mixed" else str(rng.choice(SPLITS)), layout[tensor].shape, ranks, rng)

    return cut


def megatron_cut(architecture: Architecture, layout: Layout, grid: Grid, limit: int = 1 << 12) -> Cut:
    """As the ranks of a Megatron run publish: each its own blocks, of at most `limit` bytes."""
    of_tensor: Mapping[int, list[Box]] = {tensor: [] for tensor in range(len(layout))}
    for rank in range(grid.world):
        for tensor, box in blocks(of_rank(architecture, grid, rank), layout, limit):
            of_tensor[tensor].append(box)
    return lambda _, tensor: of_tensor[tensor]


def pieces_of(layout: Layout, cut: Cut, values: Mapping[str, Any]) -> list[tuple[str, list[Any], Any]]:
    """A model as anchor entries: (entry, its place as the metadata says it, bits), in an order of no meaning."""
    made = []
    for tensor, spec in enumerate(layout):
        for n, box in enumerate(cut(layout, tensor)):
            where = box.canonical(np.arange(box.elements, dtype=np.int64))
            place = [spec.name, box.dst, list(box.shape), list(box.strides)]
            made.append((f"{spec.name}#{n}", place, values[spec.name][where]))
    return made
