"""What every engine promises a subscriber, as tests. A test module takes them in with `import *` and gives `subject`.

A subject may be shared by many tests (a server is dear), so they speak of its newest version and of those after it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec
import numpy as np
import pytest

from dcr_daemon.engine.port import Engine, Scrubbed, TensorClass, Transaction, Verdict
from dcr_daemon.errors import Corrupt, EngineRefused, Fenced
from support.streams.versions import Versions

_number = itertools.count()


class Subject(Protocol):
    """Something that holds live weights: those of the newest of `versions` when a test begins."""

    versions: Versions

    def open(self) -> Engine:
        """A new client, not attached."""
        ...

    async def live(self) -> bytes:
        """The fingerprint vector of the weights, summed now."""
        ...

    def anchor(self, version: int) -> list[str]:
        """Safetensors files of a whole version."""
        ...

    def damage(self, tensor: str) -> None:
        """Flip a bit of a canonical tensor in live memory, or in its file, behind the engine's back."""
        ...


def newest(subject: Subject) -> int:
    return len(subject.versions.values) - 1


def vector(subject: Subject, version: int) -> bytes:
    return subject.versions.vector(version).astype("<u8").tobytes()


def transaction(subject: Subject, *versions: int) -> Transaction:
    return subject.versions.transaction(*versions, name=f"contract-{next(_number)}")


@asynccontextmanager
async def proved(subject: Subject, version: int | None = None) -> AsyncIterator[Engine]:
    """The present owner of an engine that serves the newest version, or the one given."""
    engine, version = subject.open(), newest(subject) if version is None else version
    await engine.attach(subject.versions.facts())
    await engine.prove(version, subject.versions.vector_file(version), f"v{version}")
    await engine.serve()
    yield engine
    await engine.close()


async def test_attach_sums_the_live_weights_and_raises_the_token(subject: Subject) -> None:
    one, two = subject.open(), subject.open()
    first = await one.attach(subject.versions.facts())
    second = await two.attach(subject.versions.facts())
    assert second.token > first.token
    assert second.adopted is None
    assert len(second.classes) == len(subject.versions.layout)
    exact = np.array([kind is TensorClass.EXACT for kind in second.classes])
    found, wanted = np.frombuffer(second.vector, "<u8"), subject.versions.vector(newest(subject))
    assert exact.any()
    assert np.array_equal(found[exact], wanted[exact])
    assert not found[~exact].any()
    await one.close()
    await two.close()


async def test_only_the_version_that_is_live_is_proved(subject: Subject) -> None:
    version = newest(subject)
    fresh = subject.versions.step()
    async with proved(subject, version) as engine:
        with pytest.raises(EngineRefused):
            await engine.prove(fresh, subject.versions.vector_file(fresh), "wrong")
        status = await engine.status()
        assert (status.version, status.serving) == (version, True)
        txn = transaction(subject, fresh)
        await engine.prepare(txn)
        assert (await engine.swap(txn.id)).version == fresh


async def test_prepare_writes_nothing_and_swap_commits_once(subject: Subject) -> None:
    async with proved(subject) as engine:
        base = newest(subject)
        txn = transaction(subject, subject.versions.step())
        prepared = await engine.prepare(txn)
        assert (prepared.txn, prepared.fits) == (txn.id, 1)
        assert prepared.changed > 0
        status = await engine.status()
        assert (status.version, status.prepared, status.begun) == (base, txn.id, None)
        swapped = await engine.swap(txn.id)
        assert (swapped.verdict, swapped.version, swapped.serving) == (Verdict.COMMITTED, base + 1, True)
        assert swapped.tries == 1
        assert swapped.pause > 0
        assert await engine.outcome(txn.id) == swapped
        assert await engine.swap(txn.id) == swapped
        status = await engine.status()
        assert (status.version, status.prepared, status.serving) == (base + 1, None, True)
    assert await subject.live() == vector(subject, base + 1)


async def test_versions_are_composed_and_every_one_of_them_counts(subject: Subject) -> None:
    async with proved(subject) as engine:
        base = newest(subject)
        subject.versions.step(0.01)
        subject.versions.put(subject.versions.values[-1])
        subject.versions.step(0.01)
        txn = transaction(subject, base + 1, base + 2, base + 3)
        assert (await engine.prepare(txn)).fits == 3
        assert (await engine.swap(txn.id)).version == base + 3
    assert await subject.live() == vector(subject, base + 3)


async def test_a_version_without_changes_moves_the_version(subject: Subject) -> None:
    async with proved(subject) as engine:
        fresh = subject.versions.put(subject.versions.values[-1])
        txn = transaction(subject, fresh)
        assert (await engine.prepare(txn)).changed == 0
        assert (await engine.swap(txn.id)).version == fresh


