"""Many ranks publish one version or none, whichever of them fails (musts P1, P2, P3, P7)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.ranks.in_process import Group, RankOf
from support.streams.publish_world import PublishWorld, same_weights, step_weights

from dcr_daemon.checkpoint.blocks import Block
from dcr_daemon.errors import Corrupt, DcrError, Fenced, UsageError
from dcr_daemon.events import AnchorPut, Sealed
from dcr_daemon.ledger.records import Abort, Seal
from dcr_daemon.publish.group.collect import UpdateAborted
from dcr_daemon.publish.group.opening import open_leader
from dcr_daemon.publish.options import PublishOptions
from dcr_daemon.publish.rank import Rank, find_rank

MakeGroup = Callable[..., Group]


@pytest.fixture
def ranked(world: PublishWorld) -> MakeGroup:
    """`ranked(n)`: a group of n ranks on the world's stream; the same state directory for all groups."""

    def make(count: int, **more: Any) -> Group:
        chosen: dict[str, Any] = {
            "state": world.state, "base": world.base, "create": True, "patience": 5.0, "workers": 1, "name": "trainer",
            "upload_base": False, "lag": 0.3,
        } | more  # fmt: skip
        return Group(count, lambda n: PublishOptions(**chosen), lambda n: world.store(), world.events)

    return make


def chain(world: PublishWorld, count: int) -> list[Any]:
    weights = [world.weights]
    for n in range(count):
        weights.append(step_weights(weights[-1], seed=n))
    return weights


def without_embedding(weights: dict[str, Any]) -> dict[str, Any]:
    """Weights that a rank fails to read, with a KeyError."""
    return {name: bits for name, bits in weights.items() if name != "embed.weight"}


async def check(world: PublishWorld, weights: list[Any]) -> None:
    """The stream's versions are exactly these, and nothing else."""
    found = await world.reader.read_versions()
    assert sorted(found) == list(range(len(weights)))
    assert all(same_weights(found[n], one) for n, one in enumerate(weights))


@pytest.mark.parametrize("count", [2, 3, 5])
async def test_every_rank_gives_its_part_and_the_version_is_whole(
    world: PublishWorld, ranked: MakeGroup, count: int
) -> None:
    weights = chain(world, 3)
    async with ranked(count) as group:
        for step, one in enumerate(weights[1:], 1):
            sealed = await group.publish(one, step)
            assert (sealed.version, sealed.step) == (step, step)
    await check(world, weights)
    seals = [record for record in world.reader.records() if isinstance(record, Seal)]
    assert [len(seal.parts) for seal in seals] == [count] * 3


async def test_the_number_of_ranks_changes_on_one_stream(world: PublishWorld, ranked: MakeGroup) -> None:
    weights = chain(world, 5)
    for version, count in enumerate([4, 2, 4, 3, 5], 1):
        async with ranked(count) as group:
            await group.publish(weights[version])
    await check(world, weights)


async def test_one_process_and_many_take_turns(world: PublishWorld, ranked: MakeGroup) -> None:
    weights = chain(world, 4)

    async def alone(new: Any) -> None:
        options = PublishOptions(state=world.state, base=world.base, create=True, name="trainer", workers=1)
        session = await open_leader(options, world.store(), emit=world.events)
        attempt = await session.begin()
        share = session.context.baseline.blocks
        reads = (
            (n, lambda b=share[n]: new[session.layout[b.tensor].name][b.box.dst : b.box.dst + b.box.elements])
            for n in range(len(share))
        )
        await attempt.diff_blocks(reads)
        await attempt.finish()
        await session.seal(attempt)
        await session.close()

    await alone(weights[1])
    async with ranked(3) as group:
        await group.publish(weights[2])
    await alone(weights[3])
    async with ranked(2) as group:
        await group.publish(weights[4])
    await check(world, weights)


async def test_anchors_are_written_in_shares_and_lead_other_worlds_back(world: PublishWorld, ranked: MakeGroup) -> None:
    weights = chain(world, 5)
    async with ranked(3, anchor_every=2) as group:
        for one in weights[1:5]:
            await group.publish(one)
    async with ranked(2, base=None, create=False, state=world.root / "elsewhere") as group:  # nothing is cached
        await group.publish(weights[5])
    assert [event.version for event in world.events.of(AnchorPut)] == [2, 4]
    await check(world, weights)


async def test_a_rank_that_fails_ends_the_update_for_all_and_the_next_one_is_right(
    world: PublishWorld, ranked: MakeGroup
) -> None:
    weights = chain(world, 2)
    async with ranked(3) as group:
        await group.publish(weights[1], 1)

        async def work(rank: RankOf) -> Any:
            bad = without_embedding(weights[2]) if rank.rank.number == 1 else weights[2]
            return await rank.publish(bad, 2)

        results = await group.all(work)
        assert isinstance(results[1], KeyError)
        assert all(isinstance(results[n], UpdateAborted) for n in (0, 2))
        assert "rank 1 gave the update up: KeyError" in str(results[0])
        await group.publish(weights[2], 3)
    await check(world, weights)


