"""The process dies, or another publisher takes over, at every request: what was sealed stays, what was not is void."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from support.faults.failing_requests import Dead, FaultyStore, SmallWorld, each_request, history, kill, parts, run, same

from dcr_daemon.errors import Fenced
from dcr_daemon.events import FencedOut
from dcr_daemon.ledger.records import Release
from dcr_daemon.publish.group.leader import Leader


async def life(world: SmallWorld, store: FaultyStore, versions: list[int], **more: Any) -> list[Leader]:
    """One process: publish what is not published yet, then release. The session, to be killed by whoever kills it."""
    session = await world.open(store, **more)
    try:
        for seed in versions[session.head :]:
            await world.publish(session, world.draw(seed))
            assert await world.proved(session)
            await session.anchor_if_due()
        await world.diff(session, world.draw(99))
        await session.abort_unless_sealed("given up")
        assert await world.proved(session)
        await session.close()
    except BaseException:
        kill(session)
        raise
    return [session]


def requests(world: SmallWorld) -> list[str]:
    async def log() -> list[str]:
        store = FaultyStore()
        await life(world, store, [1, 2, 3])
        return store.log

    return run(log())


@pytest.mark.parametrize("part", parts(4, quick=1))
@pytest.mark.parametrize("when", ["dead before", "dead after"])
@pytest.mark.parametrize("left", ["as it was", "damaged", "lost"])
def test_a_crash_at_any_request_loses_nothing(
    small_world: SmallWorld, when: str, left: str, part: tuple[int, int]
) -> None:
    """`left`: what becomes of the baseline's cache in the crash."""
    world, log = small_world, requests(small_world)

    async def die(number: int) -> None:
        world.forget("one")
        store = FaultyStore()
        store.spoil = lambda n, operation, key: when if n == number else None
        with contextlib.suppress(Dead):
            await life(world, store, [1, 2, 3])
        store.spoil, store.dead = lambda n, operation, key: None, False
        for cache in (world.root / "one").rglob("baseline.bin"):
            if left == "damaged":
                with cache.open("r+b") as file:
                    file.seek(16)
                    file.write(b"\x5a\xa5")
            elif left == "lost":
                cache.unlink()
        await life(world, store, [1, 2, 3])
        found = await world.versions(store)
        assert [same(weights, world.draw(seed)) for seed, weights in enumerate(found)] == [True] * 4
        assert isinstance(history(store)[-1], Release)

    each_request(log, part, die)


@pytest.mark.parametrize("part", parts(2, quick=0))
def test_a_takeover_at_any_request_leaves_one_history_and_stops_the_loser(
    small_world: SmallWorld, part: tuple[int, int]
) -> None:
    """As if the first publisher were stopped at that request, and woken when the second has published."""
    world, log = small_world, requests(small_world)

    async def take_over(number: int) -> None:
        world.forget("one", "two")
        store = FaultyStore()

        async def rival() -> None:
            store.spoil = lambda n, operation, key: None
            if "ledger/0000000000000000.json" not in store.objects:
                return
            session = await world.open(store, name="two", take_over=True)
            sealed.extend(range(session.head))
            await world.publish(session, world.draw(50))
            rivals.append(session)

        sealed: list[int] = []
        rivals: list[Leader] = []
        tasks: list[asyncio.Task[None]] = []

        async def begin() -> None:
            """A task of its own: whoever made the request may give it up."""
            tasks.append(asyncio.create_task(rival()))
            await asyncio.shield(tasks[0])

        store.spoil = lambda n, operation, key: begin() if n == number else None
        said = ""
        try:
            await life(world, store, [1, 2, 3])
        except Fenced as error:
            said = error.message
        await asyncio.gather(*tasks)
        for session in rivals:
            assert not said or world.events.of(FencedOut)
            assert not said or "two has claimed" in said or "one may not claim from two" in said
            await world.publish(session, world.draw(51))
            assert await world.proved(session)
            await session.close()
            wanted = [*range(len(sealed) + 1), 50, 51]
            found = await world.versions(store)
            assert [same(found[n], world.draw(seed)) for n, seed in enumerate(wanted)] == [True] * len(wanted)
            assert len(found) == len(wanted), "a fenced publisher went on"

    each_request(log, part, take_over)