async def test_a_dropped_or_replaced_transaction_cannot_be_swapped(subject: Subject) -> None:
    async with proved(subject) as engine:
        base, fresh = newest(subject), subject.versions.step()
        one, two = transaction(subject, fresh), transaction(subject, fresh)
        await engine.prepare(one)
        await engine.prepare(two)
        with pytest.raises(EngineRefused):
            await engine.swap(one.id)
        await engine.drop()
        with pytest.raises(EngineRefused):
            await engine.swap(two.id)
        assert (await engine.status()).version == base
        await engine.prepare(one)
        assert (await engine.swap(one.id)).version == fresh


async def test_the_next_owner_finds_nothing_prepared_and_the_earlier_one_is_fenced(subject: Subject) -> None:
    async with proved(subject) as first:
        base, fresh = newest(subject), subject.versions.step()
        txn = transaction(subject, fresh)
        await first.prepare(txn)
        async with proved(subject, base) as second:
            assert (await second.status()).prepared is None
            with pytest.raises(EngineRefused):
                await second.swap(txn.id)
            vector_file = subject.versions.vector_file(fresh)
            for call in (
                first.swap(txn.id),
                first.prepare(txn),
                first.serve(),
                first.drop(),
                first.finish_adopted(txn.id),
                first.prove(base, subject.versions.vector_file(base), "x"),
                first.load(fresh, [], vector_file, "x"),
                first.scrub(0),
                first.attach(subject.versions.facts()),
                first.status(),
            ):
                with pytest.raises(Fenced):
                    await call
            await second.prepare(txn)
            assert (await second.swap(txn.id)).version == fresh


async def test_a_change_from_another_base_is_refused(subject: Subject) -> None:
    async with proved(subject) as engine:
        base = newest(subject)
        one, two = subject.versions.step(), subject.versions.step()
        with pytest.raises(EngineRefused):
            await engine.prepare(transaction(subject, two))
        hop = msgspec.structs.replace(subject.versions.hop(two), base=base, version=one)
        with pytest.raises((EngineRefused, Corrupt)):
            await engine.prepare(Transaction(id="lie", hops=[hop], label="lie"))
        assert (await engine.status()).version == base
        both = transaction(subject, one, two)
        await engine.prepare(both)
        await engine.swap(both.id)
    assert await subject.live() == vector(subject, two)


def _cut(body: bytes) -> bytes:
    return body[:-7]


def _flip(body: bytes) -> bytes:
    return body[:50] + bytes([body[50] ^ 8]) + body[51:]


def _empty(body: bytes) -> bytes:
    return b""


async def test_an_incomplete_or_damaged_set_of_chunks_is_refused_and_nothing_is_written(subject: Subject) -> None:
    async with proved(subject) as engine:
        base, fresh = newest(subject), subject.versions.step()
        hop = subject.versions.hop(fresh)
        lacking = msgspec.structs.replace(hop, chunks=hop.chunks[:-1])
        with pytest.raises((EngineRefused, Corrupt)):
            await engine.prepare(Transaction(id="lacking", hops=[lacking], label="x"))
        doubled = msgspec.structs.replace(hop, chunks=[*hop.chunks, hop.chunks[0]])
        with pytest.raises((EngineRefused, Corrupt)):
            await engine.prepare(Transaction(id="doubled", hops=[doubled], label="x"))
        for edit in (_cut, _flip, _empty):
            spoiled = subject.versions.hop(fresh, edit=edit)
            with pytest.raises((EngineRefused, Corrupt)):
                await engine.prepare(Transaction(id="spoiled", hops=[spoiled], label="x"))
        with pytest.raises(EngineRefused):
            await engine.swap("spoiled")
        status = await engine.status()
        assert (status.version, status.prepared, status.serving) == (base, None, True)
        txn = transaction(subject, fresh)
        await engine.prepare(txn)
        assert (await engine.swap(txn.id)).version == fresh
    assert await subject.live() == vector(subject, fresh)


async def test_a_whole_version_is_loaded_forward(subject: Subject) -> None:
    async with proved(subject) as engine:
        subject.versions.step(0.5)
        target = subject.versions.step(0.5)
        loaded = await engine.load(target, subject.anchor(target), subject.versions.vector_file(target), f"v{target}")
        assert (loaded.verdict, loaded.version) == (Verdict.COMMITTED, target)
        await engine.serve()
        txn = transaction(subject, subject.versions.step())
        await engine.prepare(txn)
        assert (await engine.swap(txn.id)).version == target + 1
    assert await subject.live() == vector(subject, target + 1)


async def test_what_was_never_begun_is_unknown_and_cannot_be_settled(subject: Subject) -> None:
    async with proved(subject) as engine:
        assert (await engine.outcome("never")).verdict is Verdict.UNKNOWN
        with pytest.raises(EngineRefused):
            await engine.finish_adopted("never")
        with pytest.raises(EngineRefused):
            await engine.swap("never")


