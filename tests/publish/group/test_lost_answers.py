"""Every request of whole publishes goes wrong in every way: one linear history comes of it, and the right versions."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
from support.faults.failing_requests import FaultyStore, SmallWorld, each_request, history, parts, run, same

from dcr_daemon.errors import StoreUnavailable
from dcr_daemon.ledger.records import Abort, Anchor, Release, Seal

KINDS = ("lost", "unheard", "ghost")


async def whole(world: SmallWorld, store: FaultyStore) -> None:
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
    with contextlib.suppress(StoreUnavailable):
        await world.diff(session, world.draw(9))
    assert await world.settle(session) is None
    assert await world.proved(session)
    await world.publish(session, world.draw(3))
    assert await world.proved(session)
    await session.close()


async def anchor(session: Any) -> None:
    with contextlib.suppress(StoreUnavailable):
        await session.anchor_if_due()


async def judge(world: SmallWorld, store: FaultyStore) -> None:
    """What must hold whatever went wrong; then somebody else comes and goes on."""
    found = await world.versions(store)
    assert [same(weights, world.draw(seed)) for seed, weights in enumerate(found)] == [True] * 4
    other = await world.open(store, name="two", take_over=True)
    await world.publish(other, world.draw(4))
    await other.close()
    assert same((await world.versions(store))[4], world.draw(4))


async def attempt(world: SmallWorld, faults: dict[int, str]) -> FaultyStore:
    world.forget("one", "two")
    store = FaultyStore()
    store.spoil = lambda number, operation, key: faults.get(number)
    await whole(world, store)
    store.spoil = lambda number, operation, key: None
    await judge(world, store)
    return store


def test_nothing_goes_wrong(small_world: SmallWorld) -> None:
    store = run(attempt(small_world, {}))
    kinds = [type(record) for record in history(store)]
    assert [kinds.count(kind) for kind in (Seal, Abort, Anchor, Release)] == [4, 1, 4, 2]


@pytest.mark.parametrize(("kind", "part"), [
    pytest.param(kind, *part.values, marks=part.marks, id=f"{kind}-{part.id}")
    for n, kind in enumerate(KINDS) for part in parts(2, quick=n % 2)
])  # fmt: skip
def test_one_request_goes_wrong(small_world: SmallWorld, kind: str, part: tuple[int, int]) -> None:
    log = run(attempt(small_world, {})).log
    each_request(log, part, lambda number: attempt(small_world, {number: kind}))


@pytest.mark.parametrize(("kinds", "part"), [
    pytest.param(kinds, *part.values, marks=part.marks, id=f"{'-'.join(kinds)}-{part.id}")
    for n, kinds in enumerate(itertools.product(KINDS, KINDS)) for part in parts(12, quick=n)
])  # fmt: skip
def test_two_requests_in_a_row_go_wrong(small_world: SmallWorld, kinds: tuple[str, str], part: tuple[int, int]) -> None:
    log = run(attempt(small_world, {})).log
    each_request(log, part, lambda number: attempt(small_world, {number: kinds[0], number + 1: kinds[1]}))
