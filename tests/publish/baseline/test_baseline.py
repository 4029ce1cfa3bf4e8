from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.measure.running_tasks import running_tasks
from support.streams.publish_world import PublishWorld

from dcr_daemon.canonical.fingerprint import fingerprint
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.blocks import BATCH_BLOCKS, BlockSet
from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.errors import ResourceExhausted
from dcr_daemon.publish.baseline.baseline import Baseline
from dcr_daemon.runtime import Workers


@pytest.fixture
def workers() -> Any:
    pool = Workers(2)
    yield pool
    pool.close()


def test_what_was_loaded_survives_the_process_with_its_hint(
    world: PublishWorld, workers: Workers, tmp_path: Path
) -> None:
    async def load() -> Any:
        baseline = Baseline(tmp_path, BlockSet.whole(world.layout), "s", workers)
        with Checkpoint(world.base) as checkpoint:
            await baseline.load(checkpoint)
        assert baseline.version is None
        assert baseline.hint() is None
        vector = await baseline.fingerprint()
        await baseline.prove((3, vector + np.uint64(1)), (7, vector))
        assert baseline.version == 7
        assert baseline.hint() is None  # the file has not followed yet
        await baseline.save()
        baseline.close()
        return vector

    vector = asyncio.run(load())
    assert np.array_equal(vector, fingerprint(world.layout, [world.weights[s.name] for s in world.layout]))
    again = Baseline(tmp_path, BlockSet.whole(world.layout), "s", workers)
    hint = again.hint()
    assert hint is not None
    assert hint[0] == 7
    assert np.array_equal(hint[1], asyncio.run(again.fingerprint()))
    again.begin()
    assert again.hint() is not None  # what an attempt changes stays in memory
    again.distrust()
    assert again.hint() is None
    again.close()


def test_a_hint_of_another_stream_or_layout_counts_for_nothing(
    world: PublishWorld, workers: Workers, tmp_path: Path
) -> None:
    baseline = Baseline(tmp_path, BlockSet.whole(world.layout), "s", workers)
    baseline.commit(1, [])
    asyncio.run(baseline.save())
    assert baseline.hint() is not None
    assert Baseline(tmp_path, BlockSet.whole(world.layout), "other", workers).hint() is None
    assert Baseline(tmp_path, BlockSet.whole(Layout(world.layout.specs[1:])), "s", workers).hint() is None
    (tmp_path / "baseline.json").write_text("{")
    assert baseline.hint() is None


def test_a_disk_that_cannot_hold_the_model_is_said_at_the_start(
    world: PublishWorld, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ResourceExhausted, match=r"baseline\.bin"):
        Baseline(tmp_path, BlockSet.whole(world.layout), "s", workers)


async def test_a_baseline_of_many_small_tensors_is_summed_in_few_tasks(workers: Workers, tmp_path: Path) -> None:
    layout = Layout([TensorSpec(f"t{n:06}", "U8", (1,)) for n in range(3 * BATCH_BLOCKS)])
    baseline = Baseline(tmp_path, BlockSet.whole(layout), "s", workers)
    with running_tasks() as tasks:
        vector = await baseline.fingerprint()
        await baseline.prove((1, vector))
        assert await baseline.restored()
    baseline.close()
    assert tasks.started == 9
