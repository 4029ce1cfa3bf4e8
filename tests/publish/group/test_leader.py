from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.stores.wrapped import WrappedStore
from support.streams.publish_world import PublishWorld, make_weights, same_weights, step_weights

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.errors import Corrupt, Fenced, Incompatible, NotFound, ResourceExhausted, StoreUnavailable, UsageError
from dcr_daemon.events import Aborted, Alarm, AnchorPut, ChunkPut, Retrying, Sealed
from dcr_daemon.publish.group.leader import Leader
from dcr_daemon.publish.group.opening import open_leader
from dcr_daemon.publish.inputs.sources import FileSource
from dcr_daemon.publish.options import PublishOptions, stream_state
from dcr_daemon.store.port import Outcome


def options(world: PublishWorld, **more: Any) -> PublishOptions:
    defaults: dict[str, Any] = {"state": world.state, "base": world.base, "create": True, "patience": 1.0, "workers": 2}
    return PublishOptions(**defaults | more)


async def opened(world: PublishWorld, store: Any = None, **more: Any) -> Leader:
    return await open_leader(options(world, **more), store or world.store(), emit=world.events)


async def diff(session: Leader, weights: Any, world: PublishWorld, step: int | None = None) -> Any:
    """Open an attempt and diff a whole checkpoint of `weights`; the uploads may still be under way."""
    attempt = await session.begin(step=step)
    await diff_into(attempt, session, weights, world)
    return attempt


async def diff_into(attempt: Any, session: Leader, weights: Any, world: PublishWorld) -> None:
    place = world.root / f"checkpoint-{attempt.id}-{len(list(world.root.iterdir()))}"
    with Checkpoint(world.write(place, weights, shard_bytes=2000)) as checkpoint:
        await attempt.diff(
            (session.layout.index(spec.name), FileSource(file, spec))
            for file in checkpoint.files
            for spec in file.specs
        )
    await attempt.finish()


async def publish(session: Leader, weights: Any, world: PublishWorld, step: int | None = None) -> Any:
    return await session.seal(await diff(session, weights, world, step))


def test_a_chain_rebuilds_every_checkpoint_bit_for_bit(world: PublishWorld) -> None:
    chain = [world.weights]

    async def run() -> None:
        session = await opened(world)
        for n in range(4):
            chain.append(step_weights(chain[-1], seed=n))
            sealed = await publish(session, chain[-1], world, step=10 - n)
            assert (sealed.version, sealed.step) == (n + 1, 10 - n)
            assert sealed.changed == sum(int((chain[-1][k] != chain[-2][k]).sum()) for k in chain[-1])
        await session.close()

    asyncio.run(run())
    versions = world.reader.versions()
    assert len(versions) == 5
    assert all(same_weights(versions[n], weights) for n, weights in enumerate(chain))
    assert [a.version for a in world.events.of(AnchorPut)] == [0]
    assert world.reader.kinds() == ["Stream", "Epoch", "Anchor", *["Open", "Seal"] * 4, "Release"]


def test_signs_of_zero_and_nan_payloads_are_changes(world: PublishWorld) -> None:
    first = {name: bits.copy() for name, bits in world.weights.items()}
    first["embed.weight"][:4] = [0x0000, 0x7FC0, 0x7F80, 0x0001]
    second = {name: bits.copy() for name, bits in first.items()}
    second["embed.weight"][:4] = [0x8000, 0x7FC1, 0xFF80, 0x8001]

    async def run() -> None:
        session = await opened(world)
        await publish(session, first, world)
        assert (await publish(session, second, world)).changed == 4
        assert (await publish(session, second, world)).changed == 0
        await session.close()

    asyncio.run(run())
    versions = world.reader.versions()
    assert same_weights(versions[2], second)
    assert same_weights(versions[3], second)


