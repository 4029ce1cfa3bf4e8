from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

import msgspec
import numpy as np
import pytest
from support.streams.replica import Replica
from support.streams.versions import Versions
from support.streams.writer import StreamWriter

from dcr_daemon.checkpoint.directory import write_checkpoint
from dcr_daemon.engine.directory.engine import DirectoryEngine
from dcr_daemon.errors import (
    Corrupt,
    EngineRefused,
    Fenced,
    Incompatible,
    NotFound,
    ResourceExhausted,
    UsageError,
)
from dcr_daemon.events import (
    Alarm,
    Blocked,
    ChunkFetched,
    Committed,
    Prepared,
    Repaired,
    Retrying,
    SealSeen,
    Serving,
    Staged,
    Waiting,
)
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.route import NoRoute

Followed = tuple[StreamWriter, Replica, asyncio.Task[None]]


@pytest.fixture
def following(
    make_stream: Callable[..., Awaitable[StreamWriter]], make_replica: Callable[..., Replica]
) -> Callable[..., AbstractAsyncContextManager[Followed]]:
    """A factory of context managers, with the arguments of `make_stream`: a new stream, a replica that follows it and
    serves version 0 when the body begins, and the task of the replica, which ends with the body."""

    @asynccontextmanager
    async def follow(count: int = 0, **options: object) -> AsyncIterator[Followed]:
        stream = await make_stream(count, **options)
        replica = make_replica(stream).at_base(stream)
        async with replica.serving() as task:
            yield stream, replica, task

    return follow


@contextmanager
def wrong_baseline(versions: Versions, version: int) -> Iterator[None]:
    """What is encoded while the body runs begins at `version` with one bit flipped, in a weight that the next version
    changes."""
    truth = {name: bits.copy() for name, bits in versions.values[version].items()}
    old, new = (versions.values[n]["embed.weight"] for n in (version, version + 1))
    old[np.flatnonzero(old != new)[0]] ^= 0x4000
    yield
    versions.values[version] = truth


async def test_once_reaches_the_newest_version_in_one_transaction(make_stream, make_replica):
    stream = await make_stream(5)
    await stream.publish(1, 2, 3, 4, 5)
    replica = make_replica(stream).at_base(stream)
    await replica.once()
    assert stream.versions.version_of(replica.directory) == 5
    (committed,) = replica.events.of(Committed)
    assert (committed.base, committed.version, committed.route, committed.step) == (0, 5, "chain", 105)
    assert [event.version for event in replica.events.of(Staged)] == [1, 2, 3, 4, 5]
    assert [event.version for event in replica.events.of(Serving)] == [5]
    assert not list((replica.home / "staging").rglob("*.dcr"))


async def test_once_at_the_newest_version_already_changes_nothing(make_stream, make_replica):
    stream = await make_stream()
    replica = make_replica(stream).at_base(stream)
    await replica.once()
    await replica.once()
    assert not replica.events.of(Committed)
    assert [event.version for event in replica.events.of(Serving)] == [0, 0]


async def test_it_follows_version_after_version(following):
    async with following(3) as (stream, replica, task):
        for version in (1, 2, 3):
            await stream.publish(version)
            await replica.until_serving(version, task)
            assert stream.versions.version_of(replica.directory) == version


async def test_chunks_are_fetched_before_the_seal_exists(following):
    async with following(1, rate=0.5) as (stream, replica, task):
        await stream.open(1)
        chunks = stream.chunks(1)
        assert len(chunks) >= 8
        sent = [await stream.put(1, chunk) for chunk in chunks[:5]]
        await replica.until(lambda: len(replica.events.of(ChunkFetched)) == 5, task)
        assert not any(event.sealed for event in replica.events.of(ChunkFetched))
        assert not replica.events.of(SealSeen)
        sent += [await stream.put(1, chunk) for chunk in chunks[5:]]
        await stream.seal(1, sent)
        await replica.until_serving(1, task)
    fetched = replica.events.of(ChunkFetched)
    assert len(fetched) == len({event.key for event in fetched}) == len(chunks)
    assert stream.versions.version_of(replica.directory) == 1


