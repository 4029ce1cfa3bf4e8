"""DeepSpeed ZeRO-3: every parameter is a flat row of elements, cut in equal partitions.

Partition r of W holds elements [r·p, (r + 1)·p) of the flattened parameter, p = ceil(elements / W), as
`partition_parameters.py` cuts it; the last ones are padded, or hold nothing but padding. Parameters below the
persistence threshold are whole on every rank: they are replicas, and have an owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dcr_daemon.canonical.region import Region, intersect_src
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.owners import owned


def partition(
    regions: Iterable[Region], elements: int, rank: int, world: int, *, size: int | None = None
) -> list[Region]:
    """What lies in a rank's partition of a parameter, places counted from the partition's start.

    Args:
        regions: of the whole parameter (its conversion to canonical tensors).
        elements: of the whole parameter.
        size: elements per partition where the framework aligns them (DeepSpeed's own `ds_tensor.ds_numel`); else p.

    Raises:
        Incompatible: partitions of `size` are too small to hold the parameter.
    """
    size = -(-elements // world) if size is None else size
    if size * world < elements:
        raise Incompatible(f"{world} partitions of {size} elements cannot hold a parameter of {elements}")
    lo, hi = rank * size, min((rank + 1) * size, elements)
    return [piece.shifted(src=-lo) for region in regions for piece in intersect_src(region, lo, hi)]


def flat_range(parameters: Sequence[tuple[Sequence[Region], int]], lo: int, hi: int) -> list[Region]:
    """What lies at [lo, hi) of one flat buffer of several parameters: FSDP1, and distributed optimizers.

    Args:
        parameters: regions and elements of each, in the order of the buffer; padding is a parameter without regions.
    """
    found, at = [], 0
    for regions, elements in parameters:
        start, stop = max(lo, at), min(hi, at + elements)
        if start < stop:
            found += [piece.shifted(src=at - lo) for r in regions for piece in intersect_src(r, start - at, stop - at)]
        at += elements
    return found


def persistent(regions: Iterable[Region], rank: int, world: int) -> list[Region]:
    """What a rank owns of a parameter that every rank keeps whole."""
    return owned(regions, rank, world)