@pytest.mark.parametrize("codec", ["AUTO", "ULP", "XOR", "OVERWRITE"])
@pytest.mark.parametrize("spool_memory", [0, 1 << 20])
def test_an_abort_brings_the_baseline_back_exactly(world: PublishWorld, codec: str, spool_memory: int) -> None:
    from dcr_daemon.codec.chunk import Codec

    one = step_weights(world.weights, seed=1)

    async def run() -> None:
        session = await opened(world, codec=Codec[codec], spool_memory=spool_memory)
        baseline = session.context.baseline
        before, bits = await baseline.fingerprint(), [baseline[n].copy() for n in range(len(baseline.blocks))]
        for finished in (True, False):
            attempt = await session.begin()
            await diff_into(attempt, session, make_weights(world.layout, seed=9), world)
            assert not np.array_equal(await baseline.fingerprint(), before)
            if finished:
                await attempt.upload(await attempt.contribution(), 1.0)
            await session.abort_unless_sealed("test")
            assert baseline.version == 0
            assert np.array_equal(await baseline.fingerprint(), before)
            assert np.array_equal(baseline.vector, before)
            assert all(np.array_equal(baseline[i], old) for i, old in enumerate(bits))
        await publish(session, one, world)
        await session.close()

    asyncio.run(run())
    assert len(world.events.of(Aborted)) == 2
    assert not list(stream_state(world.state, world.url).glob("spool/*"))
    assert same_weights(world.reader.versions()[1], one)


def test_a_clean_restart_uses_the_cache_and_a_lost_one_the_bucket(world: PublishWorld) -> None:
    chain = [world.weights]

    async def run(**more: Any) -> None:
        session = await opened(world, **more)
        chain.append(step_weights(chain[-1], seed=len(chain)))
        await publish(session, chain[-1], world)
        await session.close()

    def rebuilt() -> bool:
        found = any("building version" in str(event) for event in world.events)
        world.events.clear()
        return found

    asyncio.run(run(anchor_every=2))
    assert not rebuilt()
    asyncio.run(run(create=False, base=None))
    assert not rebuilt()
    state = stream_state(world.state, world.url)
    baseline = state / "baseline.bin"
    with baseline.open("r+b") as file:  # a page that never reached the disk
        file.seek(100)
        file.write(b"\x55\xaa")
    asyncio.run(run(create=False, base=None))
    assert rebuilt()
    (state / "baseline.json").unlink()  # a hint only: the fingerprint tells what the bytes are
    asyncio.run(run(create=False, base=None))
    assert not rebuilt()
    baseline.unlink()
    asyncio.run(run(create=False))
    assert rebuilt()
    versions = world.reader.versions()
    assert all(same_weights(versions[n], weights) for n, weights in enumerate(chain))


def test_a_publisher_without_state_starts_from_the_newest_anchor(world: PublishWorld) -> None:
    chain = [world.weights]

    async def first() -> None:
        session = await opened(world, anchor_every=2, name="a")
        for n in range(3):
            chain.append(step_weights(chain[-1], seed=n))
            await publish(session, chain[-1], world)
            await session.anchor_if_due()
        await session.close()

    async def second() -> None:
        session = await opened(world, state=world.root / "elsewhere", base=None, create=False, name="b")
        assert session.head == 3
        chain.append(step_weights(chain[-1], seed=7))
        await publish(session, chain[-1], world)
        await session.anchor_if_due(at_once=True)
        await session.close()

    asyncio.run(first())
    assert [a.version for a in world.events.of(AnchorPut)] == [0, 2]
    asyncio.run(second())
    versions = world.reader.versions()
    assert all(same_weights(versions[n], weights) for n, weights in enumerate(chain))
    extras = sorted(path.name for path in (world.root / "bucket/anchors/4").glob("*/*.json"))
    assert extras == ["config.json", "index.json", "tokenizer.json"]


