"""Numbers that people read: a version that is told is a version that is there, once and for ever."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.streams.trainer import Gate, Trainer, until

from dcr_daemon.engine.directory.checkout import Checkout
from dcr_daemon.engine.directory.engine import DirectoryEngine
from dcr_daemon.errors import Corrupt, StoreUnavailable
from dcr_daemon.events import Committed, RolledBack, Serving
from dcr_daemon.ledger import names
from dcr_daemon.ledger.records import Seal
from dcr_daemon.observe.metrics import Metrics


class FailingDisk(Checkout):
    """What is written reads back wrong, `bad` times."""

    bad = 0

    def write(self, journal, layout, *, back=False):
        super().write(journal, layout, back=back)
        if self.bad and not back:
            self.bad -= 1
            raise Corrupt("planted: reads back wrong")


class FailingEngine(DirectoryEngine):
    def __init__(self, path: Path, bad: int) -> None:
        super().__init__(path)
        self._state.checkout = FailingDisk(path)
        self._state.checkout.bad = bad


async def test_an_apply_that_fails_raises_no_number_anywhere(make_trainer: Callable[..., Trainer]) -> None:
    """An apply failed, a warning was logged, and the version that everybody read went up all the same."""
    trainer = make_trainer(1)
    await trainer.publish(1)
    replica = trainer.replica(at=0)
    metrics = Metrics()
    engine = FailingEngine(replica.directory, bad=1 << 30)
    async with replica.running(engine) as task:
        await until(lambda: len(replica.events.of(RolledBack)) >= 2, task)
        assert not replica.events.of(Committed)
        assert [event.version for event in replica.events.of(Serving)] in ([], [0])
        status = json.loads(await trainer.bucket.get(names.replica("r1"), limit=1 << 20))
        assert (status["version"], status["head"]) == (0, 1)
        assert json.loads((replica.directory / ".dcr" / "version.json").read_bytes())["version"] == 0
        for event in replica.events:
            metrics(event)
    assert trainer.versions.version_of(replica.directory) == 0
    assert b"dcr_served_version 1.0" not in metrics.exposition()


async def test_what_one_apply_lost_is_not_lost_to_the_next_versions(make_trainer: Callable[..., Trainer]) -> None:
    """The sender moved on after an apply that had failed, and never sent those positions again.

    Here nobody sends: each replica takes what it lacks, however often its own memory or disk has failed."""
    trainer = make_trainer(3)
    await trainer.publish(1)
    replica = trainer.replica(at=0)
    async with replica.running(FailingEngine(replica.directory, bad=11)) as task:
        await until(lambda: len(replica.events.of(RolledBack)) >= 2, task)
        await trainer.publish(2, 3)
        await until(lambda: [e for e in replica.events.of(Serving) if e.version == 3], task)
    assert trainer.versions.version_of(replica.directory) == 3


async def test_a_number_is_never_used_again(make_trainer: Callable[..., Trainer]) -> None:
    """After a failover the counter began at 0 again, staleness came out negative and the worst samples passed."""
    trainer = make_trainer(4)
    versions = trainer.versions
    await trainer.publish(1, 2)
    shutil.rmtree(trainer.home / "publisher")
    shutil.rmtree(trainer.out)
    trainer.out.mkdir()
    versions.put(versions.values[1])  # version 5 has the weights of version 1: the trainer went back
    trainer.save(5, "checkpoint-1")
    await trainer.once(name="trainer-b", take_over=True)
    trainer.save(3, "checkpoint-2")
    await trainer.once(name="trainer-b", create=True)
    assert trainer.sealed == [(1, 1), (2, 2), (3, 1), (4, 2)]
    seals = [record for record in trainer.records() if isinstance(record, Seal)]
    assert [seal.version for seal in seals] == [1, 2, 3, 4]
    replica = trainer.replica(at=0)
    await replica.once()
    assert versions.version_of(replica.directory) == 3
    assert replica.events.of(Serving)[-1].version == 4


async def test_a_version_whose_last_upload_failed_does_not_exist(make_trainer: Callable[..., Trainer]) -> None:
    """A version was marked stable although the copy of its weights had failed."""
    trainer = make_trainer(2)
    await trainer.publish(1)
    line = trainer.line()

    async def lose_the_last(operation: str, key: str) -> None:
        if operation == "create" and key.startswith("data/2/") and not key.endswith("-0.dcr"):
            raise StoreUnavailable("the chunk does not get through")

    line.before = lose_the_last
    with pytest.raises(StoreUnavailable):
        await trainer.publish(2, line=line, chunk_bytes=1000)
    assert [key for operation, key in line.asked if operation == "create" and key.endswith(".dcr")]
    assert trainer.sealed == [(1, 1)]
    assert not any(isinstance(record, Seal) and record.version == 2 for record in trainer.records())
    replica = trainer.replica(at=0)
    await replica.once()
    assert trainer.versions.version_of(replica.directory) == 1
    await trainer.once()
    await replica.once()
    assert trainer.versions.version_of(replica.directory) == 2


async def test_a_baseline_moves_with_the_seal_and_not_with_the_files(make_trainer: Callable[..., Trainer]) -> None:
    """The writer's baseline advanced when files were written; a crash before the commit lost the difference."""
    trainer = make_trainer(3)
    await trainer.publish(1)
    uploaded = Gate(lambda operation, key: operation == "create" and key.startswith("ledger/") and _all_there(line))
    line = trainer.line(uploaded)
    trainer.save(2)
    async with trainer.publishing(line):
        await asyncio.wait_for(uploaded.reached.wait(), 60)
        line.cut()
        uploaded.opened.set()
    assert trainer.sealed == [(1, 1)]
    shutil.rmtree(trainer.out / "checkpoint-2")  # what the trainer writes next is something else
    await trainer.publish(3)
    assert [version for version, _ in trainer.sealed] == [1, 2]
    replica = trainer.replica(at=0)
    await replica.once()
    assert trainer.versions.version_of(replica.directory) == 3


def _all_there(line) -> bool:
    """Everything that a seal names was put, so the next record is the seal."""
    return any(key == "create" and name.startswith("data/2/") and "fingerprint" in name for key, name in line.asked)