async def test_what_the_seal_does_not_name_is_thrown_away(following):
    async with following(1, rate=0.5) as (stream, replica, task):
        attempt = await stream.open(1)
        refs = [await stream.put(1, chunk) for chunk in stream.chunks(1)]
        stray = stream.chunks(1)[0]
        stray_key = names.chunk(1, attempt, "g", 1, "b0", 0)
        await stream.store.create(stray_key, stray.data)
        await stream.store.create(names.chunk(1, attempt, "g", 1, "b0", 1), b"no chunk at all")
        await replica.until(lambda: len(replica.events.of(ChunkFetched)) == len(refs) + 1, task)
        await stream.seal(1, refs)
        await replica.until_serving(1, task)
    assert stream.versions.version_of(replica.directory) == 1


async def test_an_aborted_attempt_leaves_nothing_in_staging(following):
    async with following(1) as (stream, replica, task):
        await stream.open(1)
        await stream.put(1, stream.chunks(1)[0])
        await replica.until(lambda: replica.events.of(ChunkFetched), task)
        await stream.abort(1)
        await replica.until(lambda: not list((replica.home / "staging").rglob("*.dcr")), task)
        await stream.publish(1)
        await replica.until_serving(1, task)


async def test_a_no_change_version_and_a_trainer_going_back_move_the_version_up(make_stream, make_replica):
    stream = await make_stream(1)
    versions = stream.versions
    versions.put(versions.values[1])
    versions.put(versions.values[0])
    replica = make_replica(stream).at_base(stream)
    await stream.publish(1)
    await replica.once()
    await stream.publish(2)
    await replica.once()
    await stream.publish(3)
    await replica.once()
    assert [event.version for event in replica.events.of(Committed)] == [1, 2, 3]
    assert versions.version_of(replica.directory) == 3
    marker = json.loads((replica.directory / ".dcr" / "version.json").read_bytes())
    assert marker["version"] == 3


async def test_among_equal_versions_the_newest_is_meant(make_stream, make_replica):
    stream = await make_stream(1)
    stream.versions.put(stream.versions.values[0])
    await stream.publish(1, 2)
    replica = make_replica(stream).at_base(stream)
    await replica.once()
    assert not replica.events.of(Committed)
    assert replica.events.of(Serving)[-1].version == 2


async def test_an_empty_directory_starts_from_an_anchor(make_stream, make_replica):
    stream = await make_stream(3)
    await stream.publish(1, 2)
    await stream.anchor(2)
    await stream.publish(3)
    replica = make_replica(stream)
    await replica.once()
    assert stream.versions.version_of(replica.directory) == 3
    assert [event.route for event in replica.events.of(Committed)] == ["anchor", "chain"]
    assert replica.events.of(Repaired)[0].version == 2
    assert (replica.directory / "tokenizer.json").exists()
    assert not list(replica.home.rglob("anchor-*"))


async def test_the_cheaper_of_chain_and_anchor_is_taken(make_stream, make_replica):
    stream = await make_stream(4, rate=0.9)
    await stream.publish(1, 2, 3)
    await stream.anchor(3)
    await stream.publish(4)
    replica = make_replica(stream).at_base(stream)
    await replica.once()
    assert [event.route for event in replica.events.of(Committed)] == ["anchor", "chain"]
    assert stream.versions.version_of(replica.directory) == 4


async def test_an_empty_directory_waits_for_the_first_anchor(make_stream, make_replica):
    stream = await make_stream(1)
    replica = make_replica(stream)
    with pytest.raises(NoRoute, match="no anchor"):
        await replica.once()
    async with replica.running() as task:
        await replica.until(lambda: any("no anchor" in event.what for event in replica.events.of(Retrying)), task)
        await stream.anchor(0)
        await replica.until(lambda: replica.events.of(Serving), task)
    assert stream.versions.version_of(replica.directory) == 0


async def test_weights_of_no_version_are_refused_without_an_anchor(make_stream, make_replica, make_versions):
    stream = await make_stream(1)
    await stream.publish(1)
    replica = make_replica(stream)
    make_versions(seed=7).save(replica.directory)
    with pytest.raises(EngineRefused, match=r"of no version of this stream.*no anchor"):
        await replica.once()
    assert not (replica.directory / ".dcr").exists()


async def test_another_layout_is_refused_by_name(make_stream, make_replica):
    stream = await make_stream(1)
    replica = make_replica(stream)
    layout = type(stream.versions.layout)(list(stream.versions.layout)[:-3])
    write_checkpoint(replica.directory, layout, bits_of=stream.versions.values[0].__getitem__, side_files={})
    with pytest.raises(EngineRefused, match=r"missing: layers"):
        await replica.once()
    async with replica.running() as task:  # one that follows says so, and waits for an operator
        await replica.until(lambda: replica.events.of(Blocked), task)
        await asyncio.sleep(0.3)
    assert {event.reason for event in replica.events.of(Blocked)} == {replica.events.of(Blocked)[0].reason}
    assert "missing: layers" in replica.events.of(Blocked)[0].reason


