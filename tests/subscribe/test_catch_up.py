"""A reader that is many versions behind fetches them side by side: what it waits for are bytes, not round trips."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from support.events import RecordedEvents
from support.measure.round_trips import RoundTrips

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.errors import Corrupt, ResourceExhausted
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.objects import Objects
from dcr_daemon.ledger.routes import Routes
from dcr_daemon.runtime import Workers
from dcr_daemon.subscribe.fetch import stage as stage_module
from dcr_daemon.subscribe.fetch.loader_computed import LoaderComputed
from dcr_daemon.subscribe.fetch.stage import Stage
from dcr_daemon.subscribe.materialize import materialize

HOPS = 48
START = 26  #: round trips of a cold reader before it knows where the tail is: a search, and a look above it


class Behind:
    """A reader of a stream, `HOPS` versions behind, that has read nothing but the ledger's tail."""

    def __init__(self, stream, store, tmp_path: Path) -> None:
        self.stream, self.store, self.home = stream, store, tmp_path
        self.ledger, self.workers = Ledger(store), Workers(2)
        self.objects = Objects(store, floor=lambda: 0, patience=0)

    @property
    def layout(self) -> Layout:
        return self.stream.versions.layout

    def stage(self, limit: int = 1 << 30) -> Stage:
        return Stage(
            self.home / "staging",
            limit=limit,
            objects=self.objects,
            stream=self.ledger.stream,
            layout=self.layout,
            workers=self.workers,
            emit=RecordedEvents(),
        )


@pytest.fixture
def behind(make_stream, tmp_path):
    async def make(count: int = HOPS) -> Behind:
        stream = await make_stream(count)
        await stream.publish(*range(1, count + 1))
        reader = Behind(stream, RoundTrips(stream.store), tmp_path)
        await reader.ledger.read()
        return reader

    return make


async def test_the_versions_of_a_catch_up_are_staged_in_order_and_fetched_side_by_side(behind):
    reader = await behind()
    before = reader.store.trips
    seals = await reader.ledger.history.between(1)
    assert [seal.version for seal in seals] == list(range(1, HOPS + 1))
    assert reader.store.trips - before <= HOPS // 4, "seals"
    before = reader.store.trips
    deltas = await reader.stage().stage_deltas(seals, reader.ledger.stream)
    assert reader.store.trips - before <= HOPS // 2, "parts, vectors and chunks were four round trips a version"
    assert [(delta.base, delta.version) for delta in deltas] == [(n, n + 1) for n in range(HOPS)]
    assert [delta.before for delta in deltas[1:]] == [delta.after for delta in deltas[:-1]]
    assert reader.store.asked("fingerprint") == HOPS + 1, "each vector once"


async def test_a_checkpoint_is_built_in_few_round_trips(behind, tmp_path):
    reader = await behind()
    base = reader.stream.versions.save(tmp_path / "base", 0)
    store = RoundTrips(reader.stream.store)
    await materialize(store, out=tmp_path / "out", base=base)
    assert reader.stream.versions.version_of(tmp_path / "out") == HOPS
    assert store.trips <= START + HOPS


async def test_the_tensors_that_a_loader_computes_with_are_rebuilt_in_few_round_trips(behind, tmp_path):
    reader = await behind()
    computed = LoaderComputed(
        tmp_path,
        ledger=reader.ledger,
        objects=reader.objects,
        layout=reader.layout,
        base=None,
        workers=reader.workers,
        emit=RecordedEvents(),
    )
    values = {0: reader.stream.versions.values[0][reader.layout[0].name].reshape(-1).copy()}
    routes = Routes(reader.ledger.history, HOPS, base=0)
    before = reader.store.trips
    await computed._apply_chain(values, range(1, HOPS + 1), routes)
    assert (values[0] == reader.stream.versions.values[HOPS][reader.layout[0].name].reshape(-1)).all()
    assert reader.store.trips - before <= HOPS // 2


async def test_versions_before_a_damaged_one_are_staged_and_the_next_call_meets_it(behind):
    reader = await behind(6)
    seals = await reader.ledger.history.between(1)
    chunk = (await reader.objects.read_parts(seals[3]))[0].chunks[0]
    path = reader.stream.home / chunk.key
    path.chmod(0o600)
    path.write_bytes(bytes(chunk.size))
    stage = reader.stage()
    deltas = await stage.stage_deltas(seals, reader.ledger.stream)
    assert [delta.version for delta in deltas] == [1, 2, 3]
    assert all(map(stage.has, map(Path, (path for delta in deltas for path in delta.chunks))))
    with pytest.raises(Corrupt):
        await stage.stage_deltas(seals[3:], seals[2])


@pytest.mark.parametrize("fitting", [1, 2, 5])
async def test_as_many_versions_are_staged_as_fit(behind, fitting):
    reader = await behind(6)
    seals = await reader.ledger.history.between(1)
    stage = reader.stage(limit=sum(seal.bytes for seal in seals[:fitting]))
    deltas = await stage.stage_deltas(seals, reader.ledger.stream)
    assert [delta.version for delta in deltas] == list(range(1, fitting + 1))
    assert stage.used <= stage.limit
    stage.forget_up_to(fitting)
    assert stage.used == 0
    assert [delta.version for delta in await stage.stage_deltas(seals[fitting:], seals[fitting - 1])][:1] == [
        fitting + 1
    ]


async def test_what_is_prefetched_meanwhile_takes_no_room_of_a_sealed_version(behind, monkeypatch):
    """Room was made when a version's turn came, and a prefetch took it before the version's chunks were fetched."""
    monkeypatch.setattr(stage_module, "CONCURRENCY", 1)
    reader = await behind(2)
    seals = await reader.ledger.history.between(1)
    stage = reader.stage(limit=sum(seal.bytes for seal in seals))
    right, path = reader.objects.read_chunk, stage.attempt_path(99, 99) / "0.dcr"

    async def read_chunk(chunk, version, **more):
        if room := stage.limit - stage.used:
            with contextlib.suppress(ResourceExhausted):  # its room was needed
                async with stage.fetching(path, room) as keep:
                    await stage.write_chunk(path, bytes(room), keep)
        return await right(chunk, version, **more)

    monkeypatch.setattr(reader.objects, "read_chunk", read_chunk)
    deltas = await stage.stage_deltas(seals, reader.ledger.stream)
    assert [delta.version for delta in deltas] == [1, 2]
    assert not stage.has(path)
