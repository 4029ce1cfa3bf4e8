"""The boxes that a rank owns, cut to a bounded size: what one segment of a chunk may span."""

from __future__ import annotations

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.canonical.region import Region, box, invert, normalise, wire_pieces
from dcr_daemon.projection.region_map import Map


def blocks(mapped: Map, layout: Layout, limit: int) -> list[tuple[int, Box]]:
    """The boxes that a rank owns, as (layout index, box), each of at most `limit` bytes of canonical elements.

    Every element that the map is the source of is in one of them, once. The order is that of the map's shards, and
    inside a box that of the local tensor, so that it is read from its beginning to its end, in runs even where it is
    the canonical one transposed; the same map gives the same list. A box is cut along its outermost axes: a flat one at
    multiples of `limit` from its start. An element is never split.
    """
    made = []
    for shard in mapped.shards:
        for region in sorted(shard.regions, key=lambda region: region.src):
            index = layout.index(region.name)
            elements = max(1, limit // layout[index].width)
            made += [(index, part) for whole in _boxes(region) for part in whole.split(elements)]
    return made


def _boxes(region: Region) -> list[Box]:
    """The canonical side in the order of the local one; pieces in canonical order if that takes too many axes."""
    local = invert(normalise(invert(region)))
    try:
        return [box(local)]
    except ValueError:
        return [box(piece) for piece in wire_pieces(region)]
