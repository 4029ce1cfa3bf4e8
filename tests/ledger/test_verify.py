"""`verify` finds every damage there is, and says what can still be done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from support.stores.memory import MemoryStore
from support.streams.writer import StreamWriter

from dcr_daemon.codec.decode import open_chunk
from dcr_daemon.errors import Corrupt, CorruptChunk, NotFound
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.audit.verify import Report, verify
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.records import Floor, ObjectRef
from dcr_daemon.ledger.retention.collector import collect
from dcr_daemon.ledger.retention.plan import RetentionPolicy
from dcr_daemon.runtime import Workers


@pytest.fixture
def stream(store: MemoryStore, make_versions: Callable[..., Any]) -> StreamWriter:
    """Four versions and an aborted attempt; anchors of 1 and 3."""

    async def write() -> StreamWriter:
        writer = StreamWriter(store.url, make_versions(4), store)
        await writer.create()
        await writer.publish(1)
        await writer.anchor(1)
        await writer.open(2)
        await writer.abort(2)
        await writer.publish(2, 3)
        await writer.anchor(3)
        await writer.publish(4)
        return writer

    return asyncio.run(write())


def check(stream: StreamWriter) -> Report:
    return asyncio.run(verify(stream.store))


def test_a_whole_stream_has_no_damage(stream: StreamWriter) -> None:
    told = []

    async def run() -> Report:
        workers = Workers(2)
        report = await verify(stream.store, progress=lambda *step: told.append(step), workers=workers)
        workers.close()
        return report

    report = asyncio.run(run())
    assert report.ok
    assert report.damages == []
    assert (report.head, report.floor, report.versions, report.anchors) == (4, 0, 4, 2)
    assert report.records == stream.ledger.tip.seq + 1
    named = [key for key in stream.store.objects if not key.startswith("ledger/")]
    assert report.objects == len(named), "every object was read once"
    assert report.bytes == sum(len(stream.store.objects[key]) for key in named)
    assert [step[1:] for step in told] == [(n, 6) for n in range(6)]


SPOILS: dict[str, Callable[[bytes], bytes | None]] = {
    "gone": lambda _: None,
    "cut": lambda body: body[:-1],
    "one bit": lambda body: bytes([body[0] ^ 1]) + body[1:],
    "a byte more": lambda body: body + b"\n",
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_no_object_can_be_damaged_or_lost_unnoticed(
    stream: StreamWriter, spoil: Callable[[bytes], bytes | None]
) -> None:
    whole = dict(stream.store.objects)
    last = names.record(stream.ledger.tip.seq)
    for key, body in whole.items():
        spoiled = spoil(body)
        stream.store.objects = {**whole, key: spoiled} if spoiled is not None else {**whole}
        if spoiled is None:
            del stream.store.objects[key]
        if key == last and spoiled is None:
            # The newest record is pinned by no later one: without it the ledger is an honest, shorter one, which
            # only a reader with memory can refuse (must T1).
            assert check(stream).ok
            continue
        try:
            report = check(stream)
        except (Corrupt, NotFound):
            assert key in (names.record(0), names.layout(stream.versions.layout.digest))
        else:
            assert not report.ok, key
            assert any(damage.what and damage.repair for damage in report.damages)


def test_a_stale_record_is_void_and_no_damage(stream: StreamWriter) -> None:
    fields = {**stream.ledger._header().fields, "epoch": 999}
    stale = records.Release(**fields)
    stream.store.objects[names.record(stale.seq)] = records.encode(stale)
    report = check(stream)
    assert report.ok
    assert report.void == [f"record {stale.seq}: epoch 999 is stale: the newest is 1"]


def test_without_its_layout_nothing_can_be_checked(stream: StreamWriter) -> None:
    stream.store.objects[names.layout(stream.versions.layout.digest)] = b"[]"
    with pytest.raises(Corrupt, match="layouts/"):
        check(stream)


def damages(stream: StreamWriter) -> dict[str, Any]:
    return {damage.key: damage for damage in check(stream).damages}


class TestWhatCanBeDone:
    def chunk(self, stream: StreamWriter, version: int) -> str:
        part = records.decode_part(stream.store.objects[stream.ledger.history.seals[version].parts[0].key])
        return part.chunks[0].key

    def test_a_delta_below_an_anchor_is_passed_by_it(self, stream: StreamWriter) -> None:
        key = self.chunk(stream, 2)
        del stream.store.objects[key]
        damage = damages(stream)[key]
        assert damage.version == 2
        assert "by the anchor of version 3" in damage.repair

    def test_a_delta_above_every_anchor_needs_a_new_one(self, stream: StreamWriter) -> None:
        key = self.chunk(stream, 4)
        stream.store.objects[key] = b"spoiled"
        assert "until the publisher writes a later anchor" in damages(stream)[key].repair

    def test_an_anchor_can_be_built_from_the_one_before(self, stream: StreamWriter) -> None:
        key = next(key for key in stream.store.objects if key.startswith("anchors/3/") and "model" in key)
        del stream.store.objects[key]
        damage = damages(stream)[key]
        assert damage.rebuildable
        assert damage.repair == "`dcr materialize --version 3` still builds it, from the anchor of version 1"
        gone = self.chunk(stream, 2)
        del stream.store.objects[gone]
        found = damages(stream)
        assert not found[key].rebuildable
        assert "until the publisher writes a later anchor" in found[key].repair
        assert "until the publisher writes a later anchor" in found[gone].repair

    def test_a_vector_follows_from_the_chunks(self, stream: StreamWriter) -> None:
        key = stream.ledger.history.seals[2].fingerprint.key
        stream.store.objects[key] = b"\0" * len(stream.store.objects[key])
        found = damages(stream)
        assert list(found) == [key], "and the chain goes on from what was recomputed"
        assert found[key].rebuildable

    def test_a_vector_takes_two_deltas_and_an_anchor_with_it(self, stream: StreamWriter) -> None:
        """Nobody builds, or goes by, a version whose vector is not there."""
        del stream.store.objects[stream.ledger.history.seals[3].fingerprint.key]
        (damage,) = check(stream).damages
        assert "versions 3 to 4 cannot be built any more; replicas below version 4 wait until" in damage.repair
        del stream.store.objects[names.vector(0, 0)]
        base = damages(stream)[names.vector(0, 0)]
        assert (
            "version 0 cannot be built any more; replicas below version 1 go by the anchor of version 1" in base.repair
        )

    def test_versions_between_a_lost_delta_and_the_next_anchor_are_lost(self, stream: StreamWriter) -> None:
        key = self.chunk(stream, 2)
        del stream.store.objects[key]
        assert damages(stream)[key].repair.startswith("version 2 cannot be built any more; ")
        key = self.chunk(stream, 3)
        stream.store.objects[key] += b"?"
        assert damages(stream)[key].repair.startswith("nothing is lost, version 3 has an anchor; ")

    def test_a_part_is_named_by_its_own_key(self, stream: StreamWriter) -> None:
        key = stream.ledger.history.seals[2].parts[0].key
        body = stream.store.objects.pop(key)
        assert list(damages(stream)) == [key]
        stream.store.objects[key] = body[:-1]
        assert list(damages(stream)) == [key]

    def test_sums_are_checked_and_needed_by_nobody(self, stream: StreamWriter) -> None:
        key = next(key for key in stream.store.objects if key.startswith("data/2/") and key.endswith(".sums"))
        whole = stream.store.objects[key]
        for body in (whole[:-8], bytes(len(whole))):
            stream.store.objects[key] = body
            (damage,) = check(stream).damages
            assert (damage.key, damage.rebuildable) == (key, True)
            assert "no reader needs it" in damage.repair

    def test_the_first_anchor_can_be_had_from_the_base(self, stream: StreamWriter) -> None:
        key = next(key for key in stream.store.objects if key.startswith("anchors/1/") and "model" in key)
        del stream.store.objects[key]
        assert "`dcr materialize --version 1 --base DIR`" in damages(stream)[key].repair
        assert "by the anchor of version 3" in damages(stream)[key].repair

    def test_every_missing_record_is_named_and_comes_back_from_a_copy(self, stream: StreamWriter) -> None:
        whole = dict(stream.store.objects)
        for first in range(1, stream.ledger.tip.seq):
            for lost in ({first}, {first, first + 1}, {first, stream.ledger.tip.seq - 1}):
                if max(lost) == stream.ledger.tip.seq:
                    continue
                for seq in lost:
                    del stream.store.objects[names.record(seq)]
                report = check(stream)
                assert report.records == first
                assert [d.key for d in report.damages] == [names.record(seq) for seq in sorted(lost)]
                for damage in report.damages:
                    assert "missing although later ones exist" in damage.what
                    assert "from a backup" in damage.repair
                    assert "Without a copy the stream ends here" in damage.repair
                stream.store.objects |= {names.record(seq): whole[names.record(seq)] for seq in lost}
                assert check(stream).ok, "the repair works"

    def test_without_its_first_record_a_ledger_is_damaged_and_not_absent(self, stream: StreamWriter) -> None:
        del stream.store.objects[names.record(0)]
        with pytest.raises(Corrupt, match="record 0 is missing"):
            check(stream)

    def test_a_stream_without_its_first_record_is_not_called_absent(self, stream: StreamWriter) -> None:
        del stream.store.objects[names.record(0)]
        with pytest.raises(Corrupt, match="record 0 is missing"):
            check(stream)


class TestThatItAddsUp:
    """Objects that verify one by one and are wrong together."""

    def reseal(self, stream: StreamWriter, **changes: Any) -> None:
        """Replace the last record, the seal of version 4."""
        key = names.record(stream.ledger.tip.seq)
        seal = records.decode_record(stream.store.objects[key])
        stream.store.objects[key] = records.encode(msgspec.structs.replace(seal, **changes))

    def put(self, stream: StreamWriter, key: str, body: bytes) -> ObjectRef:
        stream.store.objects[key] = body
        return ObjectRef(key, len(body), records.digest(body))

    def test_chunks_that_lead_elsewhere_name_the_tensors(self, stream: StreamWriter) -> None:
        sums = stream.versions.vector(4).copy()
        sums[0] += 1
        sums[1] -= 1
        place = self.put(stream, stream.ledger.history.seals[4].fingerprint.key, sums.astype("<u8").tobytes())
        self.reseal(stream, fingerprint=place)
        (damage,) = check(stream).damages
        first, second = (stream.versions.layout[n].name for n in (0, 1))
        assert f"do not lead from version 3 to its fingerprint: {first}, {second}" in damage.what

    def test_a_sum_before_that_is_not_the_sum_after(self, stream: StreamWriter) -> None:
        self.reseal(stream, before="0" * 16)
        (damage,) = check(stream).damages
        assert "its sum before is not the sum after" in damage.what

    def test_a_chunk_of_another_version_under_this_ones_key(self, stream: StreamWriter) -> None:
        seals = stream.ledger.history.seals
        part3, part4 = (records.decode_part(stream.store.objects[seals[v].parts[0].key]) for v in (3, 4))
        old = stream.store.objects[part3.chunks[0].key]
        stream.store.objects[part4.chunks[0].key] = old
        ref = msgspec.structs.replace(part4.chunks[0], size=len(old), sha256=records.digest(old))
        part = msgspec.structs.replace(part4, chunks=[ref, *part4.chunks[1:]])
        self.reseal(stream, parts=[self.put(stream, seals[4].parts[0].key, records.encode(part))])
        (damage,) = check(stream).damages
        assert "is a chunk of another attempt" in damage.what

    def test_a_chunk_with_other_counts_than_its_part(self, stream: StreamWriter) -> None:
        seals = stream.ledger.history.seals
        part = records.decode_part(stream.store.objects[seals[4].parts[0].key])
        chunks = [msgspec.structs.replace(part.chunks[0], segments=part.chunks[0].segments + 1), *part.chunks[1:]]
        body = records.encode(msgspec.structs.replace(part, chunks=chunks))
        self.reseal(stream, parts=[self.put(stream, seals[4].parts[0].key, body)])
        (damage,) = check(stream).damages
        assert "does not have the" in damage.what

    def test_a_chunk_that_cannot_be_decoded(self, stream: StreamWriter, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its digest is right and its table is; what its writer put into the streams is not."""

        def spoiled(*arguments: Any) -> Any:
            chunk = open_chunk(*arguments)
            if chunk.id.version == 2:
                monkeypatch.setattr(chunk, "changes", self.raising)
            return chunk

        monkeypatch.setattr("dcr_daemon.ledger.audit.checks.open_chunk", spoiled)
        assert {damage.version for damage in check(stream).damages} == {2}

    @staticmethod
    def raising(_n: int) -> None:
        raise CorruptChunk("positions do not ascend")

    def test_an_anchor_with_another_sum_than_its_version(self, stream: StreamWriter) -> None:
        async def write() -> None:
            anchor = await stream.anchor(4)
            body = records.encode(msgspec.structs.replace(anchor, total="0" * 16))
            stream.store.objects[names.record(anchor.seq)] = body

        asyncio.run(write())
        (damage,) = check(stream).damages
        assert "its sum is not that of the version" in damage.what


