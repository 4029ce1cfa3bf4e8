"""A publisher whose disk is full, at each door: it says so or does without, loses nothing, and goes on with room.

What must hold afterwards, whichever door was shut and when: every checkpoint is one version, bit for bit, and the
baseline is the head, proved by its fingerprint.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from full_disk import FullDisk
from replicas import Events

from dcr_daemon.canonical.fingerprint import Bits, fingerprint
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.directory import Checkpoint, write_checkpoint
from dcr_daemon.errors import Exhausted
from dcr_daemon.events import Aborted, Sealed
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.publish.baseline import Baseline
from dcr_daemon.publish.options import stream_state
from dcr_daemon.publish.watch import WatchOptions, run_watch
from dcr_daemon.runtime import Workers
from dcr_daemon.store.file import FileStore
from dcr_daemon.subscribe.materialize import materialize

LAYOUT = Layout([TensorSpec("a", "BF16", (64, 64)), TensorSpec("b", "F32", (100,)), TensorSpec("c", "BF16", (5000,))])

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
    "disk.published.write": "done without",
    "disk.published.rename": "done without",
}
ONCE = ("disk.baseline.write", "disk.name", "disk.published")


class Publishing:
    """A base, two checkpoints to publish, and whatever state there is."""

    def __init__(self, root: Path) -> None:
        self.root, self.events = root, Events()
        rng = np.random.default_rng(0)
        first = {s.name: rng.integers(0, 256, s.nbytes, dtype="u1").view(f"<u{s.width}") for s in LAYOUT}
        self.chain: list[dict[str, Bits]] = [first]
        self._write("base", first)
        for n in (1, 2):
            last = self.chain[-1]
            moved = {name: bits + (rng.random(bits.size) < 0.1).astype(bits.dtype) for name, bits in last.items()}
            self.chain.append(moved)
            self._write(f"watch/step_{n}", moved)

    def _write(self, name: str, weights: dict[str, Bits]) -> None:
        write_checkpoint(self.root / name, LAYOUT, weights.__getitem__)

    def store(self) -> FileStore:
        return FileStore(self.root / "bucket")

    def run(self, *, once: bool = True) -> None:
        """`dcr publish --watch --once` in this process."""
        asyncio.run(self.publish(once=once))

    async def publish(self, *, once: bool) -> None:
        options = WatchOptions(
            state=self.root / "state", base=self.root / "base", create=True, watch=self.root / "watch", once=once,
            poll=0.02, anchor_every=1, chunk_bytes=300, spool_memory=0, upload_backlog=1000, workers=2, name="p",
        )  # fmt: skip
        store = self.store()
        try:
            await run_watch(options, store, self.events)
        finally:
            await store.close()

    def check(self) -> None:
        """Two versions, bit for bit, and a baseline that is the newest."""
        asyncio.run(self._check())

    async def _check(self) -> None:
        store = self.store()
        ledger = Ledger(store)
        await ledger.read()
        seals = await ledger.history.between(1)
        assert [seal.source["path"] for seal in seals if seal.source] == ["step_1", "step_2"]
        for version in (1, 2):
            out = self.root / f"built-{version}"
            await materialize(store, version=version, out=out)
            with Checkpoint(out) as checkpoint:
                assert all(np.array_equal(checkpoint.bits(name), bits) for name, bits in self.chain[version].items())
        workers = Workers(1)
        baseline = Baseline(stream_state(self.root / "state", store.url), LAYOUT, ledger.stream.stream, workers)
        proved = fingerprint(LAYOUT, [self.chain[2][spec.name] for spec in LAYOUT])
        hint = baseline.hint()
        assert np.array_equal(await baseline.fingerprint(), proved)
        assert hint is None or (hint[0] == 2 and np.array_equal(hint[1], proved))
        baseline.close()
        workers.close()
        await store.close()


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
        with pytest.raises(Exhausted) as refused:
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

    with pytest.raises(Exhausted, match="spool"):
        asyncio.run(asyncio.wait_for(run(), 120))
    assert [event.version for event in publishing.events.of(Sealed)] == [1]
    assert [event.version for event in publishing.events.of(Aborted)] == [2]
    full_disk.relieve()
    publishing.run()
    publishing.check()
