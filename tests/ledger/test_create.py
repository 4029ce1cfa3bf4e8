"""A stream is made once, on an empty prefix (must T1)."""

from __future__ import annotations

import asyncio

import pytest
from support.stores.memory import MemoryStore
from support.streams.record_writer import LAYOUT, RecordWriter

from dcr_daemon.errors import Corrupt, UsageError
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.ledger import Ledger


def test_the_record_comes_after_what_it_names(store: MemoryStore) -> None:
    """Must L4: whoever sees the record can read layout and vector."""

    async def check() -> None:
        order = []

        async def note(operation: str, key: str) -> None:
            if operation == "create":
                order.append(key)

        store.before = note
        writer = RecordWriter(Ledger(store))
        await writer.create()
        assert order == [names.layout(LAYOUT.digest), names.vector(0, 0), names.record(0)]
        stream = writer.ledger.stream
        assert store.objects[stream.layout.key] == LAYOUT.encoded
        assert records.digest(store.objects[stream.layout.key]) == stream.layout.sha256 == LAYOUT.digest
        assert records.digest(store.objects[stream.fingerprint.key]) == stream.fingerprint.sha256
        assert stream.total == records.show_u64(15)

    asyncio.run(check())


def test_an_existing_stream_is_read_and_left_alone(store: MemoryStore) -> None:
    async def check() -> None:
        first, again = RecordWriter(Ledger(store)), RecordWriter(Ledger(store))
        await first.create()
        before = dict(store.objects)
        await again.create()
        assert store.objects == before
        assert again.ledger.stream == first.ledger.stream

    asyncio.run(check())


@pytest.mark.parametrize("key", ["notes.txt", "ledger/0000000000000001.json", "data/1/2/g-0-a-0.dcr"])
def test_a_prefix_that_holds_anything_else_is_refused(store: MemoryStore, key: str) -> None:
    store.objects[key] = b""
    with pytest.raises(UsageError, match=key):
        asyncio.run(RecordWriter(Ledger(store)).create())
    assert set(store.objects) == {key}


@pytest.mark.parametrize("created", [1, 2])
def test_a_creation_that_died_before_its_record_is_taken_up(store: MemoryStore, created: int) -> None:
    async def check() -> None:
        count = 0

        async def die(operation: str, _key: str) -> None:
            nonlocal count
            count += operation == "create"
            if count > created:
                raise KeyboardInterrupt

        store.before = die
        with pytest.raises(KeyboardInterrupt):
            await RecordWriter(Ledger(store)).create()
        store.before = None
        store.objects["probe/abc/twice"] = b"left by a probe that may not delete"
        writer = RecordWriter(Ledger(store))
        await writer.create()
        assert writer.ledger.state.seal.version == 0

    asyncio.run(check())


def test_it_is_not_taken_up_with_another_base(store: MemoryStore) -> None:
    async def check() -> None:
        store.objects[names.vector(0, 0)] = b"another base's sums"
        with pytest.raises(Corrupt, match="other bytes"):
            await RecordWriter(Ledger(store)).create()

    asyncio.run(check())


def test_of_two_creators_one_wins_and_both_read_its_stream(store: MemoryStore) -> None:
    async def check() -> None:
        writers = [RecordWriter(Ledger(store)) for _ in range(2)]

        async def slowly(_operation: str, _key: str) -> None:
            await asyncio.sleep(0)

        store.before = slowly
        await asyncio.gather(*(writer.create() for writer in writers))
        assert writers[0].ledger.stream == writers[1].ledger.stream

    asyncio.run(check())