@pytest.mark.parametrize("trouble", ["the base is gone", "a chunk is damaged", "the newest anchor is damaged"])
def test_a_baseline_is_built_from_whatever_anchor_leads_there(world: PublishWorld, trouble: str) -> None:
    """The cheapest way is the base and the chain; a publisher must come up again by any other."""
    chain = [world.weights]

    async def first() -> None:
        session = await opened(world, anchor_every=2, name="a")
        for n in range(5):
            chain.append(step_weights(chain[-1], seed=n))
            await publish(session, chain[-1], world)
            await session.anchor_if_due()
        await session.close()

    asyncio.run(first())
    base: Path | None = world.base
    bucket = world.root / "bucket"
    if trouble == "the base is gone":
        base = world.root / "gone"
    elif trouble == "a chunk is damaged":
        next((bucket / "data/1").rglob("*.dcr")).write_bytes(b"spoilt")
    else:
        base = None
        next((bucket / "anchors/4").rglob("*.safetensors")).write_bytes(b"spoilt")

    async def second() -> None:
        session = await opened(world, state=world.root / "elsewhere", base=base, name="a")
        chain.append(step_weights(chain[-1], seed=7))
        await publish(session, chain[-1], world)
        assert all(
            np.array_equal(session.read(i, 0, s.elements), chain[-1][s.name].reshape(-1))
            for i, s in enumerate(world.layout)
        )
        await session.close()

    asyncio.run(second())
    assert any("trying the anchor" in event.what for event in world.events.of(Retrying))


def test_without_anchor_or_base_nothing_is_guessed(world: PublishWorld) -> None:
    async def run() -> None:
        await (await opened(world, upload_base=False)).close()
        with pytest.raises(NotFound, match="base"):
            await opened(world, state=world.root / "elsewhere", base=None, create=False)

    asyncio.run(run())
    assert "Anchor" not in world.reader.kinds()


def test_another_base_or_layout_is_refused(world: PublishWorld) -> None:
    other = world.write(world.root / "other", make_weights(world.layout, seed=5))
    layout = Layout([*world.layout.specs[:-1], TensorSpec("extra", "BF16", (3,))])
    foreign = world.write(world.root / "foreign", make_weights(layout), layout=layout)

    async def run() -> None:
        await (await opened(world, upload_base=False)).close()
        with pytest.raises(Incompatible, match="not version 0"):
            await opened(world, state=world.root / "elsewhere", base=other)
        with pytest.raises(Incompatible, match=r"missing: tiny; added: extra"):
            await opened(world, base=foreign)
        await (await opened(world, state=world.root / "elsewhere")).close()

    asyncio.run(run())


def test_create_is_asked_for_and_needs_a_base(world: PublishWorld) -> None:
    async def run() -> None:
        with pytest.raises(NotFound, match="--create"):
            await opened(world, create=False)
        with pytest.raises(UsageError, match="base"):
            await opened(world, base=None)
        await (await opened(world)).close()
        await (await opened(world)).close()

    asyncio.run(run())
    assert world.reader.kinds().count("Stream") == 1


def test_a_ledger_that_is_gone_is_not_made_anew(world: PublishWorld) -> None:
    import shutil

    async def run() -> None:
        await (await opened(world)).close()
        shutil.rmtree(world.root / "bucket")
        with pytest.raises(Corrupt, match="gone"):
            await opened(world)

    asyncio.run(run())


def test_a_second_publisher_waits_for_release_or_takes_over(world: PublishWorld) -> None:
    one = step_weights(world.weights, seed=1)
    two = step_weights(world.weights, seed=2)

    async def run() -> None:
        first = await opened(world, name="a")
        elsewhere = {"state": world.root / "elsewhere", "name": "b"}
        with pytest.raises(Fenced, match="take"):
            await opened(world, **elsewhere)
        attempt = await diff(first, one, world)
        second = await opened(world, **elsewhere, take_over=True)
        before = first.context.baseline.vector
        with pytest.raises(Fenced):
            await first.seal(attempt)
        with pytest.raises(Fenced):
            await first.abort_unless_sealed("fenced")
        assert np.array_equal(await first.context.baseline.fingerprint(), before)
        await publish(second, two, world)
        await first.close()
        await second.close()
        third = await opened(world, name="a")  # released: anybody may claim
        assert third.head == 1
        await third.close()

    asyncio.run(run())
    assert same_weights(world.reader.versions()[1], two)


