"""A publisher without its cache reads few seals, and never takes a version for a new checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.stores.memory import MemoryStore
from support.streams.record_history import HistoryWriter

from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.publish.watch.file_identity import FileIdentity, identify
from dcr_daemon.publish.watch.published import READ_BACK, FileTimes, Published, PublishedFiles, read_published

HEAD = 10_000


class Stream:
    """A stream whose version v came from `step-v`, with one file that was written at second v."""

    def __init__(self, watch: Path) -> None:
        self.watch, self.store = watch, MemoryStore()
        self.writer = HistoryWriter(self.store)
        self.writer.claim()
        self.sealed = 0

    def seal(self, count: int, *, recorded: bool = True, at: int | None = None) -> None:
        """So many versions more; the last of them was written at second `at`, if that is given."""
        for version in range(self.sealed + 1, self.sealed + count + 1):
            second = at if at is not None and version == self.sealed + count else version
            file = {"name": "model.safetensors", "size": 2, "mtime_ns": second * 10**9, "inode": version}
            source: dict[str, object] = {"path": f"step-{version}", "files": [file]}
            if recorded:
                source["earlier_ns"] = self.newest * 10**9
            self.newest = max(self.newest, second)
            self.writer.version(source=source)
        self.sealed += count

    newest = 0

    def save(self, name: str, second: int) -> Path:
        """A checkpoint on disk."""
        path = self.watch / name / "model.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"xx")
        os.utime(path, (second, second))
        return path

    async def read(self, cache: Path) -> tuple[Published, int]:
        """What is known, and how many requests that took after the tail was found."""
        ledger = Ledger(self.store)
        await ledger.read()
        self.store.requests.clear()
        published = await read_published(ledger, cache, watch=self.watch, on_disk=self.on_disk)
        return published, self.store.requests.total()

    async def on_disk(self) -> list[FileTimes]:
        found = []
        for path in sorted(self.watch.glob("*/model.safetensors")):
            time = path.stat().st_mtime_ns
            found.append(FileTimes(path.parent.name, time, time))
        return found


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    (tmp_path / "watch").mkdir()
    return Stream(tmp_path / "watch")


def known(published: Published, watch: Path) -> PublishedFiles:
    files = PublishedFiles(watch)
    for source in published.sources:
        files.add(source.path, source.identity)
    files.newest_ns, files.unread_ns = published.newest_ns, published.unread_ns
    return files


def is_version(published: Published, path: Path) -> bool:
    """Whether it is one that was read, or may be one that was not."""
    identity = frozenset(filter(None, [identify(path)]))
    files = known(published, path.parents[1])
    return files.contains(path.parent.name, identity) or files.may_be_unread(identity)


async def test_a_restart_without_state_over_ten_thousand_versions_reads_few_seals(stream: Stream, tmp_path: Path):
    stream.seal(HEAD)
    kept = [stream.save(f"step-{version}", version) for version in range(HEAD - 4, HEAD + 1)]
    old, new = stream.save("step-17", 17), stream.save("step-10001", HEAD + 1)
    published, requests = await stream.read(tmp_path / "cache.json")
    assert requests <= READ_BACK
    assert all(is_version(published, path) for path in [*kept, old])
    assert not is_version(published, new)
    assert published.newest_ns == HEAD * 10**9
    again, requests = await stream.read(tmp_path / "cache.json")
    assert requests <= 1
    assert is_version(again, old)
    assert not is_version(again, new)


async def test_it_reads_no_further_than_the_directories_on_disk_are_old(stream: Stream, tmp_path: Path):
    stream.seal(500)
    for version in range(497, 502):
        stream.save(f"step-{version}", version)
    _, requests = await stream.read(tmp_path / "cache.json")
    assert requests <= 4


async def test_a_version_that_comes_back_to_the_directory_later_is_not_published_again(stream: Stream, tmp_path: Path):
    stream.seal(500)
    published, requests = await stream.read(tmp_path / "cache.json")
    assert requests <= 1
    assert is_version(published, stream.save("from-the-archive", 17))


async def test_a_directory_that_is_being_rewritten_is_followed_to_its_last_version(stream: Stream, tmp_path: Path):
    stream.seal(500)

    async def on_disk() -> list[FileTimes]:
        return [FileTimes("step-300", 300 * 10**9, 501 * 10**9)]

    stream.on_disk = on_disk  # type: ignore[method-assign]
    published, _ = await stream.read(tmp_path / "cache.json")
    assert known(published, stream.watch).newest_at("step-300")


async def test_one_time_in_the_future_costs_requests_and_hides_no_checkpoint(stream: Stream, tmp_path: Path):
    stream.seal(100)
    stream.seal(1, at=10**9)
    stream.seal(99)
    old, new = stream.save("step-17", 17), stream.save("step-201", 201)
    published, _ = await stream.read(tmp_path / "cache.json")
    assert is_version(published, old)
    assert not is_version(published, new)
    assert len(published.sources) == 100, "back to the version with that time, below which times are right"


async def test_seals_from_before_times_were_recorded_are_all_read(stream: Stream, tmp_path: Path):
    stream.seal(100, recorded=False)
    published, _ = await stream.read(tmp_path / "cache.json")
    assert len(published.sources) == 100
    assert published.newest_ns == 100 * 10**9
    stream.seal(1)
    published, requests = await stream.read(tmp_path / "other.json")
    assert requests <= 1
    assert published.newest_ns == 101 * 10**9


def test_a_checkpoint_that_is_no_version_is_told_from_unread_ones_by_its_time(tmp_path: Path):
    files = PublishedFiles(tmp_path)
    files.unread_ns = 100
    old = frozenset([FileIdentity("x", 1, 100, 1), FileIdentity("y", 1, 7, 2)])
    assert files.may_be_unread(old)
    assert not files.contains("a", old), "it is told by its time alone, which has to be said"
    assert not files.may_be_unread(frozenset([FileIdentity("x", 1, 101, 1), FileIdentity("y", 1, 7, 2)]))
    assert not files.may_be_unread(frozenset())
