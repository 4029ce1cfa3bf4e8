"""Damaged and misread records (must L2): nobody builds on them, all readers agree, and whoever erred finds out."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.events import RecordedEvents
from support.stores.memory import MemoryStore
from support.streams.record_history import HistoryWriter
from support.streams.record_writer import RecordWriter

from dcr_daemon.errors import Corrupt
from dcr_daemon.events import Alarm, LedgerDoubted, LedgerRead
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.audit.replay import replay
from dcr_daemon.ledger.fold import Tip
from dcr_daemon.ledger.high_water_mark import HighWaterMark
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.store.partial import PartialFile


class Misreading(MemoryStore):
    """Answers the next `left[key]` GETs of a key with one changed byte in the time of the record."""

    def __init__(self, of: MemoryStore) -> None:
        super().__init__()
        self.objects = of.objects
        self.left: Counter[str] = Counter()

    async def get(self, key: str, *, limit: int, keep: PartialFile | None = None) -> bytes:
        body = await super().get(key, limit=limit, keep=keep)
        if self.left[key] > 0:
            self.left[key] -= 1
            return retimed(body)
        return body


def retimed(body: bytes) -> bytes:
    at = body.index(b'"at":"') + 6
    return body[:at] + b"X" + body[at + 1 :]


def undigested(body: bytes) -> bytes:
    """The record as a writer of 0.1.0 wrote it."""
    return records.encode(records.decode_record(body))


@pytest.fixture
def history(store: MemoryStore) -> HistoryWriter:
    writer = HistoryWriter(store)
    writer.claim()
    writer.versions(3)
    return writer


@pytest.mark.parametrize("times", [1, 2, 5, 30])
async def test_a_misread_newest_record_is_waited_for_and_not_believed(history: HistoryWriter, times: int) -> None:
    store, events = Misreading(history.store), RecordedEvents()
    key = names.record(history.tip.seq)
    store.left[key] = times
    reader = Ledger(store, emit=events)
    await reader.read()
    if reader.doubt:
        assert (reader.state.seal.version, reader.tip.seq) == (2, history.tip.seq - 1)
        with pytest.raises(Corrupt, match="its digest is not that of its content"):
            reader.check_undoubted()
        for _ in range(times):
            await reader.read()
        assert events.of(LedgerDoubted) == [
            LedgerDoubted(
                seq=history.tip.seq, head=2, reason="it does not parse: its digest is not that of its content"
            )
        ]
        assert events.of(LedgerRead) == [LedgerRead(head=3)]
    assert reader.tip == history.tip
    assert reader.doubt is None


async def test_a_publisher_without_memory_claims_on_nothing_that_it_misread(history: HistoryWriter) -> None:
    store = Misreading(history.store)
    store.left[names.record(history.tip.seq)] = 3
    writer = RecordWriter(Ledger(store))
    await writer.ledger.claim("trainer")
    await writer.version()
    assert [step.void async for step in replay(history.store)] == [""] * (writer.ledger.tip.seq + 1)


async def test_a_claim_reads_an_old_records_bytes_twice(history: HistoryWriter) -> None:
    """Nothing in a record without a digest shows that it was misread."""
    key = names.record(history.tip.seq)
    history.store.objects[key] = undigested(history.store.objects[key])
    store = Misreading(history.store)
    store.left[key] = 1
    writer = RecordWriter(Ledger(store))
    await writer.ledger.claim("trainer")
    assert [step.void async for step in replay(history.store)] == [""] * (writer.ledger.tip.seq + 1)


async def test_every_reader_reads_an_old_record_until_two_reads_agree(store: MemoryStore) -> None:
    history = HistoryWriter(store, digests=False)
    history.claim()
    history.versions(3)
    for seq in range(history.tip.seq + 1):
        misreading = Misreading(store)
        misreading.left[names.record(seq)] = 1
        reader = Ledger(misreading)
        await reader.read()
        assert reader.tip == history.tip
        misreading.left[names.record(seq)] = 1
        assert [step.void async for step in replay(misreading)] == [""] * (history.tip.seq + 1)


async def test_a_reader_that_misread_an_old_record_finds_out(store: MemoryStore, tmp_path: Path) -> None:
    """It remembers a record that nobody else has; the next record does not follow, and it looks again."""
    history = HistoryWriter(store, digests=False)
    history.claim()
    history.versions(2)
    misreading, events = Misreading(store), RecordedEvents()
    misreading.left[names.record(history.tip.seq)] = 2
    reader = Ledger(misreading, mark=tmp_path / "mark", emit=events)
    await reader.read()
    assert reader.tip != history.tip
    follower = reader.follow()
    history.version()
    history.version()
    await reader.read()
    assert reader.tip == history.tip
    assert reader.state.seal.version == 4
    assert [record.seq for record in follower.taken()][-1] == history.tip.seq
    assert (await Ledger(store, mark=tmp_path / "mark").read()).seal.version == 4


async def test_a_remembered_state_that_its_record_contradicts_is_read_again(
    history: HistoryWriter, tmp_path: Path
) -> None:
    """A state directory in which an earlier DCR kept a wrong fold: version 1 at the newest record."""
    wrong = msgspec.structs.replace(history.tip.state, seal=records.SealRef(3, 1))
    HighWaterMark(tmp_path / "mark").saw(Tip(history.tip.stream, history.tip.seq, history.tip.digest, wrong))
    reader = Ledger(history.store, mark=tmp_path / "mark")
    assert (await reader.read()).seal.version == 3
    assert HighWaterMark(tmp_path / "mark").mark.state == history.tip.state  # type: ignore[union-attr]


@pytest.mark.parametrize("times", [1, 3])
async def test_one_misread_of_the_remembered_record_ends_nobody(
    history: HistoryWriter, tmp_path: Path, times: int
) -> None:
    await Ledger(history.store, mark=tmp_path / "mark").read()
    store = Misreading(history.store)
    store.left[names.record(history.tip.seq)] = times
    assert await Ledger(store, mark=tmp_path / "mark").read() == history.tip.state


async def test_nobody_writes_past_a_damaged_newest_record(history: HistoryWriter) -> None:
    store, key = history.store, names.record(history.tip.seq)
    whole = store.objects[key]
    store.objects[key] = whole[: len(whole) // 2]
    events = RecordedEvents()
    writer = RecordWriter(Ledger(store, emit=events))
    with pytest.raises(Corrupt, match="is damaged, or no record of this stream") as raised:
        await writer.ledger.claim("trainer")
    assert "restore the record from a backup" in raised.value.hint
    assert len([key for key in store.objects if key.startswith("ledger/")]) == history.tip.seq + 1
    assert len(events.of(Alarm)) == 1
    store.objects[key] = whole
    await writer.ledger.claim("trainer")
    assert writer.ledger.state.seal.version == 3


@pytest.mark.parametrize("digests", [True, False])
async def test_a_record_damaged_below_the_tail_is_passed_by_what_the_records_above_agree_on(
    store: MemoryStore, tmp_path: Path, digests: bool
) -> None:
    history = HistoryWriter(store, digests=digests)
    history.claim()
    history.version()
    reader, events = Ledger(store, mark=tmp_path / "mark"), RecordedEvents()
    await reader.read()
    history.versions(2)
    store.objects[names.record(4)] = b"damaged"
    reader._emit = events
    assert (await reader.read()).seal.version == 3
    assert reader.tip == history.tip
    assert reader.doubt is None
    assert (await Ledger(store).read()).seal.version == 3


async def test_the_head_is_what_the_bucket_shows(history: HistoryWriter, tmp_path: Path) -> None:
    """The newest two records are one whole, one damaged: nothing proves either, and the reader says what it missed."""
    events = RecordedEvents()
    reader = Ledger(history.store, mark=tmp_path / "mark", emit=events)
    await reader.read()
    history.version()
    history.store.objects[names.record(history.tip.seq - 1)] = b"damaged"
    await reader.read()
    assert reader.state.seal.version == 3
    assert reader.head == 4
    assert events.of(LedgerDoubted)[0].head == 4


Mutation = tuple[int, str, int]
KINDS = ["byte", "cut", "zeros", "empty", "other record", "junk", "time"]


def mutate(bodies: list[bytes], mutation: Mutation) -> bytes:
    """What stands in the slot after one damage."""
    slot, kind, n = mutation
    body = bodies[slot]
    at = n % len(body)
    return {
        "byte": body[:at] + bytes([body[at] ^ 1 + n % 255]) + body[at + 1 :],
        "cut": body[:at],
        "zeros": bytes(len(body)),
        "empty": b"",
        "other record": bodies[n % len(bodies)],
        "junk": b"junk",
        "time": retimed(body) if b'"at":"' in body else body,
    }[kind]


@settings(max_examples=200, deadline=None)
@given(
    digests=st.lists(st.booleans(), min_size=1, max_size=4),
    length=st.integers(1, 12),
    mutations=st.lists(st.tuples(st.integers(1, 40), st.sampled_from(KINDS), st.integers(0, 1 << 16)), max_size=4),
    seen=st.integers(0, 40),
)
def test_all_readers_agree_on_any_damaged_ledger(
    digests: list[bool], length: int, mutations: list[Mutation], seen: int
) -> None:
    """One that jumps to the tail, one that folds every record, and one that has read a part before the damage."""
    store = MemoryStore()
    history = HistoryWriter(store, digests=False)
    history.claim()
    for n in range(length):
        history.digests = digests[n % len(digests)]
        history.version()
    bodies = [store.objects[names.record(seq)] for seq in range(history.tip.seq + 1)]

    async def check() -> None:
        early = Ledger(store)
        for key in [names.record(seq) for seq in range(1 + seen % len(bodies), len(bodies))]:
            del store.objects[key]
        await early.read()
        read = early.tip
        store.objects.update({names.record(seq): body for seq, body in enumerate(bodies)})
        for mutation in mutations:
            slot = 1 + mutation[0] % (len(bodies) - 1)
            store.objects[names.record(slot)] = mutate(bodies, (slot, *mutation[1:]))
        steps = [step async for step in replay(store)]
        assert [step.tip.seq for step in steps] == list(range(len(bodies)))
        folded = [step.tip for step in steps if step.decided][-1]
        cold = Ledger(store)
        await cold.read()
        assert cold.tip == folded
        assert (cold.doubt is None) == steps[-1].decided
        await early.read()
        if folded.seq > read.seq:
            assert early.tip == cold.tip
        assert early.state.seal.version >= read.state.seal.version
        if cold.state.seal.version < history.tip.state.seal.version:
            assert cold.doubt or not all(digests), "a sealed version is missing and nobody says so"

    asyncio.run(check())