def test_a_crashed_publisher_claims_again_under_its_name_and_voids_its_attempt(world: PublishWorld) -> None:
    one = step_weights(world.weights, seed=1)

    async def run() -> None:
        first = await opened(world)
        await diff(first, make_weights(world.layout, seed=3), world)
        first.context.state.close()  # what the kernel does for a process that is killed
        second = await opened(world)
        assert second.head == 0
        await publish(second, one, world)
        await second.close()

    asyncio.run(run())
    assert same_weights(world.reader.versions()[1], one)
    assert world.reader.kinds() == ["Stream", "Epoch", "Anchor", "Open", "Epoch", "Open", "Seal", "Release"]


def test_one_process_at_a_time_uses_a_state_directory(world: PublishWorld) -> None:
    async def run() -> None:
        first = await opened(world)
        with pytest.raises(UsageError, match="another publisher process"):
            await opened(world)
        await first.close()

    asyncio.run(run())


@pytest.mark.parametrize("landed", [True, False])
def test_a_lost_answer_to_the_seal_is_decided_by_its_slot(world: PublishWorld, landed: bool) -> None:
    """Whether the PUT arrived or not, one version comes of it and the baseline follows."""

    class Lossy(WrappedStore):
        lost = 0

        async def create(self, key: str, body: bytes | memoryview) -> Outcome:
            if key.startswith("ledger/") and b'"kind":"seal"' in bytes(body) and not self.lost:
                self.lost += 1
                if landed:
                    await self.inner.create(key, body)
                return Outcome.UNKNOWN
            return await self.inner.create(key, body)  # type: ignore[no-any-return]

    one = step_weights(world.weights, seed=1)
    two = step_weights(one, seed=2)

    async def run() -> None:
        store = Lossy(world.store())
        session = await opened(world, store)
        assert (await publish(session, one, world)).version == 1
        assert store.lost == 1
        await publish(session, two, world)
        await session.close()

    asyncio.run(run())
    versions = world.reader.versions()
    assert len(versions) == 3
    assert same_weights(versions[1], one)
    assert same_weights(versions[2], two)


def test_a_bucket_that_fails_for_a_while_costs_an_attempt_not_the_publisher(world: PublishWorld) -> None:
    class Flaky(WrappedStore):
        down = False

        async def create(self, key: str, body: bytes | memoryview) -> Outcome:
            return Outcome.UNKNOWN if self.down else await self.inner.create(key, body)

        async def get(self, key: str, *, limit: int, keep: Any = None) -> bytes:
            if self.down:
                raise StoreUnavailable("the bucket is down")
            return await self.inner.get(key, limit=limit)  # type: ignore[no-any-return]

    one = step_weights(world.weights, seed=1)

    async def run() -> None:
        store = Flaky(world.store())
        session = await opened(world, store, patience=0.2)
        attempt = await diff(session, make_weights(world.layout, seed=3), world)
        store.down = True
        with pytest.raises(StoreUnavailable):
            await session.seal(attempt)
        with pytest.raises(StoreUnavailable):
            await session.abort_unless_sealed("the bucket is down")
        with pytest.raises(StoreUnavailable):
            await session.begin()
        store.down = False
        await publish(session, one, world)
        await session.close()

    asyncio.run(run())
    assert same_weights(world.reader.versions()[1], one)
    assert len(world.events.of(Aborted)) == 1