async def test_members_hear_why_rank_0_gave_up_even_if_it_has_closed_since(
    world: PublishWorld, ranked: MakeGroup
) -> None:
    weights = chain(world, 1)
    group = await ranked(3).open()
    await group.publish(weights[1], 1)
    leader, members = group.ranks[0], group.ranks[1:]
    with pytest.raises(KeyError):
        await leader.publish(without_embedding(weights[1]), 2)
    await leader.close()
    for rank in members:
        with pytest.raises(UpdateAborted, match="rank 0 gave the update up: KeyError"):
            await rank.publish(weights[1], 2)
        with pytest.raises(UpdateAborted, match="rank 0 has closed its publisher"):
            await rank.publish(weights[1], 3)
        await rank.close()
    await check(world, weights)


async def test_ranks_that_publish_different_steps_publish_nothing(world: PublishWorld, ranked: MakeGroup) -> None:
    weights = chain(world, 1)
    async with ranked(3) as group:
        results = await group.all(lambda rank: rank.publish(weights[1], 7 + (rank.rank.number == 2)))
        assert isinstance(results[2], UsageError)
        assert all(isinstance(results[n], UpdateAborted) for n in (0, 1))
        await group.publish(weights[1], 9)
    await check(world, weights)


async def test_a_call_that_one_rank_skips_is_nobodys(world: PublishWorld, ranked: MakeGroup) -> None:
    weights = chain(world, 1)
    late: list[Any] = []

    async def publish_late(rank: RankOf) -> None:
        late.append(asyncio.ensure_future(rank.publish(weights[1])))

    async def publish_or_skip(rank: RankOf) -> Any:
        return await (publish_late(rank) if rank.rank.number == 1 else rank.publish(weights[1]))

    async with ranked(3) as group:
        group.ranks[1].calls += 1  # its script left one out
        results = await group.all(
            lambda rank: publish_late(rank) if rank.rank.number == 1 else rank.publish(weights[1])
        )
        assert all(isinstance(results[n], UpdateAborted) for n in (0, 2))
        assert "passed update 1 without taking part" in str(results[0])
        await asyncio.gather(*(rank.publish(weights[1]) for rank in group.ranks if rank.rank.number != 1), late[0])
    await check(world, weights)


async def test_a_rank_that_is_gone_is_given_up_when_the_next_update_begins(
    world: PublishWorld, ranked: MakeGroup
) -> None:
    weights = chain(world, 2)
    async with ranked(3) as group:
        await group.publish(weights[1], 1)
        lost = group.ranks[2]

        async def work(rank: RankOf) -> Any:
            if rank is lost:
                return None
            publishing = asyncio.ensure_future(rank.publish(weights[2], 2))
            await asyncio.sleep(0.5)
            assert not publishing.done()  # no clock ends the wait
            rank.session.start_lag_timer()
            return await publishing

        results = await group.all(work)
        assert isinstance(results[0], UpdateAborted)
        assert "rank 2" in str(results[0])
        assert isinstance(results[1], UpdateAborted)
        lost.calls += 1
        await group.publish(weights[2], 3)
    await check(world, weights)


async def test_a_leftover_of_an_older_group_never_gets_into_a_seal(world: PublishWorld, ranked: MakeGroup) -> None:
    weights = chain(world, 3)
    old = await ranked(3).open()
    await old.publish(weights[1], 1)
    leftover = old.ranks[2]
    # Rank 2 sleeps in the middle of an update; the others die, and the group is started anew.
    starting = [asyncio.ensure_future(rank.start(weights[2], 2)) for rank in old.ranks]
    await asyncio.gather(*starting)
    for rank in old.ranks[:2]:
        await rank.session.context.close()
    new = await ranked(2).open()
    await new.publish(weights[2], 2)
    attempt = leftover.session.context.attempt
    assert attempt is not None
    with pytest.raises(Fenced):  # it wakes up
        await leftover.session.seal(attempt)
    assert leftover.session.context.baseline.version == 1
    with pytest.raises(Fenced):
        await leftover.publish(weights[3], 3)
    await new.publish(weights[3], 3)
    await new.close()
    await leftover.session.context.close()
    await check(world, weights)
    for record in world.reader.records():
        if isinstance(record, Seal) and record.version > 1:
            assert len(record.parts) == 2


async def test_a_member_whose_rank_0_never_comes_ends_by_itself(world: PublishWorld, ranked: MakeGroup) -> None:
    weights = chain(world, 2)
    leftover = ranked(2, patience=0.2, state=world.root / "old").ranks[1]
    new = await ranked(2).open()
    await new.publish(weights[1], 1)
    await leftover.open()  # its rank 0 died before it opened anything
    waiting = asyncio.ensure_future(leftover.publish(weights[2], 1))
    await new.publish(weights[2], 2)  # the ledger moves, and not for it
    with pytest.raises(UpdateAborted, match="opened nothing"):
        await waiting
    await new.close()
    await leftover.close()
    await check(world, weights)


