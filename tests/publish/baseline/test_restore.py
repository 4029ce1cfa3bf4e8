"""A rank without a cache, or with one that is not to be believed, reads what it needs and ends with the right bytes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.ranks.in_process import Group, dealt
from support.streams.publish_world import PublishWorld, step_weights

from dcr_daemon.canonical.box import Box
from dcr_daemon.checkpoint.blocks import Block, BlockSet
from dcr_daemon.checkpoint.contents import Contents, join_tables
from dcr_daemon.codec.decode import Chunk
from dcr_daemon.errors import Corrupt, StoreUnavailable
from dcr_daemon.events import Alarm, Degraded, Rebuilding, Retrying
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.audit.verify import verify
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.objects import Objects
from dcr_daemon.ledger.records import Anchor, ObjectRef, Seal
from dcr_daemon.publish.baseline.baseline import Baseline
from dcr_daemon.publish.baseline.fetched import RESERVE_BYTES, FetchedObjects
from dcr_daemon.publish.baseline.rebuild import Rebuild
from dcr_daemon.publish.baseline.restore import Restorer
from dcr_daemon.publish.options import PublishOptions
from dcr_daemon.runtime import Workers
from dcr_daemon.store.file import FileStore
from dcr_daemon.store.partial import PartialFile

WORLD = 4


class Counting(FileStore):
    """Keeps the keys that were read, and how many objects beside records were under way at a time."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.read: list[str] = []
        self.running = self.most = 0
        self.held: asyncio.Event | None = None  #: files and chunks wait for it
        self.waiting = asyncio.Event()

    async def get(self, key: str, *, limit: int, keep: Any = None) -> bytes:
        self.read.append(key)
        counted = not key.startswith("ledger/")
        self.running += counted
        self.most = max(self.most, self.running)
        try:
            if self.held and key.endswith((".safetensors", ".dcr")):
                self.waiting.set()
                await self.held.wait()
            await asyncio.sleep(0)
            return await super().get(key, limit=limit)
        finally:
            self.running -= counted

    def of(self, suffix: str) -> set[str]:
        return {key for key in self.read if key.endswith(suffix)}


