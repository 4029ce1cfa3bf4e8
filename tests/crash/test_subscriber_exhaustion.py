"""A subscriber whose disk or tmpfs is full, at each door: the replica serves on, whole, and goes on when there is room.

A replica that serves version 0 gets version 1 while one door is shut. Whatever it could not write, what a loader finds
in its directory is a whole version or nothing; it says what is in the way; with the door open it gets there by itself.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
from pathlib import Path

import pytest
from support.faults.full_disk import FullDisk, Tmpfs
from support.streams.replica import Replica
from support.streams.writer import StreamWriter

from dcr_daemon.errors import ResourceExhausted
from dcr_daemon.events import Committed, Degraded, Notice, Serving
from dcr_daemon.store.file import FileStore
from dcr_daemon.subscribe.materialize import materialize

#: doors on the way of a version, or of an anchor, into a served directory
CHAIN = [
    "disk.mark.write", "disk.mark.sync", "disk.mark.rename", "disk.mark.synced", "disk.staged.write",
    "disk.staged.rename", "disk.journal.write", "disk.journal.sync", "disk.engine.write", "disk.engine.sync",
    "disk.engine.rename", "disk.engine.synced", "disk.tensors.sync",
]  # fmt: skip
ANCHOR = [
    "disk.staged.write", "disk.staged.rename", "disk.tensors.write", "disk.tensors.sync", "disk.checkpoint.synced",
    "disk.journal.write", "disk.journal.sync", "disk.engine.write", "disk.engine.sync", "disk.engine.rename",
    "disk.engine.synced",
]  # fmt: skip
NUMBERS = [pytest.param(errno.ENOSPC, id="ENOSPC"), pytest.param(errno.EIO, id="EIO")]


def loadable(stream: StreamWriter, replica: Replica, home: Path) -> int | None:
    """The version that a loader finds, None if it is kept from loading anything; a mixture is a failure."""
    if not (replica.directory / "config.json").exists():
        return None
    seen = home / "as a loader sees it"
    shutil.copytree(replica.directory, seen, ignore=shutil.ignore_patterns(".dcr"))
    try:
        version = stream.versions.version_of(seen)
        assert version is not None, "a loader would load a mixture"
        return version
    finally:
        shutil.rmtree(seen)


async def check(stream: StreamWriter, replica: Replica, target: int) -> None:
    """There, bit for bit, and nothing half done lies about; a next start finds nothing to do."""
    assert stream.versions.version_of(replica.directory) == target
    committed = len(replica.events.of(Committed))
    await replica.once()
    assert len(replica.events.of(Committed)) == committed
    leftover = {path.name for path in (replica.directory / ".dcr").iterdir()}
    assert leftover <= {"version.json", "owner.json"}


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("door", CHAIN)
async def test_a_version_that_cannot_be_written(make_stream, make_replica, tmp_path, full_disk: FullDisk, door, number):
    stream = await make_stream(1, rate=0.2)
    replica = make_replica(stream).at_base(stream)
    async with replica.running() as task:
        await replica.until(lambda: replica.events.of(Serving), task)
        full_disk.shut(door, number=number)
        await stream.publish(1)
        await replica.until(lambda: full_disk.refused[door], task)
        for _ in range(10):
            assert loadable(stream, replica, tmp_path) in (0, 1, None)
            await asyncio.sleep(0.01)
        assert replica.events.of(Serving)[-1].version == 0 or not door.startswith("disk.staged")
        full_disk.relieve()
        await replica.until(lambda: replica.events.of(Serving)[-1].version == 1, task)
        assert replica.events.of(Notice)
    await check(stream, replica, 1)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("door", ANCHOR)
async def test_an_anchor_that_cannot_be_written(make_stream, make_replica, tmp_path, full_disk: FullDisk, door, number):
    stream = await make_stream(1, rate=0.2)
    await stream.publish(1)
    await stream.anchor(1)
    replica = make_replica(stream)
    full_disk.shut(door, number=number)
    async with replica.running() as task:
        await replica.until(lambda: full_disk.refused[door], task)
        for _ in range(10):
            assert not replica.directory.exists() or loadable(stream, replica, tmp_path) in (1, None)
            await asyncio.sleep(0.01)
        full_disk.relieve()
        await replica.until(lambda: replica.events.of(Serving), task)
    await check(stream, replica, 1)


@pytest.mark.parametrize("door", [*ANCHOR[:5], "disk.journal.write"])
async def test_once_and_a_build_end_with_what_is_full(make_stream, make_replica, tmp_path, full_disk: FullDisk, door):
    stream = await make_stream(1)
    await stream.publish(1)
    await stream.anchor(1)
    replica, store = make_replica(stream), FileStore(stream.home)
    full_disk.shut(door)
    with pytest.raises(ResourceExhausted) as refused:
        await replica.once()
    assert refused.value.exit_code == 14
    with pytest.raises(ResourceExhausted):
        await materialize(store, out=tmp_path / "built")
    assert not list(tmp_path.glob(".built*")), "nothing is left behind"
    full_disk.relieve()
    await materialize(store, out=tmp_path / "built")
    assert stream.versions.version_of(tmp_path / "built") == 1
    await replica.once()
    await check(stream, replica, 1)


async def test_a_status_object_that_cannot_be_written_is_no_reason_to_stop(
    make_stream, make_replica, full_disk: FullDisk
):
    stream = await make_stream(1)
    await stream.publish(1)
    replica = make_replica(stream).at_base(stream)
    full_disk.shut("disk.object.write")
    await replica.once()
    assert stream.versions.version_of(replica.directory) == 1
    assert any("status object" in event.what for event in replica.events.of(Degraded))


@pytest.mark.parametrize("place", ["staging", "current", "state"])
async def test_a_real_file_system_that_is_full(make_stream, make_replica, tmp_path, tmpfs: Tmpfs, place):
    """Staging, the served directory, or the state lies on a tmpfs in which 8 KiB are left."""
    stream = await make_stream(1, rate=0.5)
    replica = make_replica(stream)
    if place == "current":
        replica.directory = tmpfs.path / "current"
    elif place == "state":
        replica.home = tmpfs.path / "home"
    options = {"staging": tmpfs.path / "staging"} if place == "staging" else {"staging": tmp_path / "staging"}
    replica.at_base(stream)
    async with replica.running(**options) as task:
        await replica.until(lambda: replica.events.of(Serving), task)
        tmpfs.fill(leave=0 if place == "state" else 8192)
        await stream.publish(1)
        await replica.until(lambda: any("space" in event.what for event in replica.events.of(Notice)), task)
        assert loadable(stream, replica, tmp_path) == 0
        assert replica.events.of(Serving)[-1].version == 0
        tmpfs.relieve()
        await replica.until(lambda: replica.events.of(Serving)[-1].version == 1, task)
    assert stream.versions.version_of(replica.directory) == 1
