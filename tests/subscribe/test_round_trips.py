"""How many requests follow one another from the seal of a version to its commit, on a store whose answers take long."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from support.measure.replica_requests import ReplicaBench, measure

from dcr_daemon.events import ChunkFetched, Prepared, SealSeen, Staged

DELAY = 1.0  #: seconds of every answer; nothing else takes time in this clock


@pytest.mark.parametrize(("prefetched", "trips"), [(True, 1), (False, 2)])
def test_a_version_is_staged_after_part_and_vector_and_the_chunks_that_are_missing(
    prefetched: bool, trips: int
) -> None:
    """Part and vector come side by side, then the chunks; the vector of the version before is here."""

    async def depths(bench: ReplicaBench) -> list[float]:
        found = []
        for version in range(1, 4):
            stream = bench.stream
            stream.versions.step()
            await stream.open(version)
            chunks = [await stream.put(version, chunk) for chunk in stream.chunks(version)]
            await asyncio.sleep(60 if prefetched else 0)
            await stream.seal(version, chunks)
            await asyncio.sleep(60)
            begins, stages, prepares = (bench.events.last(kind) for kind in (SealSeen, Staged, Prepared))
            assert prepares == stages, "nothing is read between them"
            found.append((stages - begins) / DELAY)
        fetched = Counter(event.sealed for event in bench.events.of(ChunkFetched))
        assert fetched[not prefetched] == fetched.total() > 0
        return found

    assert measure(depths, delay=DELAY, poll=1.0, poll_max=30.0)[1:] == [trips, trips]