async def test_a_member_whose_rank_0_died_before_it_opened_is_fenced_by_the_next_group(
    world: PublishWorld, ranked: MakeGroup
) -> None:
    """It knows no claim of its own group; one made after it began to listen, by another group, ends it (must P6)."""
    weights = chain(world, 2)
    first = await ranked(2).open()
    await first.publish(weights[1], 1)
    await first.close()
    leftover = ranked(2, patience=0.2, state=world.root / "old").ranks[1]
    await leftover.open()
    new = await ranked(2, state=world.root / "new").open()
    waiting = asyncio.ensure_future(leftover.publish(weights[2], 1))
    await new.publish(weights[2], 2)
    with pytest.raises(Fenced, match="has claimed"):
        await waiting
    await new.close()
    await leftover.close()
    await check(world, weights)


@pytest.mark.parametrize("wrong", ["twice", "missing"])
async def test_shares_that_do_not_add_up_are_never_sealed(world: PublishWorld, ranked: MakeGroup, wrong: str) -> None:
    weights = chain(world, 1)
    async with ranked(2) as group:
        right = group.ranks[1].deal

        def deal(layout: Any, rank: int, count: int) -> list[Block]:
            blocks = right(layout, rank, count)
            if wrong == "missing":
                return blocks[1:]
            have = {block.tensor for block in blocks}
            return [*blocks, next(b for b in right(layout, 0, count) if b.tensor not in have)]

        group.ranks[1].deal = deal
        results = await group.all(lambda rank: rank.publish(weights[1], 1))
        assert isinstance(results[0], Corrupt)
        assert "does not add up to version 0" in str(results[0])
        assert isinstance(results[1], UpdateAborted)
    assert sorted(await world.reader.read_versions()) == [0]
    (abort,) = [record for record in world.reader.records() if isinstance(record, Abort)]
    assert abort.rebuild


async def test_a_rank_whose_baseline_is_not_the_base_is_found_by_the_sums_and_builds_it_anew(
    world: PublishWorld, ranked: MakeGroup
) -> None:
    weights = chain(world, 2)
    async with ranked(3) as group:
        await group.publish(weights[1], 1)
        baseline = group.ranks[2].session.context.baseline
        baseline[0][:] ^= 1
        await baseline.adopt_unverified(1)  # a lie that its own sums agree with
        results = await group.all(lambda rank: rank.publish(weights[2], 2))
        assert isinstance(results[0], Corrupt)
        await group.publish(weights[2], 3)
    await check(world, weights)


async def test_two_processes_that_are_one_rank_publish_nothing(world: PublishWorld, ranked: MakeGroup) -> None:
    weights = chain(world, 1)
    group = ranked(2)
    twin = RankOf(
        PublishOptions(state=world.root / "twin", base=world.base, create=True, patience=5.0, workers=1),
        world.store(), world.events, Rank(group.ranks[0].rank.group, 1, 2),
    )  # fmt: skip
    await group.open()
    await twin.open()
    results = await asyncio.gather(
        *(rank.publish(weights[1], 1) for rank in [*group.ranks, twin]), return_exceptions=True
    )
    # Whether rank 0 sees both before it has what it waits for is a race; what is sealed is of one of them.
    assert all(isinstance(one, DcrError) for one in results) or len(world.events.of(Sealed)) >= 2
    await group.close()
    await twin.session.context.close()
    found = await world.reader.read_versions()
    assert 1 not in found or same_weights(found[1], weights[1])


def test_ranks_find_each_other_only_by_what_they_agreed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert find_rank(None, None, None).world == 1
    given = find_rank("abc", 1, 2)
    assert (given.group, given.number, given.world) == ("abc", 1, 2)
    for wrong in [(None, 0, 2), ("A", 0, 2), ("abc", 2, 2), ("abc", 0, None), ("abc", 0, 4097)]:
        with pytest.raises(UsageError):
            find_rank(*wrong)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    first = find_rank(None, 0, 2)
    assert first.group == find_rank(None, 1, 2).group
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert find_rank(None, 0, 2).group != first.group


async def test_a_members_sums_are_its_own(world: PublishWorld, ranked: MakeGroup) -> None:
    async with ranked(3) as group:
        await group.publish(step_weights(world.weights, seed=1))
        vectors = [rank.session.context.baseline.vector for rank in group.ranks]
        assert all(v.any() for v in vectors)
        whole = await group.ranks[0].session.context.restorer.vector(1)
        assert np.array_equal(np.sum(vectors, axis=0, dtype=np.uint64), whole)
