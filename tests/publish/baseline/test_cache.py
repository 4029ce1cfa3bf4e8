"""The baseline's file follows the memory, and costs no more writes than the versions are worth."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.faults.failing_requests import FaultyStore, SmallWorld
from support.streams.publish_world import step_weights

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.blocks import BlockSet
from dcr_daemon.publish.baseline.baseline import Baseline
from dcr_daemon.publish.baseline.cache import SPAN, BaselineCache
from dcr_daemon.runtime import Workers

LARGE = Layout([TensorSpec("w", "BF16", (3 * SPAN // 2 + 5,))])  #: three spans and a little


@pytest.fixture
def workers() -> Iterator[Workers]:
    pool = Workers(1)
    yield pool
    pool.close()


def written(cache: BaselineCache) -> list[int]:
    """Bytes of each copy of a span from now on."""
    sizes, right = list[int](), cache.write

    def write(start: int) -> int:
        end = right(start)
        sizes.append(end - start)
        return end

    cache.write = write  # type: ignore[method-assign]
    return sizes


def test_versions_cost_at_most_twice_their_chunks_on_the_disk(small_world: SmallWorld) -> None:
    async def run() -> None:
        session = await small_world.open(FaultyStore(), anchor_every=None)
        baseline, weights, payload = session.context.baseline, small_world.base, 0
        path, cache = next((small_world.root / "one").rglob("baseline.bin")), baseline._cache
        assert not baseline.save_due  # it was saved when the stream was made
        sizes = written(cache)
        for seed in range(40):
            weights, before = step_weights(weights, seed, rate=0.01), path.read_bytes()
            attempt = await small_world.diff(session, weights)
            await session.seal(attempt)
            payload += attempt.size
            assert path.read_bytes() == before
            while baseline.save_due:
                await baseline.save_step()
            assert sum(sizes) <= 2 * payload
        assert sizes
        await session.close()
        again = Baseline(path.parent, baseline.blocks, baseline.stream, session.context.workers)
        hint = again.hint()
        assert hint is not None
        assert (hint[0], session.head) == (40, 40)

    asyncio.run(run())


def test_an_update_dirties_no_page_of_the_file(workers: Workers, tmp_path: Path) -> None:
    """Each page of a shared map is faulted in anew whenever the kernel has written it to the disk."""
    baseline = Baseline(tmp_path, BlockSet.whole(LARGE), "s", workers)
    baseline.commit(1, [])
    asyncio.run(baseline.save())
    for version in range(2, 5):
        os.sync()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for number in range(len(baseline.blocks)):
            baseline[number][:: 4096 // 2] = version
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        if version > 2:
            assert faults < 3 * SPAN // 4096 // 8
    assert not any((tmp_path / "baseline.bin").read_bytes())
    baseline.close()


@pytest.mark.parametrize("new", [True, False])
def test_a_fork_does_not_share_the_memory(workers: Workers, tmp_path: Path, new: bool) -> None:
    """Or each page that an update changes would be copied, while a data loader of the trainer lives."""
    if not new:
        Baseline(tmp_path, BlockSet.whole(LARGE), "s", workers).close()
    baseline = Baseline(tmp_path, BlockSet.whole(LARGE), "s", workers)
    assert baseline.new == new
    address = baseline[0].ctypes.data
    if (child := os.fork()) == 0:
        ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        os._exit(any(int(first, 16) <= address < int(last, 16) for first, last in ranges))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    baseline.close()


def test_a_fork_that_drops_it_loses_no_memory_of_its_own(tmp_path: Path) -> None:
    """The addresses are free in the fork, and given to whatever it allocates next."""
    cache = BaselineCache(tmp_path, 3 * SPAN)
    if (child := os.fork()) == 0:
        own = [np.ones(SPAN // 4, dtype=np.uint8) for _ in range(100)]
        del cache
        os._exit(sum(int(some.sum()) for some in own) != 100 * (SPAN // 4))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    cache.close()


async def test_a_copy_that_an_update_interrupts_is_known_as_torn(workers: Workers, tmp_path: Path) -> None:
    baseline = Baseline(tmp_path, BlockSet.whole(LARGE), "s", workers)
    baseline.commit(1, [])
    await baseline.save_step()
    assert baseline.hint() is None
    baseline.begin()
    baseline[0][:] = 7
    baseline.commit(2, [])
    assert not baseline.save_due  # what was written for nothing counts as written
    baseline.commit(3, [], size=2 * SPAN)
    while baseline.save_due:
        await baseline.save_step()
    hint = baseline.hint()
    assert hint is not None
    assert hint[0] == 3
    bits: Any = np.frombuffer((tmp_path / "baseline.bin").read_bytes(), "<u2")
    assert np.array_equal(bits[: baseline[0].size], baseline[0])
    baseline.close()


async def test_a_state_directory_that_cannot_be_written_ends_nothing(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline = Baseline(tmp_path, BlockSet.whole(LARGE), "s", workers)
    await baseline.adopt_unverified(1)

    def read_only(cache: BaselineCache) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(BaselineCache, "forget", read_only)
    assert baseline.save_due
    await baseline.save_step()
    assert not baseline.save_due
    await baseline.save()
    assert not any((tmp_path / "baseline.bin").read_bytes())
    baseline.close()


async def test_a_restart_begins_from_the_file_and_leaves_it(workers: Workers, tmp_path: Path) -> None:
    first = Baseline(tmp_path, BlockSet.whole(LARGE), "s", workers)
    first[0][:100] = 5
    await first.adopt_unverified(1)
    await first.save()
    vector = first.vector
    first.close()
    again = Baseline(tmp_path, BlockSet.whole(LARGE), "s", workers)
    assert not again.new
    await again.prove((1, vector))
    assert (again.version, again.save_due) == (1, False)
    again[0][:] = 9
    assert int(np.frombuffer((tmp_path / "baseline.bin").read_bytes()[:2], "<u2")[0]) == 5
    again.close()