async def test_a_newer_format_is_refused(make_stream, make_replica):
    stream = await make_stream()
    record = json.loads((stream.home / names.record(0)).read_bytes())
    path = stream.home / names.record(stream.ledger.tip.seq + 1)
    del record["digest"]
    content = json.dumps({**record, "format": 2, "kind": "novelty", "seq": 2}).encode()[:-1]
    path.write_bytes(content + b',"digest":"%s"}' % records.digest(content).encode())
    replica = make_replica(stream).at_base(stream)
    with pytest.raises(Incompatible, match="format 2"):
        await replica.once()


def spoil_first_chunk(stream, version, edit):
    """Change the bytes of a sealed chunk behind everybody's back."""
    path = sorted((stream.home / "data" / str(version)).rglob("*.dcr"))[0]
    body = edit(path.read_bytes())
    path.unlink()
    path.write_bytes(body)
    return path


SPOILS = {
    "truncated": lambda data: data[:-9],
    "flipped": lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
    "oversized": lambda data: data + bytes(100),
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("kind", SPOILS)
async def test_a_damaged_chunk_is_refused_and_the_weights_stay(make_stream, make_replica, kind):
    stream = await make_stream(2)
    await stream.publish(1, 2)
    whole = spoil_first_chunk(stream, 2, SPOILS[kind])
    replica = make_replica(stream).at_base(stream)
    with pytest.raises(Corrupt, match=r"\.dcr.*twice"):
        await replica.once()
    assert stream.versions.version_of(replica.directory) == 1
    assert replica.events.of(Committed)[-1].version == 1
    whole.write_bytes(stream.versions.encode(2, stream.attempt)[0].data)
    await replica.once()
    assert stream.versions.version_of(replica.directory) == 2


async def test_a_swapped_chunk_is_refused(make_stream, make_replica):
    stream = await make_stream(2)
    await stream.publish(1, 2)
    first, second = sorted((stream.home / "data" / "2").rglob("*.dcr"))[:2]
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)
    replica = make_replica(stream).at_base(stream)
    with pytest.raises(Corrupt):
        await replica.once()
    assert stream.versions.version_of(replica.directory) == 1


async def test_a_chunk_that_lies_about_itself_is_refused(make_stream, make_replica):
    """Its bytes are what the seal says, but it was made for another version."""
    stream = await make_stream(2)
    await stream.publish(1)
    await stream.open(2)
    wrong = stream.versions.encode(1, stream.attempt)[0]
    right = [await stream.put(2, chunk) for chunk in stream.chunks(2)[1:]]
    lying = msgspec.structs.replace(wrong.id, n=99)
    ref = await stream.put(2, type(wrong)(lying, wrong.data, wrong.undo, wrong.segments, wrong.changed))
    await stream.seal(2, [ref, *right])
    replica = make_replica(stream).at_base(stream)
    with pytest.raises(Corrupt, match="its part is of"):
        await replica.once()
    assert stream.versions.version_of(replica.directory) == 1


async def test_a_damaged_version_is_waited_out_or_gone_round_by_an_anchor(following):
    async with following(3) as (stream, replica, task):
        await stream.open(1)
        refs = [await stream.put(1, chunk) for chunk in stream.chunks(1)]
        await replica.until(lambda: len(replica.events.of(ChunkFetched)) == len(refs), task)
        await stream.seal(1, refs)
        await replica.until_serving(1, task)
        await stream.open(2)
        first, *rest = stream.chunks(2)
        refs = [await stream.put(2, first, edit=SPOILS["flipped"]), *[await stream.put(2, chunk) for chunk in rest]]
        await stream.seal(2, refs)
        await replica.until(lambda: any("twice" in event.what for event in replica.events.of(Retrying)), task)
        assert stream.versions.version_of(replica.directory) == 1
        await stream.publish(3)
        await stream.anchor(3)
        await replica.until_serving(3, task)
    assert stream.versions.version_of(replica.directory) == 3


