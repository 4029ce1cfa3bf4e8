"""Owners: one per region, spread evenly, and the same number in every process and language."""

from __future__ import annotations

from collections import Counter

import xxhash

from dcr_daemon.canonical.region import Region, slab
from dcr_daemon.projection.owners import owned, owner


def test_the_owner_is_the_number_that_the_format_says() -> None:
    digest = xxhash.xxh3_64(b"model.norm.weight" + bytes([2, 1, 0, 0, 0, 0, 0, 0])).intdigest()
    assert [owner("model.norm.weight", 258, n) for n in (1, 2, 7)] == [0, digest % 2, digest % 7]


def test_every_region_has_one_owner_and_the_load_is_spread() -> None:
    regions = [r for i in range(400) for r in slab(f"layer.{i}.w", (8, 8), starts=(0, 0), sizes=(4, 8))]
    taken: Counter[Region] = Counter()
    for replica in range(4):
        mine = owned(regions, replica, 4)
        assert 60 < len(mine) < 140
        taken.update(mine)
    assert set(taken.values()) == {1}
    assert len(taken) == len(regions)