class Rig:
    """A stream that four ranks wrote, anchored at version 2, and whoever restores from it."""

    def __init__(self, world: PublishWorld, weights: list[Any]) -> None:
        self.world, self.weights = world, weights
        self.bucket: Path = world.root / "bucket"
        self.store = Counting(self.bucket)

    def share(self, rank: int, count: int = WORLD) -> BlockSet:
        return BlockSet(self.world.layout, dealt(self.world.layout, rank, count))

    async def restore(self, share: BlockSet, state: str = "fresh", **more: Any) -> Baseline:
        """A rank with this share comes to the head; its baseline."""
        path = self.world.root / state
        path.mkdir(exist_ok=True)
        workers = Workers(2)
        ledger = Ledger(self.store)
        await ledger.read()
        objects = Objects(self.store, floor=lambda: 0, patience=0, workers=workers)
        baseline = Baseline(path, share, more.get("stream", ledger.stream.stream), workers)
        try:
            restorer = Restorer(
                ledger, objects, baseline=baseline, base=more.get("base"), workers=workers, emit=self.world.events,
                fetched=path / "fetched",
            )  # fmt: skip
            await restorer.restore()
            await baseline.save()
        finally:
            workers.close()
        return baseline

    def check(self, baseline: Baseline, version: int = -1) -> None:
        version = len(self.weights) - 1 if version < 0 else version
        assert baseline.version == version
        for number, block in enumerate(baseline.blocks):
            want = self.weights[version][self.world.layout[block.tensor].name]
            places = block.box.canonical(np.arange(block.box.elements, dtype=np.int64))
            assert np.array_equal(baseline[number], want[places])

    def anchor(self) -> tuple[Path, Anchor, Any]:
        """Where the newest anchor's index lies, its record, and the index."""
        record = [one for one in self.world.reader.records() if isinstance(one, Anchor)][-1]
        path = self.bucket / record.index.key
        return path, record, records.decode_anchor_index(path.read_bytes())

    def reindex(self, **change: Any) -> None:
        """Forge the anchor's index, and what names it."""
        path, record, index = self.anchor()
        body = records.encode(msgspec.structs.replace(index, **change))
        path.write_bytes(body)
        ref = ObjectRef(record.index.key, len(body), records.digest(body))
        self.forge(record, index=ref)

    def repart(self, version: int, rank: int, **change: Any) -> None:
        """Forge one part of a version, and what names it."""
        seal = next(one for one in self.world.reader.records() if isinstance(one, Seal) and one.version == version)
        path = self.bucket / seal.parts[rank].key
        body = records.encode(msgspec.structs.replace(records.decode_part(path.read_bytes()), **change))
        path.write_bytes(body)
        parts = list(seal.parts)
        parts[rank] = ObjectRef(parts[rank].key, len(body), records.digest(body))
        self.forge(seal, parts=parts)

    def damage_seal(self, version: int) -> None:
        seal = next(one for one in self.world.reader.records() if isinstance(one, Seal) and one.version == version)
        (self.bucket / names.record(seal.seq)).write_bytes(b"no record")

    def forge(self, record: Any, **change: Any) -> None:
        """Another record in the slot of one, and all after it chained anew."""
        prev = None
        for path in sorted((self.bucket / "ledger").glob("*.json")):
            old = records.decode_record(path.read_bytes())
            if old.seq == record.seq:
                old = msgspec.structs.replace(old, **change)
            if prev and old.seq > record.seq:
                old = msgspec.structs.replace(old, prev=prev)
            path.write_bytes(records.encode_record(old))
            prev = records.digest(path.read_bytes())

    def put(self, key: str, body: bytes) -> ObjectRef:
        (self.bucket / key).write_bytes(body)
        return ObjectRef(key, len(body), records.digest(body))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[], None], Path], None]:
    """`written(name, publish, bucket)`: fill a bucket, from a copy if a stream of that name was published already."""
    streams = tmp_path_factory.mktemp("streams")

    def fill(name: str, publish: Callable[[], None], bucket: Path) -> None:
        if (streams / name).exists():
            shutil.copytree(streams / name, bucket)
            return
        publish()
        shutil.copytree(bucket, streams / name)

    return fill


@pytest.fixture
def write(world: PublishWorld, written: Any) -> Callable[..., Rig]:
    """`write(versions)`: a stream of that many from four ranks, with an anchor of every second version."""

    def make(versions: int = 3, anchor_every: int | None = 2, *, anchor_share: float | None = 1.0) -> Rig:
        weights = [world.weights]
        for n in range(versions):
            weights.append(step_weights(weights[-1], seed=n))
        options = PublishOptions(
            state=world.state, base=world.base, create=True, patience=5.0, workers=1, name="trainer", chunk_bytes=200,
            upload_base=False, anchor_every=anchor_every, anchor_share=anchor_share,
        )  # fmt: skip

        async def run() -> None:
            group = await Group(WORLD, lambda n: options, lambda n: world.store(), world.events).open()
            for one in weights[1:]:
                await group.publish(one)
            await group.close()

        written(f"{versions}-{anchor_every}-{anchor_share}", lambda: asyncio.run(run()), world.root / "bucket")
        world.events.clear()
        return Rig(world, weights)

    return make


def owner(key: str) -> int:
    return int(key.rpartition("/")[2].split("-")[1])


@pytest.mark.parametrize("count", [4, 2, 3, 1])
def test_only_files_and_chunks_that_hold_something_of_the_share_are_read(write: Any, count: int) -> None:
    rig = write(3)
    for rank in range(count):
        rig.store.read.clear()
        share = rig.share(rank, count)
        baseline = asyncio.run(rig.restore(share, f"fresh-{rank}"))
        rig.check(baseline)
        files = {owner(key) for key in rig.store.of(".safetensors")}
        want = {  # whose boxes share an element with mine
            other for other in range(WORLD) if any(
                mine.tensor == theirs.tensor and not mine.box.apart(theirs.box)
                for mine in share for theirs in dealt(rig.world.layout, other, WORLD)
            )
        }  # fmt: skip
        assert files == want
        assert {owner(key) for key in rig.store.of(".dcr")} <= want
        baseline.close()