async def test_a_version_that_healthy_weights_refuse_is_poisoned_and_gone_round(make_stream, make_replica):
    """A publisher with a flipped bit in its baseline makes deltas that begin where no replica is (must P4)."""
    stream = await make_stream(1)
    versions = stream.versions
    await stream.publish(1)
    replica = make_replica(stream).at_base(stream)
    async with replica.serving() as task:
        await replica.until_serving(1, task)
        versions.step()
        with wrong_baseline(versions, 1):
            await stream.publish(2)
        await replica.until(lambda: [e for e in replica.events.of(Alarm) if e.must == "P4"], task)
        assert versions.version_of(replica.directory) == 1
        await stream.anchor(2)
        await replica.until_serving(2, task)
    assert versions.version_of(replica.directory) == 2


async def test_the_poisoned_one_of_several_versions_is_found(make_stream, make_replica):
    stream = await make_stream(4)
    versions = stream.versions
    await stream.publish(1, 2)
    with wrong_baseline(versions, 2):
        await stream.publish(3)
    await stream.publish(4)
    replica = make_replica(stream).at_base(stream)
    with pytest.raises(EngineRefused, match="version 3"):
        await replica.once()
    assert versions.version_of(replica.directory) == 2
    assert [event.must for event in replica.events.of(Alarm)] == ["P4"]
    await stream.anchor(4)
    await replica.once()
    assert versions.version_of(replica.directory) == 4


async def test_a_damaged_anchor_is_not_loaded(make_stream, make_replica):
    stream = await make_stream(1)
    await stream.anchor(0)
    await stream.publish(1)
    path = sorted((stream.home / "anchors" / "0").rglob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    replica = make_replica(stream)
    with pytest.raises(Corrupt, match=r"model-0\.safetensors"):
        await replica.once()
    assert not list(replica.directory.glob("*.safetensors"))


async def test_a_version_larger_than_staging_is_said_so(make_stream, make_replica):
    stream = await make_stream(1, rate=0.5)
    await stream.publish(1)
    replica = make_replica(stream).at_base(stream)
    with pytest.raises(ResourceExhausted, match="staging"):
        await replica.once(staging_limit=10_000)
    assert stream.versions.version_of(replica.directory) == 0


async def test_a_backlog_larger_than_staging_goes_in_several_transactions(make_stream, make_replica):
    stream = await make_stream(4)
    await stream.publish(1, 2, 3, 4)
    size = sum(len(chunk.data) for chunk in stream.versions.encode(1))
    replica = make_replica(stream).at_base(stream)
    await replica.once(staging_limit=int(size * 2.5))
    assert [event.version for event in replica.events.of(Committed)] == [2, 4]
    assert stream.versions.version_of(replica.directory) == 4


async def test_what_the_engine_cannot_hold_at_once_is_split(make_stream, make_replica):
    stream = await make_stream(3)
    await stream.publish(1, 2, 3)
    replica = make_replica(stream).at_base(stream)
    await asyncio.wait_for(replica.run(DirectoryEngine(replica.directory, budget=1), once=True), 60)
    assert [event.version for event in replica.events.of(Committed)] == [1, 2, 3]
    fetched = [event.key for event in replica.events.of(ChunkFetched)]
    assert len(fetched) == len(set(fetched))


async def test_a_restart_fetches_only_what_is_not_staged(following):
    async with following(1, rate=0.5) as (stream, replica, task):
        await stream.open(1)
        chunks = stream.chunks(1)
        refs = [await stream.put(1, chunk) for chunk in chunks[:6]]
        await replica.until(lambda: len(replica.events.of(ChunkFetched)) == 6, task)
    refs += [await stream.put(1, chunk) for chunk in chunks[6:]]
    await stream.seal(1, refs)
    await replica.once()
    assert len(replica.events.of(ChunkFetched)) == len(chunks)
    assert stream.versions.version_of(replica.directory) == 1


async def test_a_spoiled_staging_file_is_fetched_again(following):
    async with following(1) as (stream, replica, task):
        await stream.open(1)
        refs = [await stream.put(1, chunk) for chunk in stream.chunks(1)]
        await replica.until(lambda: len(replica.events.of(ChunkFetched)) == len(refs), task)
    staged = sorted((replica.home / "staging").rglob("*.dcr"))
    staged[0].write_bytes(bytes(staged[0].stat().st_size))
    staged[1].unlink()
    await stream.seal(1, refs)
    await replica.once()
    assert len(replica.events.of(ChunkFetched)) == len(refs) + 2
    assert stream.versions.version_of(replica.directory) == 1


async def test_a_later_subscriber_fences_the_earlier_one(make_stream, make_replica):
    stream = await make_stream(1)
    first = make_replica(stream).at_base(stream)
    second = make_replica(stream, first.directory)
    async with first.serving() as task, second.serving(replica="r2") as other:
        await stream.publish(1)
        await second.until_serving(1, other)
        with pytest.raises(Fenced):
            await asyncio.wait_for(task, 30)
        status = json.loads(await stream.store.get(names.replica("r1"), limit=10_000))
        assert status["state"] == "fenced"
    assert stream.versions.version_of(first.directory) == 1


async def test_the_same_replica_cannot_run_twice_on_one_state(following):
    async with following() as (_, replica, _):
        with pytest.raises(UsageError, match="another subscriber"):
            await replica.run()


@pytest.mark.parametrize("replica", ["", "..", "../r1", "-node", "node.", "R1", "r1\n", "a" * 64])
async def test_an_id_that_is_no_name_is_refused_before_anything_is_made(make_stream, make_replica, replica):
    """It would name a directory of the state, and an object of the stream."""
    stream = await make_stream()
    subscriber = make_replica(stream).at_base(stream)
    with pytest.raises(UsageError, match="not the id of a replica"):
        await subscriber.run(replica=replica)
    assert not (subscriber.home / "state").exists()


async def test_a_state_directory_that_cannot_be_made_is_said(make_stream, make_replica, tmp_path):
    stream = await make_stream()
    replica = make_replica(stream).at_base(stream)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"state directory .*cannot be used: "):
        await replica.run(state=tmp_path / "file")


