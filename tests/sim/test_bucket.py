"""With its faults off the simulated bucket keeps the promises of the store port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import pytest
from sim.bucket import Fault, SimStore
from sim.clock import running
from sim.world import World, installed

from dcr_daemon.errors import Corrupt, KeyNotFound, StoreUnavailable, UsageError
from dcr_daemon.store import Entry, Outcome, probe, put_if_absent

Body = Callable[[World, SimStore], Awaitable[None]]


@pytest.fixture
def use() -> Iterator[Callable[[Body], None]]:
    """Run a test body as a process of a fresh world."""

    def run(body: Body) -> None:
        world = World(0, "bucket")
        with installed(world):
            process = world.process("test", world.machine("test"))

            async def play() -> None:
                await world.loop.spawn(process, body(world, SimStore(world, process)))

            outcome = world.run(play())
            assert outcome.ok, outcome.violation

    yield run
    assert running.get() is None


def test_an_object_is_created_once_and_read_back(use) -> None:
    async def body(world: World, store: SimStore) -> None:
        assert await store.create("data/1/2/a", b"first") is Outcome.WON
        assert await store.create("data/1/2/a", memoryview(b"first")) is Outcome.LOST
        assert await store.get("data/1/2/a", limit=5) == b"first"
        with pytest.raises(Corrupt):
            await store.get("data/1/2/a", limit=4)
        with pytest.raises(KeyNotFound):
            await store.get("data/1/2/b", limit=4)
        for wrong in ("", "/a", "../a", "a//b", ".hidden"):
            with pytest.raises(UsageError):
                await store.create(wrong, b"")

    use(body)


def test_a_listing_is_ordered_and_holds_to_its_prefix(use) -> None:
    async def body(world: World, store: SimStore) -> None:
        for key in ("b/2", "b/1", "a", "c"):
            await store.create(key, key.encode())
        assert [entry async for entry in store.list("b/")] == [Entry("b/1", 3), Entry("b/2", 3)]
        await store.delete(["b/1", "b/1"])
        await store.overwrite("b/2", b"other bytes")
        assert [entry async for entry in store.list("b/")] == [Entry("b/2", 11)]

    use(body)


def test_the_probe_of_a_publisher_accepts_it(use) -> None:
    async def body(world: World, store: SimStore) -> None:
        assert await probe(store) == []
        assert not world.bucket.objects

    use(body)


@pytest.mark.parametrize("fault", [Fault.REQUEST_LOST, Fault.ANSWER_LOST, Fault.GHOST, Fault.REFUSED])
def test_a_lost_message_leaves_a_create_unknown_and_a_retry_decides_it(use, fault: Fault) -> None:
    async def body(world: World, store: SimStore) -> None:
        world.store_rates = {fault: 1.0}
        assert await store.create("data/1/2/a", b"mine") is Outcome.UNKNOWN
        world.store_rates = {}
        await put_if_absent(store, "data/1/2/a", b"mine")
        assert await store.get("data/1/2/a", limit=9) == b"mine"
        assert world.outcome.faults[fault.value] == 1

    use(body)


def test_patience_ends_and_says_so(use) -> None:
    async def body(world: World, store: SimStore) -> None:
        world.down_until = 1e9
        with pytest.raises(StoreUnavailable):
            await store.get("a", limit=1)

    use(body)
