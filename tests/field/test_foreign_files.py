"""A served directory made of links: what they lead to belongs to somebody else, and is never written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.streams.replica import Replica
from support.streams.writer import StreamWriter

from dcr_daemon.errors import EngineRefused

Make = Callable[..., Any]


def link_all(files: Path, directory: Path, kind: str) -> None:
    """`directory` as a download cache makes it: a link to each of `files`."""
    directory.mkdir(parents=True)
    for path in files.iterdir():
        if kind == "hard":
            (directory / path.name).hardlink_to(path)
        else:
            (directory / path.name).symlink_to(_target(path, directory, kind))


def _target(path: Path, directory: Path, kind: str) -> str:
    return os.path.relpath(path, directory) if kind == "relative" else str(path)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


async def advanced(make_stream: Make, versions: int = 1) -> StreamWriter:
    stream: StreamWriter = await make_stream(versions, rate=0.3)
    for version in range(1, versions + 1):
        await stream.publish(version)
    return stream


@pytest.mark.parametrize("kind", ["relative", "absolute", "hard"])
@pytest.mark.parametrize("route", ["chain", "anchor"])
async def test_a_snapshot_of_a_download_cache_is_served_and_the_cache_keeps_its_bytes(
    make_stream: Make, make_replica: Make, tmp_path: Path, kind: str, route: str
) -> None:
    """Engines wrote through links into the content-named files of a cache, under all its users."""
    stream = await advanced(make_stream)
    if route == "anchor":
        await stream.anchor(1)
    blobs = stream.versions.save(tmp_path / "blobs", 0, shard_bytes=30_000)
    before = contents(blobs)
    replica: Replica = make_replica(stream)
    link_all(blobs, replica.directory, kind)
    await replica.once()
    assert stream.versions.version_of(replica.directory) == 1
    assert (replica.directory / "config.json").read_bytes() == before["config.json"]
    assert contents(blobs) == before


@pytest.mark.parametrize("kind", ["relative", "absolute", "hard"])
async def test_a_link_in_the_place_of_the_config_is_there_again_after_a_change(
    make_stream: Make, make_replica: Make, tmp_path: Path, kind: str
) -> None:
    """A relative link leads nowhere from the place where it is kept meanwhile, and was lost there."""
    stream = await advanced(make_stream)
    replica: Replica = make_replica(stream).at_base(stream)
    (tmp_path / "elsewhere").mkdir()
    config = replica.directory / "config.json"
    foreign = config.rename(tmp_path / "elsewhere" / "config.json")
    if kind == "hard":
        config.hardlink_to(foreign)
    else:
        config.symlink_to(_target(foreign, replica.directory, kind))
    await replica.once()
    assert config.read_bytes() == foreign.read_bytes() == b'{"model_type": "toy"}'
    assert stream.versions.version_of(replica.directory) == 1


async def test_a_config_that_is_a_link_to_nothing_stays_one(make_stream: Make, make_replica: Make) -> None:
    stream = await advanced(make_stream)
    replica: Replica = make_replica(stream).at_base(stream)
    config = replica.directory / "config.json"
    config.unlink()
    config.symlink_to("gone.json")
    await replica.once()
    assert config.readlink() == Path("gone.json")
    assert stream.versions.version_of(replica.directory) == 1


async def test_a_link_to_somebody_elses_directory_is_refused(
    make_stream: Make, make_replica: Make, tmp_path: Path
) -> None:
    """The base was changed under its own name, because `current` was a link to it."""
    stream = await advanced(make_stream)
    base = stream.versions.save(tmp_path / "base", 0)
    before = contents(base)
    replica: Replica = make_replica(stream)
    replica.directory.symlink_to(base)
    with pytest.raises(EngineRefused, match=f"is a link to {base}, which is not DCR's to change"):
        await replica.once()
    assert contents(base) == before


async def test_a_link_to_an_empty_directory_and_to_one_that_is_followed_already_is_fine(
    make_stream: Make, make_replica: Make, tmp_path: Path
) -> None:
    stream = await advanced(make_stream)
    await stream.anchor(1)
    replica: Replica = make_replica(stream)
    disk = tmp_path / "another disk"
    disk.mkdir()
    replica.directory.symlink_to(disk)
    await replica.once()
    await replica.once()
    assert replica.directory.is_symlink()
    assert stream.versions.version_of(disk) == 1


async def test_a_link_in_the_place_of_the_engines_own_directory_is_refused(
    make_stream: Make, make_replica: Make, tmp_path: Path
) -> None:
    stream = await advanced(make_stream)
    replica: Replica = make_replica(stream).at_base(stream)
    (tmp_path / "foreign").mkdir()
    (replica.directory / ".dcr").symlink_to(tmp_path / "foreign")
    with pytest.raises(EngineRefused, match="is a link"):
        await replica.once()
    assert contents(tmp_path / "foreign") == {}
