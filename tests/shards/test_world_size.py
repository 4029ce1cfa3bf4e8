"""A training job is started again with other degrees, and at last as one process: it is the same stream."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes.fork_server import ForkServer
from support.ranks.group_scenes import Ranks
from support.ranks.programs.steps import NAME, write_step

pytestmark = pytest.mark.slow


async def grow_and_shrink(group: Ranks, meshes: list[str]) -> list[int]:
    """Two versions by each mesh; the world of each version."""
    worlds = []
    for mesh in meshes:
        life = group.start(mesh, len(worlds) + 2)
        group.go(len(worlds) + 1, len(worlds) + 2)
        await group.through(life)
        worlds += [len(life.processes)] * 2
    return worlds


async def test_the_number_of_ranks_changes_and_the_stream_goes_on(
    ranks: ForkServer, tmp_path: Path, s3_stream: str
) -> None:
    group = Ranks(ranks, tmp_path, s3_stream)
    worlds = await grow_and_shrink(group, ["4", "2", "4"])
    await group.check(6, worlds=worlds)


async def test_meshes_change_and_in_the_end_one_process_goes_on_from_a_directory(
    ranks: ForkServer, tmp_path: Path, s3_stream: str
) -> None:
    group = Ranks(ranks, tmp_path, s3_stream)
    worlds = await grow_and_shrink(group, ["2x2", "1x4", "4", "2x1", "1"])
    step = len(worlds) + 1
    write_step(tmp_path / "watch" / f"step_{step}", step)
    places = ["--to", s3_stream, "--watch", str(tmp_path / "watch"), "--state", str(tmp_path / "watching")]
    watcher = ranks.start(["publish", *places, "--name", NAME, "--once"], tmp_path / "watcher.log")
    assert await watcher.wait() == 0, watcher.said()
    await group.check(step, worlds=[*worlds, 1])
