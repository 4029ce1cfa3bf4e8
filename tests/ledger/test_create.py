"""A stream is made once, on an empty prefix (must T1)."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from support.stores.memory import MemoryStore
from support.streams.record_writer import LAYOUT, RecordWriter
from support.virtual_time import VirtualTimeRuntime

from dcr_daemon.canonical.layout import Layout, TensorSpec
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


@pytest.mark.parametrize("key", ["notes.txt", "data/1/2/g-0-a-0.dcr"])
def test_a_prefix_that_holds_anything_else_is_refused(store: MemoryStore, key: str) -> None:
    store.objects[key] = b""
    with pytest.raises(UsageError, match=key):
        asyncio.run(RecordWriter(Ledger(store)).create())
    assert set(store.objects) == {key}


def test_a_ledger_that_lost_its_first_record_is_no_empty_prefix(store: MemoryStore) -> None:
    store.objects[names.record(1)] = b""
    for call in (RecordWriter(Ledger(store)).create, Ledger(store).read):
        with pytest.raises(Corrupt, match="record 0 is missing"):
            asyncio.run(call())
    assert set(store.objects) == {names.record(1)}


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


class OtherBase(RecordWriter):
    vector = np.array([7, 9], dtype=np.uint64)


class OtherLayout(OtherBase):
    layout = Layout([TensorSpec("other.weight", "BF16", (4, 4)), TensorSpec("b.bias", "F32", (4,))])


@pytest.mark.parametrize("first", [RecordWriter, OtherBase, OtherLayout])
@pytest.mark.parametrize("more", [False, True], ids=["created", "published"])
def test_a_creation_at_any_instant_of_another_is_joined(
    store: MemoryStore, first: type[RecordWriter], more: bool
) -> None:
    """At each request of the second, the first makes the stream, and perhaps publishes to it: the second reads it. Of
    two bases the one whose objects came first makes the stream."""

    async def check(instant: int) -> bool:
        store.objects.clear()
        count, refused = 0, False
        winner, second = first(Ledger(store)), RecordWriter(Ledger(store))

        async def at_instant(_operation: str, _key: str) -> None:
            nonlocal count, refused
            count += 1
            if count == instant:
                store.before = None
                try:
                    await winner.create()
                except (UsageError, Corrupt):
                    refused = True
                    assert first is not RecordWriter
                    assert names.layout(LAYOUT.digest) in store.objects
                    return
                store.objects["anchors/0/1/config.json"] = b""
                if more:
                    await winner.ledger.claim("first")
                    await winner.version()

        store.before = at_instant
        await second.create()
        reached, store.before = count == instant, None
        if reached and not refused:
            assert second.ledger.stream == winner.ledger.stream
        return reached

    instant = 1
    while asyncio.run(check(instant)):
        instant += 1
    assert instant > 5, "requests of the second were met"


@pytest.mark.parametrize("first", [OtherBase, OtherLayout])
def test_a_creation_under_way_is_waited_for(
    store: MemoryStore, first: type[RecordWriter], still: VirtualTimeRuntime
) -> None:
    """The other has put its objects, and its record comes a little later."""

    async def check() -> None:
        winner, second = first(Ledger(store)), RecordWriter(Ledger(store))
        await winner.create()
        record = store.objects.pop(names.record(0))
        still.on_sleep = lambda _: store.objects.setdefault(names.record(0), record) and None
        await second.create()
        assert second.ledger.stream == winner.ledger.stream

    asyncio.run(check())
