from __future__ import annotations

import asyncio
import errno
import fcntl
from collections import Counter

import pytest
from support.events import RecordedEvents
from support.stores.memory import MemoryStore
from support.stores.wrapped import WrappedStore
from support.streams.record_history import HistoryWriter

from dcr_daemon.errors import Corrupt, Incompatible, NotFound, ResourceExhausted, StoreUnavailable, UsageError
from dcr_daemon.events import Alarm, Committed, Retrying
from dcr_daemon.ledger import names
from dcr_daemon.publish.state import StateDirectory
from dcr_daemon.subscribe.materialize import materialize


def left_over(path):
    return [entry.name for entry in path.parent.iterdir() if entry.name.startswith(".")]


async def test_any_version_is_built_from_a_base_and_the_chain(make_stream, tmp_path):
    stream = await make_stream(3)
    await stream.publish(1, 2, 3)
    base = stream.versions.save(tmp_path / "base")
    for version in (0, 2, 3):
        out = tmp_path / f"out-{version}"
        built = await materialize(stream.store, version=version, out=out, base=base)
        assert stream.versions.version_of(out) == version
        assert (built.version, built.step, built.out) == (version, 100 + version if version else None, out)
        assert (built.tensors, built.bytes) == (len(stream.versions.layout), stream.versions.layout.nbytes)
        assert built.total == f"{int(stream.versions.vector(version).sum(dtype='u8')):016x}"
        assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
        assert not left_over(out)


async def test_the_newest_version_is_built_from_the_nearest_anchor(make_stream, tmp_path):
    stream = await make_stream(3)
    await stream.anchor(0)
    await stream.publish(1, 2)
    await stream.anchor(2)
    await stream.publish(3)
    events = []
    built = await materialize(stream.store, out=tmp_path / "out", emit=events.append)
    assert built.version == 3
    assert stream.versions.version_of(tmp_path / "out") == 3
    told = [(event.route, event.version) for event in events if isinstance(event, Committed)]
    assert told == [("anchor", 2), ("chain", 3)]


async def test_a_materialised_version_is_a_base_too(make_stream, tmp_path):
    stream = await make_stream(2)
    await stream.publish(1, 2)
    base = stream.versions.save(tmp_path / "base")
    await materialize(stream.store, version=1, out=tmp_path / "one", base=base)
    await materialize(stream.store, out=tmp_path / "two", base=tmp_path / "one")
    assert stream.versions.version_of(tmp_path / "two") == 2