def test_a_rank_that_is_replaced_reads_its_own_chunks_alone(write: Any) -> None:
    rig = write(5)
    baseline = asyncio.run(rig.restore(rig.share(2)))
    rig.check(baseline)
    chunks = rig.store.of(".dcr")
    assert {owner(key) for key in chunks} == {2}
    assert {int(key.split("/")[1]) for key in chunks} == {5}  # the anchor is of version 4
    baseline.close()


def test_a_stream_that_does_not_say_what_its_objects_hold_is_read_whole(write: Any) -> None:
    rig = write()
    rig.reindex(contents=None)
    for rank in range(WORLD):
        rig.repart(3, rank, contents=None)
    rig.check(asyncio.run(rig.restore(rig.share(1))))
    assert {owner(key) for key in rig.store.of(".safetensors")} == set(range(WORLD))
    assert {owner(key) for key in rig.store.of(".dcr")} == set(range(WORLD))


@pytest.mark.parametrize("damage", ["gone", "other bytes", "no table", "too few", "names no file"])
def test_contents_that_cannot_be_believed_cost_time_and_nothing_else(write: Any, damage: str) -> None:
    rig = write()
    _, _, index = rig.anchor()
    path = rig.bucket / index.contents.key
    empty = Contents.of([[] for _ in index.files]).pack() or b""
    match damage:
        case "gone":
            path.unlink()
        case "other bytes":
            path.write_bytes(bytes(index.contents.size))
        case "no table":
            rig.reindex(contents=rig.put(index.contents.key, join_tables([b"none"])))
        case "too few":
            rig.reindex(contents=rig.put(index.contents.key, join_tables([])))
        case _:
            rig.reindex(contents=rig.put(index.contents.key, join_tables([empty])))
    rig.check(asyncio.run(rig.restore(rig.share(3))))
    assert len(rig.store.of(".safetensors")) == len(index.files)
    assert any("all of" in event.what for event in rig.world.events.of(Degraded))
    report = asyncio.run(verify(rig.store))
    assert [(d.key, d.rebuildable) for d in report.damages] == [(index.contents.key, True)]
    assert "harmless" in report.damages[0].repair


def test_contents_of_a_part_that_are_no_table_are_passed_over(write: Any) -> None:
    rig = write()
    rig.repart(3, 0, contents=b"none")
    rig.check(asyncio.run(rig.restore(rig.share(0))))
    assert any("more chunks of version 3" in event.what for event in rig.world.events.of(Degraded))
    report = asyncio.run(verify(rig.store))
    assert ["harmless" in d.repair for d in report.damages] == [True]


def test_verify_finds_contents_of_a_part_that_leave_something_out(write: Any) -> None:
    rig = write()
    seal = next(one for one in rig.world.reader.records() if isinstance(one, Seal) and one.version == 3)
    part = records.decode_part((rig.bucket / seal.parts[1].key).read_bytes())
    rig.repart(3, 1, contents=Contents.of([[] for _ in part.chunks]).pack())
    report = asyncio.run(verify(rig.store))
    assert {d.key for d in report.damages} == {seal.parts[1].key}
    assert all("leave out" in d.what and "needs an anchor" in d.repair for d in report.damages)