class TestRetention:
    """Must L5: what lies below the floor may be gone, and is not damage."""

    def raise_floor(self, stream: StreamWriter) -> None:
        asyncio.run(stream.ledger.append(lambda header: Floor(**header.fields, floor=3)))
        for key in [*stream.store.objects]:
            if key.startswith(("data/1/", "data/2/", "anchors/1/")):
                del stream.store.objects[key]

    def test_below_the_floor_nothing_is_looked_for(self, stream: StreamWriter) -> None:
        self.raise_floor(stream)
        report = check(stream)
        assert report.ok
        assert (report.floor, report.versions, report.anchors) == (3, 2, 1)

    def test_the_vector_of_version_0_is_kept_and_checked(self, stream: StreamWriter) -> None:
        key = names.vector(0, 0)
        whole = stream.store.objects[key]
        self.raise_floor(stream)
        for spoiled in (b"", whole[:-1], b"\1" + whole[1:], None):
            stream.store.objects.pop(key)
            if spoiled is not None:
                stream.store.objects[key] = spoiled
            (damage,) = check(stream).damages
            assert damage.key == key
            assert damage.repair.startswith("no version is lost")
            stream.store.objects[key] = whole
        assert check(stream).ok

    def test_data_that_the_ledger_does_not_know_of_is_damage(self, stream: StreamWriter) -> None:
        key = names.chunk(5, 999, "g", 0, "a0", 0)
        stream.store.objects[key] = b"x"
        (damage,) = check(stream).damages
        assert damage.key == "data/5/999/"
        assert "lost its newest records" in damage.repair

    def test_a_floor_that_rises_while_we_look_makes_no_damage(self, stream: StreamWriter) -> None:
        once = [True]

        async def collect(operation: str, key: str) -> None:
            if once and operation == "get" and key.startswith("data/1/"):
                once.clear()
                stream.store.before = None
                tip = stream.ledger.tip
                fields = {**stream.ledger._header().fields, "prev": tip.digest}
                body = records.encode(Floor(**fields, floor=3))
                stream.store.objects[names.record(tip.seq + 1)] = body
                for gone in [*stream.store.objects]:
                    if gone.startswith(("data/0/", "data/1/", "data/2/", "anchors/1/")):
                        del stream.store.objects[gone]

        stream.store.before = collect
        report = check(stream)
        assert not once
        assert report.ok
        assert report.floor == 3

    def test_what_was_collected_is_no_damage(self, stream: StreamWriter) -> None:
        """By the collector itself, with an anchor of a version that has a newer one, and whatever was left behind."""

        async def collect_all() -> Report:
            await stream.anchor(3)
            await stream.ledger.release()
            await collect(Ledger(stream.store), RetentionPolicy(versions=1))
            return await verify(stream.store)

        report = asyncio.run(collect_all())
        assert report.ok
        assert (report.floor, report.versions, report.anchors, report.orphans) == (3, 2, 1, 0)


def test_what_nothing_needs_is_counted(stream: StreamWriter) -> None:
    stream.store.objects[names.chunk(2, 5, "g", 0, "a0", 0)] = b"1234"
    stream.store.objects["data/notes.txt"] = b"?"
    report = check(stream)
    assert report.ok
    assert (report.orphans, report.orphan_bytes, report.unknown) == (1, 4, ["data/notes.txt"])


class TestAnchorContent:
    """Digests say that an anchor is what was uploaded; only its fingerprint says that this is the version (must L5)."""

    def test_tensors_of_another_version_are_found(self, stream: StreamWriter) -> None:
        asyncio.run(stream.anchor(4, content=2))
        (damage,) = check(stream).damages
        assert damage.key.startswith("anchors/4/")
        assert "do not hold the version: embed.weight, head.weight, layers.0.mlp" in damage.what
        assert damage.rebuildable
        assert "from the anchor of version 3" in damage.repair

    def test_a_tensor_that_is_missing_is_found(self, stream: StreamWriter) -> None:
        asyncio.run(stream.anchor(4, without="layers.0.norm"))
        (damage,) = check(stream).damages
        assert damage.what == "its files do not hold the version: layers.0.norm"