async def scrub_all(engine: Engine) -> list[Scrubbed]:
    """A whole pass, however often it has to be gone on with."""
    legs = [await engine.scrub(0)]
    while (at := legs[-1].next) is not None:
        legs.append(await engine.scrub(0, at))
    return legs


async def test_a_clean_scrub_looks_at_everything_and_reports_nothing(subject: Subject) -> None:
    async with proved(subject) as engine:
        base = newest(subject)
        attached = await engine.attach(subject.versions.facts())
        await engine.prove(base, subject.versions.vector_file(base), f"v{base}")
        exact = [spec for spec, kind in zip(subject.versions.layout, attached.classes, strict=True) if kind == "exact"]
        legs = await scrub_all(engine)
        assert [leg.differing for leg in legs] == [[]] * len(legs)
        assert {leg.version for leg in legs} == {base}
        assert sum(leg.tensors for leg in legs) == len(exact)
        assert sum(leg.bytes for leg in legs) == sum(spec.nbytes for spec in exact)
        last = len(subject.versions.layout) - 1
        assert (await engine.scrub(0, last)).tensors <= 1
        assert (await engine.status()).version == base


async def test_a_scrub_needs_a_proved_version(subject: Subject) -> None:
    engine = subject.open()
    attached = await engine.attach(subject.versions.facts())
    if attached.version is None:
        with pytest.raises(EngineRefused):
            await engine.scrub(0)
    await engine.close()


async def test_a_bit_that_flips_is_found_named_and_stops_the_service_until_it_is_repaired(subject: Subject) -> None:
    async with proved(subject) as engine:
        base, fresh = newest(subject), subject.versions.step()
        tensor = subject.versions.layout[len(subject.versions.layout) // 2].name
        txn = transaction(subject, fresh)
        await engine.prepare(txn)
        subject.damage(tensor)
        found = [one for leg in await scrub_all(engine) for one in leg.differing]
        assert [one.tensor for one in found] == [tensor]
        status = await engine.status()
        assert (status.version, status.serving, status.prepared) == (None, False, None)
        for call in (engine.swap(txn.id), engine.prepare(txn), engine.serve(), engine.scrub(0)):
            with pytest.raises(EngineRefused):
                await call
        attached = await engine.attach(subject.versions.facts())
        assert (attached.version, attached.adopted) == (None, None)
        loaded = await engine.load(base, subject.anchor(base), subject.versions.vector_file(base), f"v{base}")
        assert (loaded.verdict, loaded.version) == (Verdict.COMMITTED, base)
        await engine.serve()
        assert [leg.differing for leg in await scrub_all(engine)] == [[]]
        await engine.prepare(txn)
        assert (await engine.swap(txn.id)).version == fresh
    assert await subject.live() == vector(subject, fresh)


async def test_a_scrub_is_not_in_the_way_of_a_prepare_and_goes_on_after_the_swap(subject: Subject) -> None:
    async with proved(subject) as engine:
        fresh = subject.versions.step()
        size = sum(spec.nbytes for spec in subject.versions.layout)
        slow = asyncio.create_task(engine.scrub(size / 600))  # ten minutes
        await asyncio.sleep(0.3)
        assert not slow.done()
        txn = transaction(subject, fresh)
        await engine.prepare(txn)
        interrupted = await slow
        assert interrupted.next is not None
        assert interrupted.differing == []
        assert (await engine.swap(txn.id)).version == fresh
        rest = await engine.scrub(0, interrupted.next)
        assert (rest.version, rest.next, rest.differing) == (fresh, None, [])


async def test_swaps_during_scrubs_give_no_false_alarm(subject: Subject) -> None:
    async with proved(subject) as engine:
        versions = [subject.versions.step() for _ in range(4)]
        stop = asyncio.Event()
        legs: list[Scrubbed] = []

        async def scrub() -> None:
            at = 0
            while not stop.is_set():
                legs.append(await engine.scrub(0, at))
                at = legs[-1].next or 0
                await asyncio.sleep(0.001)

        scrubbing = asyncio.create_task(scrub())
        for version in versions:
            await asyncio.sleep(0.02)
            txn = transaction(subject, version)
            await engine.prepare(txn)
            await asyncio.sleep(0.02)
            assert (await engine.swap(txn.id)).version == version
        await asyncio.sleep(0.02)
        stop.set()
        await scrubbing
        assert legs
        assert [leg.differing for leg in legs] == [[]] * len(legs)
        status = await engine.status()
        assert (status.version, status.serving) == (versions[-1], True)


async def test_an_owner_that_was_fenced_learns_it_from_status_alone(subject: Subject) -> None:
    async with proved(subject) as first:
        assert (await first.status()).serving
        second = subject.open()
        await second.attach(subject.versions.facts())
        with pytest.raises(Fenced):
            await first.status()
        await second.status()
        await second.close()