def test_ranks_that_were_misled_about_a_chunk_read_all_of_it_the_second_time(write: Any, world: PublishWorld) -> None:
    """The sums of all ranks find it (must P3), and a rebuild that believed the same again would never end."""
    rig = write()
    seal = next(one for one in rig.world.reader.records() if isinstance(one, Seal) and one.version == 3)
    part = records.decode_part((rig.bucket / seal.parts[1].key).read_bytes())
    rig.repart(3, 1, contents=Contents.of([[] for _ in part.chunks]).pack())

    async def publish() -> list[Any]:
        options = PublishOptions(state=world.root / "new", patience=5.0, workers=1, name="trainer")
        group = await Group(WORLD, lambda n: options, lambda n: world.store(), world.events).open()
        results = [(await group.all(lambda rank: rank.publish(rig.weights[1])))[0] for _ in range(3)]
        await group.close()
        return results

    first, second, third = asyncio.run(publish())
    assert isinstance(first, Corrupt)
    assert isinstance(second, Corrupt)
    assert third.version == 4


def test_files_that_do_not_hold_the_share_are_no_anchor(write: Any) -> None:
    rig = write()
    _, _, index = rig.anchor()
    kept = [file for file in index.files if owner(file.key) != 2]
    rig.reindex(files=kept, contents=None)

    async def load() -> None:
        ledger, workers = Ledger(rig.store), Workers(1)
        await ledger.read()
        objects = Objects(rig.store, floor=lambda: 0, patience=0)
        state = rig.world.root / "short"
        state.mkdir()
        baseline = Baseline(state, rig.share(2), ledger.stream.stream, workers)
        fetched = FetchedObjects(state / "fetched", workers=workers)
        rebuild = Rebuild(objects, baseline, fetched=fetched, workers=workers, emit=rig.world.events)
        await rebuild.load_anchor(await ledger.history.anchor(2))

    with pytest.raises(Corrupt, match="does not hold all of"):
        asyncio.run(load())


