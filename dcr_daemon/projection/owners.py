"""The owner of what several ranks hold: one per region, computed alike on every rank without communication."""

from __future__ import annotations

from collections.abc import Iterable

from dcr_daemon.canonical.region import Region


def owner(name: str, first: int, replicas: int) -> int:
    """Number of the replica that owns the region of `name` that starts at canonical element `first`.

    xxh3-64 over the name's UTF-8 bytes and `first` as u64, little-endian, modulo `replicas`: spread over the replicas,
    and independent of Python's own hash, which differs in each process.
    """
    import xxhash

    return xxhash.xxh3_64_intdigest(name.encode() + first.to_bytes(8, "little")) % replicas


def owned(regions: Iterable[Region], replica: int, replicas: int) -> list[Region]:
    """The regions that replica number `replica` owns, of `regions` that all `replicas` hold."""
    return [region for region in regions if owner(region.name, region.dst, replicas) == replica]