def test_a_full_disk_of_the_spool_ends_the_attempt_and_undoes_it(
    world: PublishWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from dcr_daemon.publish.version import spool

    one = step_weights(world.weights, seed=1)

    async def run() -> None:
        session = await opened(world, spool_memory=0)
        before = session.context.baseline.vector
        attempt = await session.begin()

        def full(*args: Any) -> None:
            raise spool.disk_error(OSError(errno.ENOSPC, "no space"), Path("spool"))

        monkeypatch.setattr(session.context._spool, "_write", full)
        with pytest.raises(ResourceExhausted, match="no space"):
            await diff_into(attempt, session, make_weights(world.layout, seed=3), world)
        await session.abort_unless_sealed("disk full")
        assert session.context.baseline.version == 0
        assert np.array_equal(await session.context.baseline.fingerprint(), before)
        monkeypatch.undo()
        await publish(session, one, world)
        await session.close()

    asyncio.run(run())
    assert same_weights(world.reader.versions()[1], one)


def test_a_foreign_object_under_a_chunks_name_aborts_the_attempt(world: PublishWorld) -> None:
    class Squatted(WrappedStore):
        squat = True

        async def create(self, key: str, body: bytes | memoryview) -> Outcome:
            if key.endswith(".dcr") and self.squat:
                await self.inner.create(key, b"not ours")
            return await self.inner.create(key, body)  # type: ignore[no-any-return]

    one = step_weights(world.weights, seed=1)

    async def run() -> None:
        store = Squatted(world.store())
        session = await opened(world, store)
        with pytest.raises(Corrupt, match="other bytes"):
            await publish(session, one, world)
        await session.abort_unless_sealed("squatted")
        store.squat = False
        await publish(session, one, world)
        await session.close()

    asyncio.run(run())
    assert same_weights(world.reader.versions()[1], one)


def test_a_baseline_damaged_in_memory_is_found_before_an_anchor(world: PublishWorld) -> None:
    one = step_weights(world.weights, seed=1)

    async def run() -> None:
        session = await opened(world)
        await publish(session, one, world)
        session.context.baseline[0][3] ^= 0x40
        await session.anchor_if_due(at_once=True)
        await session.close()

    asyncio.run(run())
    assert [alarm.must for alarm in world.events.of(Alarm)] == ["P4"]
    assert world.events.of(AnchorPut)[-1].version == 1
    assert same_weights(world.reader.versions()[1], one)


def test_anchors_come_when_the_chain_outweighs_its_share(world: PublishWorld) -> None:
    async def run() -> None:
        session = await opened(world, anchor_share=0.5)
        for n in range(4):
            await publish(session, make_weights(world.layout, seed=n + 1), world)
            await session.anchor_if_due()
        await session.close()

    asyncio.run(run())
    assert [a.version for a in world.events.of(AnchorPut)] == [0, 1, 2, 3, 4]


def test_a_side_file_called_like_the_index_of_an_anchor_is_left_behind(world: PublishWorld) -> None:
    for name in ("index.json", "read me first.txt"):
        (world.base / name).write_bytes(b"{}")

    async def run() -> None:
        session = await opened(world)
        await publish(session, make_weights(world.layout, seed=1), world)
        await session.anchor_if_due(at_once=True)
        await session.close()

    asyncio.run(run())
    assert 1 in [a.version for a in world.events.of(AnchorPut)]


def test_chunks_leave_while_the_diff_goes_on(world: PublishWorld) -> None:
    new = make_weights(world.layout, seed=4)

    async def run() -> None:
        session = await opened(world, upload_backlog=1000, uploads=2, chunk_bytes=300)
        attempt = await session.begin()
        with Checkpoint(world.write(world.root / "c", new)) as checkpoint:
            for spec in checkpoint.files[0].specs:
                await attempt.diff([(session.layout.index(spec.name), FileSource(checkpoint.files[0], spec))])
            assert world.events.of(ChunkPut), "nothing was uploaded before the last tensor was diffed"
        await attempt.finish()
        await session.seal(attempt)
        await session.close()

    asyncio.run(run())
    assert len(world.events.of(ChunkPut)) >= 3
    assert len(world.events.of(Sealed)) == 1
    assert same_weights(world.reader.versions()[1], new)