def test_a_long_rebuild_tells_how_far_it_is(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcr_daemon.publish.baseline.rebuild.REPORT_EVERY", -1.0)
    rig = write(4, anchor_every=3)
    asyncio.run(rig.restore(rig.share(1)))
    told = rig.world.events.of(Rebuilding)
    for what in ("the anchor of version 3", "version 4"):
        mine = [event for event in told if event.what == what]
        assert [event.done for event in mine] == sorted(event.done for event in mine)
        assert mine[-1].done == mine[-1].total > 0
    rig.world.events.clear()
    asyncio.run(rig.restore(rig.share(1), "from the base", base=rig.world.base))
    told = rig.world.events.of(Rebuilding)
    assert told[0].what.startswith("the base")


def test_objects_are_read_side_by_side_within_bounds(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = write()
    whole = BlockSet.whole(rig.world.layout)
    rig.check(asyncio.run(rig.restore(whole)))
    assert rig.store.most > 2
    monkeypatch.setattr("dcr_daemon.publish.baseline.rebuild.BUDGET_BYTES", 1)
    monkeypatch.setattr("dcr_daemon.ledger.objects.AT_ONCE", 1)
    rig.store.most = 0
    rig.check(asyncio.run(rig.restore(whole, "narrow")))
    assert rig.store.most == 1


def test_a_rebuild_that_is_interrupted_leaves_nothing_to_believe(write: Any) -> None:
    rig = write()

    async def interrupt() -> None:
        rig.store.held = asyncio.Event()
        task = asyncio.ensure_future(rig.restore(rig.share(1)))
        await rig.store.waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}  # nothing goes on behind
        rig.store.held = None

    asyncio.run(interrupt())
    assert not (rig.world.root / "fresh/baseline.json").exists()
    rig.store.read.clear()
    rig.check(asyncio.run(rig.restore(rig.share(1))))
    assert rig.store.of(".safetensors")


def test_a_damaged_seal_below_the_newest_anchor_is_not_needed(write: Any) -> None:
    rig = write(5)
    rig.damage_seal(3)
    rig.check(asyncio.run(rig.restore(rig.share(0, 1), base=rig.world.base)))
    assert [event.what for event in rig.world.events.of(Retrying) if "trying the anchor of version 4" in event.what]


def test_a_damaged_seal_on_every_route_that_is_left_leaves_an_unverified_base(write: Any) -> None:
    rig = write(5)
    index, _, _ = rig.anchor()
    rig.damage_seal(3)
    index.write_bytes(b"")
    baseline = asyncio.run(rig.restore(rig.share(0, 1), base=rig.world.base))
    assert (baseline.version, baseline.unverified_base) == (5, True)
    assert [alarm.must for alarm in rig.world.events.of(Alarm)] == ["P4"]


def test_damaged_seals_that_stop_every_plan_leave_an_unverified_base(write: Any) -> None:
    rig = write(5, anchor_every=None, anchor_share=None)
    rig.damage_seal(3)
    baseline = asyncio.run(rig.restore(rig.share(0, 1), base=rig.world.base))
    assert (baseline.version, baseline.unverified_base) == (5, True)
    assert [alarm.must for alarm in rig.world.events.of(Alarm)] == ["P4"]


# What a rank finds in its state directory.


def test_a_cache_of_the_head_is_taken_and_nothing_is_read(write: Any) -> None:
    rig = write()
    asyncio.run(rig.restore(rig.share(1))).close()
    rig.store.read.clear()
    rig.check(asyncio.run(rig.restore(rig.share(1))))
    assert not rig.store.of(".safetensors")
    assert not rig.store.of(".dcr")


def test_a_cache_of_an_older_version_takes_the_chain_alone(write: Any, world: PublishWorld) -> None:
    rig = write(3, anchor_every=None)
    asyncio.run(rig.restore(rig.share(1), base=world.base)).close()
    more = [step_weights(rig.weights[-1], seed=9)]

    async def publish() -> None:
        options = PublishOptions(state=world.state, base=world.base, patience=5.0, workers=1, name="trainer")
        group = await Group(WORLD, lambda n: options, lambda n: world.store(), world.events).open()
        await group.publish(more[0])
        await group.close()

    asyncio.run(publish())
    rig.weights += more
    rig.store.read.clear()
    rig.check(asyncio.run(rig.restore(rig.share(1))))  # there is no base to begin from
    assert {int(key.split("/")[1]) for key in rig.store.of(".dcr")} == {4}


def torn(state: Path) -> None:
    """The host went down: some pages of the file are older than what the hint says."""
    body = bytearray((state / "baseline.bin").read_bytes())
    body[:32] = bytes(32)
    (state / "baseline.bin").write_bytes(body)


def halfway(state: Path) -> None:
    """The process died while the file was written: it is of two versions, and there is no hint."""
    torn(state)
    (state / "baseline.json").unlink()


def rewritten(**fields: Any) -> Callable[[Path], None]:
    def change(state: Path) -> None:
        hint = json.loads((state / "baseline.json").read_bytes())
        (state / "baseline.json").write_text(json.dumps(hint | fields))

    return change


def cut(state: Path) -> None:
    path = state / "baseline.bin"
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(
    "spoil",
    [
        torn, halfway, cut, rewritten(stream="another"), rewritten(version=1 << 40), rewritten(share="0" * 64),
        rewritten(vector="00"), lambda state: (state / "baseline.json").write_bytes(b"{"),
    ],
)  # fmt: skip
def test_a_cache_that_does_not_prove_itself_is_built_anew(write: Any, spoil: Callable[[Path], None]) -> None:
    rig = write()
    asyncio.run(rig.restore(rig.share(1))).close()
    spoil(rig.world.root / "fresh")
    rig.store.read.clear()
    rig.check(asyncio.run(rig.restore(rig.share(1))))
    assert rig.store.of(".safetensors")


def test_a_hint_that_a_damaged_record_hides_is_passed_over(write: Any) -> None:
    rig = write(5)
    whole = rig.share(0, 1)
    asyncio.run(rig.restore(whole)).close()
    rewritten(version=2)(rig.world.root / "fresh")
    rig.damage_seal(3)
    rig.check(asyncio.run(rig.restore(whole)))


def test_a_cache_of_another_share_is_not_taken_for_this_one(write: Any) -> None:
    """Two ranks with shares of one size: the map fits, and its elements are others."""
    halves = [[Block(2, Box.flat(at, 768))] for at in (0, 768)]
    rig = write()
    first, second = (BlockSet(rig.world.layout, blocks) for blocks in halves)
    asyncio.run(rig.restore(first)).close()
    rig.check(asyncio.run(rig.restore(second)))


def test_a_chunk_that_touches_nothing_is_not_decoded(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = write(1, anchor_every=None)
    for rank in range(WORLD):
        rig.repart(1, rank, contents=None)
    decoded: list[int] = []
    changes = Chunk.changes

    def counted(self: Chunk, index: int) -> Any:
        decoded.append(self.segment(index).tensor)
        return changes(self, index)

    monkeypatch.setattr(Chunk, "changes", counted)
    norm = BlockSet(rig.world.layout, [Block(5, Box.flat(0, 32))])
    rig.check(asyncio.run(rig.restore(norm, base=rig.world.base)))
    assert set(decoded) == {5}


def test_a_restart_in_the_middle_of_a_slow_rebuild_asks_for_nothing_twice(write: Any) -> None:
    """The store keeps all that it gives, as one over a slow link, and fails at the second object."""
    rig = write()

    class Slow(Counting):
        left = 1

        async def get(self, key: str, *, limit: int, keep: Any = None) -> bytes:
            if keep is None:
                return await super().get(key, limit=limit)
            if len(found := await keep.load()) == limit:
                return bytes(found)
            if not self.left:
                raise StoreUnavailable("no answer")
            self.left -= 1
            body = await super().get(key, limit=limit)
            await keep.append(body[: len(body) // 2])
            return body

    share, rig.store = rig.share(0), Slow(rig.bucket)
    with pytest.raises(StoreUnavailable):
        asyncio.run(rig.restore(share))
    (kept,) = (rig.world.root / "fresh" / "fetched").iterdir()
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == kept.name.strip(".").partition(".")[0], "whole"
    rig.store.left = 1000
    before = rig.store.left
    rig.check(asyncio.run(rig.restore(share)))
    asked = before - rig.store.left
    fresh = Slow(rig.bucket)
    fresh.left, rig.store = before, fresh
    rig.check(asyncio.run(rig.restore(share, "other")))
    assert before - fresh.left == asked + 1, "all but the one were asked for"
    assert not (rig.world.root / "fresh" / "fetched").exists()


@pytest.mark.parametrize("free", [0, RESERVE_BYTES + 2500])
def test_whether_an_object_is_kept_is_decided_before_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """There is room for two of these three, which are fetched side by side; what an earlier process kept is used."""
    workers, room = Workers(1), min(2, free)
    monkeypatch.setattr(FetchedObjects, "_free", lambda self: free)
    fetched = FetchedObjects(tmp_path / "fetched", workers=workers)
    earlier = PartialFile(tmp_path / "fetched" / ("c" * 64), workers=workers)

    async def read(name: str, all_begun: asyncio.Barrier) -> bytes:
        async def fetch(keep: PartialFile) -> bytes:
            await all_begun.wait()
            body = await keep.load() or b""
            await keep.append(bytes(500))
            monkeypatch.setattr(FetchedObjects, "_free", lambda self: 0)  # a disk that fills up meanwhile
            return body + bytes(1000 - len(body))

        return await fetched.read(ObjectRef(f"data/{name}", 1000, name * 64), fetch)

    async def run() -> None:
        await earlier.append(bytes(100))
        barrier = asyncio.Barrier(3)
        assert await asyncio.gather(*(read(name, barrier) for name in "abc")) == [bytes(1000)] * 3

    asyncio.run(run())
    kept = {path.name.strip(".")[0]: path.stat().st_size for path in (tmp_path / "fetched").iterdir()}
    assert kept == ({"a": 1000, "b": 1000, "c": 100} if room else {"c": 100})
    workers.close()
