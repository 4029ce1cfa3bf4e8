"""What a rank owns, cut into boxes of bounded size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.canonical.region import Region, box, invert, normalise, wire_pieces
from dcr_daemon.projection.region_map import Map


def blocks(mapped: Map, layout: Layout, limit: int) -> list[tuple[int, Box]]:
    """The boxes that a rank owns, as (layout index, box), each of at most `limit` bytes of canonical elements.

    Every element that the map is the source of is in one of them, once. The order is that of the map's shards, and
    inside a box that of the local tensor, so that it is read from its beginning to its end, in runs even where it is
    the canonical one transposed; the same map gives the same list. A box is cut along its outermost axes: a flat one at
    multiples of `limit` from its start. An element is never cut.
    """
    made = []
    for shard in mapped.shards:
        for region in sorted(shard.regions, key=lambda region: region.src):
            index = layout.index(region.name)
            most = max(1, limit // layout[index].width)
            made += [(index, part) for whole in _boxes(region) for part in parts(whole, most)]
    return made


def _boxes(region: Region) -> list[Box]:
    """The canonical side in the order of the local one; pieces in canonical order if that takes too many axes."""
    local = invert(normalise(invert(region)))
    try:
        return [box(local)]
    except ValueError:
        return [box(piece) for piece in wire_pieces(region)]


def parts(whole: Box, most: int) -> Iterator[Box]:
    """A box in pieces of at most `most` elements, in its own row-major order."""
    if whole.elements <= most:
        yield whole
        return
    for starts, sizes in slices(whole.shape, most):
        axes = [(n, stride) for n, stride in zip(sizes, whole.strides, strict=True) if n > 1] or [(1, 1)]
        first = whole.dst + sum(at * stride for at, stride in zip(starts, whole.strides, strict=True))
        yield Box(first, tuple(n for n, _ in axes), tuple(stride for _, stride in axes))


def slices(shape: Sequence[int], most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Starts and sizes of slices of a row-major array of `shape`, in order, each of at most `most` elements that lie
    side by side in it: whole rows while a row is small enough, else parts of one."""
    if not shape:
        yield (), ()
        return
    rows, row = shape[0], math.prod(shape[1:])
    if row <= most:
        step = max(1, most // row)
        for at in range(0, rows, step):
            yield (at, *[0] * (len(shape) - 1)), (min(step, rows - at), *shape[1:])
        return
    for at in range(rows):
        for starts, sizes in slices(shape[1:], most):
            yield (at, *starts), (1, *sizes)
