"""Every request of whole publishes goes wrong in every way: one linear history comes of it, and the right versions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from small_publisher import SmallWorld, SpoiltStore, history, run, same

from dcr_daemon.errors import StoreUnavailable
from dcr_daemon.ledger.records import Abort, Anchor, Release, Seal

KINDS = ("lost", "unheard", "ghost")


async def whole(world: SmallWorld, store: SpoiltStore) -> None:
    """Create, claim, two versions and an anchor, an attempt that is given up, another version, release."""
    for _ in range(20):
        try:
            session = await world.open(store)
            break
        except StoreUnavailable:
            pass
    for seed in (1, 2):
        await world.publish(session, world.draw(seed))
        assert await world.proved(session)
        await anchor(session)
    try:
        await world.diff(session, world.draw(9))
    except StoreUnavailable:
        pass
    assert await world.settle(session) is None
    assert await world.proved(session)
    await world.publish(session, world.draw(3))
    assert await world.proved(session)
    await session.close()


async def anchor(session: Any) -> None:
    try:
        await session.anchor_if_due()
    except StoreUnavailable:
        pass


async def judge(world: SmallWorld, store: SpoiltStore) -> None:
    """What must hold whatever went wrong; then somebody else comes and goes on."""
    found = await world.versions(store)
    assert [same(weights, world.draw(seed)) for seed, weights in enumerate(found)] == [True] * 4
    other = await world.open(store, name="two", take_over=True)
    await world.publish(other, world.draw(4))
    await other.close()
    assert same((await world.versions(store))[4], world.draw(4))


async def attempt(world: SmallWorld, faults: dict[int, str]) -> SpoiltStore:
    world.forget("one", "two")
    store = SpoiltStore()
    store.spoil = lambda number, operation, key: faults.get(number)
    await whole(world, store)
    store.spoil = lambda number, operation, key: None
    await judge(world, store)
    return store


def test_nothing_goes_wrong(small_world: SmallWorld) -> None:
    store = run(attempt(small_world, {}))
    kinds = [type(record) for record in history(store)]
    assert [kinds.count(kind) for kind in (Seal, Abort, Anchor, Release)] == [4, 1, 4, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_one_request_goes_wrong(small_world: SmallWorld, kind: str) -> None:
    requests = run(attempt(small_world, {})).log

    async def loop() -> None:
        for number in range(1, len(requests) + 1):
            try:
                await attempt(small_world, {number: kind})
            except BaseException as error:
                error.add_note(f"{kind} at request {number}: {requests[number - 1]}")
                raise

    run(loop())


@pytest.mark.parametrize(("first", "second"), [
    pytest.param(*pair, marks=[] if pair in (("unheard", "lost"), ("ghost", "unheard")) else pytest.mark.slow)
    for pair in itertools.product(KINDS, KINDS)
])  # fmt: skip
def test_two_requests_in_a_row_go_wrong(small_world: SmallWorld, first: str, second: str) -> None:
    requests = run(attempt(small_world, {})).log

    async def loop() -> None:
        for number in range(1, len(requests) + 1):
            try:
                await attempt(small_world, {number: first, number + 1: second})
            except BaseException as error:
                error.add_note(f"{first}, {second} at request {number}: {requests[number - 1]}")
                raise

    run(loop())
