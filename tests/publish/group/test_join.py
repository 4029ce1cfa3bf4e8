"""Rank 0 adds up what the others put, as it comes, and takes nothing else for it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from support.measure.round_trips import RoundTrips

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.errors import Corrupt, KeyNotFound, StoreUnavailable
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.listed import read_listed
from dcr_daemon.ledger.objects import Objects
from dcr_daemon.ledger.records import ObjectRef, Open, Part
from dcr_daemon.publish.group.join import CONCURRENCY, Joined, join
from dcr_daemon.publish.version.attempt import Contribution, Upload

LAYOUT = Layout([TensorSpec(f"t{n}", "BF16", (4,)) for n in range(5)])
WORLD = 40


class Bucket:
    """Objects in memory; the first `late` reads of each key find nothing."""

    url = "mem://"

    def __init__(self, late: int = 0) -> None:
        self.objects: dict[str, bytes] = {}
        self.late, self.reads = late, dict[str, int]()
        self.running = self.most = 0

    async def get(self, key: str, *, limit: int, keep: Any = None) -> bytes:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        self.reads[key] = self.reads.get(key, 0) + 1
        if self.reads[key] <= self.late or key not in self.objects:
            raise KeyNotFound(key)
        return self.objects[key]

    def put(self, key: str, body: bytes) -> ObjectRef:
        self.objects[key] = body
        return ObjectRef(key, len(body), records.digest(body))


class Rig:
    def __init__(self, late: int = 0) -> None:
        self.store: Any = Bucket(late)
        head = {"stream": "s", "seq": 7, "prev": "0" * 64, "state": None, "nonce": "n", "at": "", "epoch": 1}
        self.opened = Open(**head, version=3, base=2, group="g", call=4)
        rng = np.random.default_rng(0)
        self.vectors = rng.integers(0, 1 << 64, (WORLD, 2, len(LAYOUT)), dtype=np.uint64)
        self.keys = {n: self.part(n) for n in range(1, WORLD)}

    def part(self, n: int, **change: Any) -> str:
        sums = self.store.put(names.sums(3, 7, "g", n, "x"), self.vectors[n].astype("<u8").tobytes())
        part = Part(
            stream="s", group="g", call=4, attempt=7, base=2, version=3, rank=n, nonce="x", chunks=[], sums=sums,
            changed=n, bytes=10 * n,
        )  # fmt: skip
        key = names.part(3, 7, "g", n, "x")
        self.store.put(key, records.encode(msgspec.structs.replace(part, **change)))
        return key

    def join(self) -> Joined:
        own = Contribution(Upload.of("data/3/7/own", b"?"), Upload.of("sums", b"?"), *self.vectors[0], 5, 50)
        objects = Objects(self.store, floor=lambda: 0, patience=5)
        return asyncio.run(join(own, self.keys, self.opened, objects=objects, layout=LAYOUT, patience=5.0))


@pytest.mark.parametrize("late", [0, 1])
def test_all_ranks_are_added_up_a_few_at_a_time(late: int) -> None:
    """LIST may name what a GET does not find yet (must L6)."""
    rig = Rig(late)
    joined = rig.join()
    assert np.array_equal(joined.before, rig.vectors[:, 0].sum(axis=0, dtype=np.uint64))
    assert np.array_equal(joined.after, rig.vectors[:, 1].sum(axis=0, dtype=np.uint64))
    assert (joined.changed, joined.bytes) == (5 + sum(range(WORLD)), 50 + 10 * sum(range(WORLD)))
    assert [ref.key for ref in joined.parts] == ["data/3/7/own", *(rig.keys[n] for n in range(1, WORLD))]
    assert (joined.anchor, joined.unverified_base) == (False, False)
    assert rig.store.most <= 3 * CONCURRENCY  # the part twice, since nobody vouches for it, and the sums


def test_a_part_and_its_sums_are_read_in_one_round_trip() -> None:
    rig = Rig()
    rig.store = trips = RoundTrips(rig.store)
    rig.join()
    assert trips.trips == -(-(WORLD - 1) // CONCURRENCY)
    assert {trips.gets[key] for key in rig.keys.values()} == {2}
    assert trips.asked(".sums") == WORLD - 1


def test_sums_that_are_not_what_the_part_says_are_read_again() -> None:
    """What lies under their name when the part is read is a guess; the part's digest decides."""
    rig = Rig()
    bucket = rig.store
    right, spoiled = bucket.get, []

    async def get(key: str, **options: Any) -> bytes:
        body = await right(key, **options)
        if key.endswith(".sums") and key not in spoiled:
            spoiled.append(key)
            return bytes(len(body))
        return body

    bucket.get = get
    joined = rig.join()
    assert len(spoiled) == WORLD - 1
    assert np.array_equal(joined.after, rig.vectors[:, 1].sum(axis=0, dtype=np.uint64))


@pytest.mark.parametrize(("field", "joined"), [("anchor", "anchor"), ("stray", "unverified_base")])
def test_what_one_rank_says_counts_for_all(field: str, joined: str) -> None:
    rig = Rig()
    rig.part(17, **{field: True})
    assert getattr(rig.join(), joined)


@pytest.mark.parametrize(
    "change", [{"group": "h"}, {"call": 5}, {"attempt": 6}, {"base": 1}, {"version": 4}, {"rank": 3}, {"stream": "z"}]
)
def test_a_part_of_anything_else_ends_the_attempt(change: dict[str, Any]) -> None:
    rig = Rig()
    rig.part(9, **change)
    with pytest.raises(Corrupt, match="another attempt"):
        rig.join()


def test_vectors_of_another_length_end_the_attempt() -> None:
    rig = Rig()
    rig.part(9, sums=rig.store.put("data/3/7/short.sums", bytes(8)))
    with pytest.raises(Corrupt, match="does not hold two vectors"):
        rig.join()


def test_what_is_listed_and_never_there_is_said() -> None:
    with pytest.raises(StoreUnavailable, match="is listed, and not there"):
        asyncio.run(read_listed(Rig().store, "data/3/7/none", limit=9, patience=0.05))