async def test_nothing_to_start_from_is_said_so(make_stream, tmp_path):
    stream = await make_stream(1)
    await stream.publish(1)
    with pytest.raises(NotFound, match="--base"):
        await materialize(stream.store, out=tmp_path / "out")
    with pytest.raises(NotFound, match="not sealed"):
        await materialize(stream.store, version=9, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not left_over(tmp_path / "out")


async def test_a_base_that_is_no_version_is_refused(make_stream, make_versions, tmp_path):
    stream = await make_stream(1)
    await stream.publish(1)
    wrong = make_versions(seed=3).save(tmp_path / "wrong")
    with pytest.raises(Incompatible, match="is no version of"):
        await materialize(stream.store, out=tmp_path / "out", base=wrong)
    assert not (tmp_path / "out").exists()


async def test_a_directory_in_use_is_refused(make_stream, tmp_path):
    stream = await make_stream()
    await stream.anchor(0)
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        await materialize(stream.store, out=out)
    (out / "notes.txt").unlink()
    await materialize(stream.store, out=out)
    assert stream.versions.version_of(out) == 0


async def test_a_damaged_stream_builds_nothing(make_stream, tmp_path):
    stream = await make_stream(1)
    await stream.anchor(0)
    await stream.publish(1)
    chunk = sorted((stream.home / "data" / "1").rglob("*.dcr"))[0]
    chunk.write_bytes(chunk.read_bytes()[:-1])
    with pytest.raises(Corrupt):
        await materialize(stream.store, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not left_over(tmp_path / "out")


async def test_an_interrupted_build_makes_nothing_and_the_next_one_goes_on_there(make_stream, tmp_path):
    stream = await make_stream(2)
    await stream.anchor(0)
    await stream.publish(1, 2)
    out = tmp_path / "out"
    for delay in (0.0, 0.01, 0.03, 0.06):
        task = asyncio.create_task(materialize(stream.store, out=out))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            break
        assert not out.exists()
        assert left_over(out) in ([], [".out.dcr-partial"])
    else:
        await materialize(stream.store, out=out)
    assert stream.versions.version_of(out) == 2
    assert not left_over(out)


async def test_what_came_before_the_store_failed_is_not_fetched_again(make_stream, tmp_path):
    class Failing(WrappedStore):
        """Counts the objects of deltas that it gives, and fails from one on."""

        given, last = Counter(), 3

        async def get(self, key, *, limit, keep=None):
            if key.endswith(".dcr"):
                if self.given.total() == self.last:
                    raise StoreUnavailable("no answer")
                self.given[key] += 1
            return await self.inner.get(key, limit=limit, keep=keep)

    stream, out = await make_stream(5), tmp_path / "out"
    await stream.anchor(0)
    await stream.publish(1, 2, 3, 4, 5)
    store = Failing(stream.store)
    with pytest.raises(StoreUnavailable):
        await materialize(store, out=out)
    assert not out.exists()
    assert left_over(out) == [".out.dcr-partial"]
    store.last = None
    await materialize(store, out=out)
    assert set(store.given.values()) == {1}
    assert stream.versions.version_of(out) == 5
    assert not left_over(out)


async def test_two_builds_of_one_directory_do_not_share_it(make_stream, tmp_path):
    stream = await make_stream(2)
    await stream.anchor(0)
    out = tmp_path / "out"
    ended = await asyncio.gather(*(materialize(stream.store, out=out) for _ in range(2)), return_exceptions=True)
    (refused,) = [error for error in ended if isinstance(error, Exception)]
    assert isinstance(refused, UsageError)
    assert stream.versions.version_of(out) == 0


class TestDamage:
    """A version is built as long as anything in the bucket leads to it, as `dcr verify` says."""

    async def make(self, make_stream, tmp_path):
        stream = await make_stream(6)
        await stream.anchor(0)
        await stream.publish(1, 2, 3)
        await stream.anchor(3)
        await stream.publish(4, 5)
        await stream.anchor(5)
        await stream.publish(6)
        return stream, stream.versions.save(tmp_path / "base")

    @pytest.mark.parametrize("with_base", [False, True])
    @pytest.mark.parametrize(
        ("hurt", "target"),
        [("anchors/5", 5), ("anchors/5", 6), ("anchors/3", 3), ("data/2", 3), ("data/4", 6), ("data/2", 6)],
    )
    async def test_what_is_damaged_is_gone_round(self, make_stream, tmp_path, hurt, target, with_base):
        stream, base = await self.make(make_stream, tmp_path)
        for file in sorted((stream.home / hurt).rglob("*.dcr")) + sorted((stream.home / hurt).rglob("*.safetensors")):
            file.write_bytes(file.read_bytes()[:-1])
        out, told = tmp_path / "out", []
        await materialize(stream.store, version=target, out=out, base=base if with_base else None, emit=told.append)
        assert stream.versions.version_of(out) == target
        assert not left_over(out)

    @pytest.mark.parametrize("base_version", [None, 0, 5])
    async def test_a_damaged_seal_below_what_is_started_from_is_gone_round(self, make_stream, tmp_path, base_version):
        stream, _ = await self.make(make_stream, tmp_path)
        base = None if base_version is None else stream.versions.save(tmp_path / "from", base_version)
        await self.damage_seal(stream, 4)
        out, told = tmp_path / "out", []
        await materialize(stream.store, out=out, base=base, emit=told.append)
        assert stream.versions.version_of(out) == 6
        assert any("trying the anchor of version 5" in e.what for e in told if isinstance(e, Retrying)) == (
            base_version != 5
        )

    async def test_a_damaged_seal_on_every_route_is_the_news(self, make_stream, tmp_path):
        stream = await make_stream(6)
        await stream.publish(1, 2, 3, 4, 5, 6)
        base = stream.versions.save(tmp_path / "base")
        await self.damage_seal(stream, 3)
        with pytest.raises(Corrupt, match="does not parse"):
            await materialize(stream.store, out=tmp_path / "out", base=base)

    async def damage_seal(self, stream, version):
        seal = await stream.ledger.history.seal(version)
        (stream.home / names.record(seal.seq)).write_bytes(b"no record")

    async def test_the_first_damage_met_is_the_news_if_nothing_leads_there(self, make_stream, tmp_path):
        stream, base = await self.make(make_stream, tmp_path)
        chunk = sorted((stream.home / "data" / "6").rglob("*.dcr"))[0]
        chunk.write_bytes(b"")
        told = []
        with pytest.raises(Corrupt, match="data/6/"):
            await materialize(stream.store, out=tmp_path / "out", base=base, emit=told.append)
        waits = [event.what for event in told if isinstance(event, Retrying)]
        assert not [what for what in waits if "trying" in what], "every way passes it"


async def test_a_file_system_without_locks_is_no_other_process(make_stream, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    stream = await make_stream(0)
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ResourceExhausted, match="cannot be locked: No locks available"):
        await materialize(stream.store, out=tmp_path / "out", base=tmp_path)
    with pytest.raises(ResourceExhausted, match="cannot be locked: No locks available"):
        StateDirectory(tmp_path / "state")


async def test_a_directory_that_its_last_user_removes_before_it_is_locked_is_made_again(
    make_stream, tmp_path, monkeypatch
):
    stream, locked, flock = await make_stream(0), [], fcntl.flock

    def lock(descriptor, operation):
        if not locked:
            (tmp_path / ".out.dcr-partial").rmdir()
        locked.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock)
    await materialize(stream.store, out=tmp_path / "out", base=stream.versions.save(tmp_path / "base"))
    assert stream.versions.version_of(tmp_path / "out") == 0
    assert len(locked) > 1


async def test_the_newest_version_is_not_one_below_a_hole(tmp_path):
    """The hole is so wide that only the list of all records shows what is above it."""
    writer = HistoryWriter(MemoryStore())
    writer.claim()
    writer.versions(1600)
    for seq in range(700, 3100):
        del writer.store.objects[names.record(seq)]
    for version in (None, 1600):
        with pytest.raises(Corrupt, match=r"records 700, .* are missing"):
            await materialize(writer.store, version=version, out=tmp_path / "out")
    events = RecordedEvents()
    with pytest.raises(NotFound):  # of a version below it, nothing but the data is wanting
        await materialize(writer.store, version=5, out=tmp_path / "out", emit=events)
    assert any("are missing" in event.what for event in events.of(Alarm))
