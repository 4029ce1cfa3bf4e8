"""A publisher whose disk is full, at each door: it says so or does without, loses nothing, and goes on with room.

What must hold afterwards, whichever door was shut and when: every checkpoint is one version, bit for bit, and the
baseline is the head, proved by its fingerprint.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from support.faults.full_disk import FullDisk
from support.streams.watching_publisher import Publishing

from dcr_daemon.errors import ResourceExhausted
from dcr_daemon.events import Aborted, Sealed

#: doors that a publisher on a file:// stream goes through, and what a shut one means
DOORS = {
    "disk.baseline.write": "refused",
    "disk.name.write": "refused",
    "disk.name.sync": "refused",
    "disk.name.rename": "refused",
    "disk.name.synced": "refused",
    "disk.mark.write": "refused",
    "disk.mark.sync": "refused",
    "disk.mark.rename": "refused",
    "disk.mark.synced": "refused",
    "disk.spool.write": "refused",
    "disk.object.write": "refused",
    "disk.hint.write": "done without",
    "disk.hint.rename": "done without",
    "disk.chain.write": "done without",
    "disk.chain.rename": "done without",
    "disk.published.write": "done without",
    "disk.published.rename": "done without",
}
ONCE = ("disk.baseline.write", "disk.hint", "disk.name", "disk.published", "disk.chain")


@pytest.fixture
def publishing(tmp_path: Path) -> Publishing:
    return Publishing(tmp_path)


async def until(condition: Callable[[], object], task: asyncio.Task[None]) -> None:
    """Wait while the publisher runs; its failure is the test's."""
    async with asyncio.timeout(60):
        while not condition():
            if task.done():
                task.result()
            await asyncio.sleep(0.01)


def passes(door: str) -> list[int]:
    """Passes that the door is open for before it is shut: at the first, at a later one."""
    return [0] if door.startswith(ONCE) else [0, 2]


CASES = [
    pytest.param(door, after, number, id=f"{door}:{after}={errno.errorcode[number]}")
    for door in DOORS
    for after in passes(door)
    for number in (errno.ENOSPC, errno.EIO)
    if (door, number) != ("disk.object.write", errno.EIO)  # a bucket that does not answer: see below
]


@pytest.mark.parametrize(("door", "after", "number"), CASES)
def test_a_shut_door_is_told_and_costs_nothing_that_counted(publishing, full_disk: FullDisk, door, after, number):
    full_disk.shut(door, after=after, number=number)
    if DOORS[door] == "refused":
        with pytest.raises(ResourceExhausted) as refused:
            publishing.run()
        assert refused.value.exit_code == 14
        assert refused.value.hint
    else:
        publishing.run()
    assert full_disk.refused[door]
    full_disk.relieve()
    publishing.run()
    publishing.check()


@pytest.mark.parametrize("door", ["disk.object.write", "disk.object.sync", "disk.object.synced"])
def test_an_object_of_which_nobody_knows_is_put_until_it_is_there(publishing, full_disk: FullDisk, door):
    """Its outcome is unknown, not failed: nothing is given up, and what is sealed is durable (musts L1, L4)."""

    async def relieve_later() -> None:
        task = asyncio.create_task(publishing.publish(once=True))
        await until(lambda: full_disk.refused[door], task)
        await asyncio.sleep(0.1)
        full_disk.relieve()
        await task

    full_disk.shut(door, after=5, number=errno.EIO)
    asyncio.run(asyncio.wait_for(relieve_later(), 120))
    publishing.check()


def test_a_disk_that_fills_up_under_a_running_publisher(publishing, full_disk: FullDisk):
    """The second version's chunks do not fit: the daemon ends with its reason, and its next life goes on."""
    late = publishing.root / "late"
    (publishing.root / "watch/step_2").rename(late)

    async def run() -> None:
        task = asyncio.create_task(publishing.publish(once=False))
        await until(lambda: publishing.events.of(Sealed), task)
        full_disk.shut("disk.spool.write")
        late.rename(publishing.root / "watch/step_2")
        await task

    with pytest.raises(ResourceExhausted, match="spool"):
        asyncio.run(asyncio.wait_for(run(), 120))
    assert [event.version for event in publishing.events.of(Sealed)] == [1]
    assert [event.version for event in publishing.events.of(Aborted)] == [2]
    full_disk.relieve()
    publishing.run()
    publishing.check()