async def test_without_a_stream_it_waits_and_once_says_so(make_stream, make_replica, tmp_path):
    stream = await make_stream()
    replica = make_replica(stream).at_base(stream)
    replica.url = f"file://{tmp_path}/later"
    with pytest.raises(NotFound):
        await replica.once()
    async with replica.running() as task:
        await replica.until(lambda: replica.events.of(Waiting), task)
        stream.home.rename(tmp_path / "later")
        await replica.until(lambda: replica.events.of(Serving), task)


async def test_a_ledger_that_lost_its_tail_is_refused(make_stream, make_replica):
    stream = await make_stream(2)
    await stream.publish(1, 2)
    replica = make_replica(stream).at_base(stream)
    await replica.once()
    (stream.home / names.record(stream.ledger.tip.seq)).unlink()
    with pytest.raises(Corrupt, match="does not extend"):
        await replica.once()
    assert stream.versions.version_of(replica.directory) == 2


async def test_a_pinned_version_is_kept_and_never_passed(make_stream, make_replica):
    stream = await make_stream(3)
    await stream.publish(1, 2)
    replica = make_replica(stream).at_base(stream)
    async with replica.serving(pin=1) as task:
        await stream.publish(3)
        await replica.until(lambda: [e for e in replica.events.of(SealSeen) if e.version == 3], task)
        await asyncio.sleep(0.2)
    assert stream.versions.version_of(replica.directory) == 1
    await replica.once()
    assert stream.versions.version_of(replica.directory) == 3
    with pytest.raises(EngineRefused, match="above the pinned"):
        await replica.once(pin=2)


async def test_a_missing_object_is_not_yet_there(make_stream, make_replica):
    stream = await make_stream(1)
    await stream.publish(1)
    path = sorted((stream.home / "data" / "1").rglob("*.dcr"))[0]
    hidden = path.rename(stream.home.parent / "hidden")
    replica = make_replica(stream).at_base(stream)
    async with replica.running() as task:
        await replica.until(lambda: any("not there yet" in event.what for event in replica.events.of(Waiting)), task)
        assert stream.versions.version_of(replica.directory) == 0
        hidden.rename(path)
        await replica.until(lambda: replica.events.of(Serving), task)
    assert stream.versions.version_of(replica.directory) == 1


async def test_the_status_object_says_what_is_served(following):
    async with following(1) as (stream, replica, task):
        await stream.publish(1)
        await replica.until_serving(1, task)
    status = json.loads(await stream.store.get(names.replica("r1"), limit=10_000))
    assert (status["version"], status["step"], status["head"], status["id"]) == (1, 101, 1, "r1")
    assert status["stream"] == stream.versions.stream
    assert status["counter"] >= 2


async def test_a_prepared_change_reports_its_size(make_stream, make_replica):
    stream = await make_stream(1)
    await stream.publish(1)
    replica = make_replica(stream).at_base(stream)
    await replica.once()
    (prepared,) = replica.events.of(Prepared)
    assert prepared.changed == sum(chunk.changed for chunk in stream.versions.encode(1))
