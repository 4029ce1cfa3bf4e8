"""A few rounds of the soak, and that it finds what is planted."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from soak.checks import check
from soak.daemons import Failed
from soak.faults import TakeOver
from soak.files import Wiped, flip
from soak.links import other_time
from soak.results import MARKS, Soaked, read_results, report, table
from soak.rounds import FOR_ROOT, KINDS, draw_rounds, play, soak
from soak.run import MODULES
from soak.world import World
from support.faults.sampling import COMMIT
from support.processes.fork_server import ForkServer
from support.stores.faulty_proxy import BadNetwork, Planned
from support.stores.faulty_proxy import Fault as Answer
from support.stores.seaweed import SeaweedProcess, set_environment

from dcr_daemon.store import open_store

pytestmark = [pytest.mark.crash, pytest.mark.seaweed]
SEED = int(COMMIT, 16) if COMMIT != "released" else 0


@pytest.fixture(scope="module")
def trainer_server() -> Iterator[ForkServer]:
    server = ForkServer(*MODULES)
    yield server
    server.close()


@pytest.fixture
def places(
    own_seaweed: SeaweedProcess, trainer_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    set_environment(monkeypatch, own_seaweed.server)
    yield {"home": tmp_path / "soak", "weed": own_seaweed, "fork_server": trainer_server}
    trainer_server.end()


async def test_rounds_that_each_commit_draws_anew(places: dict[str, Any]) -> None:
    done = await soak(SEED, draw_rounds(SEED, 2), **places)
    assert not done.failure, f"python tests/soak/run.py --seed {SEED} --rounds 2: {done.failure}"
    assert done.rounds == 2
    assert done.compared >= 2


def flipped(world: World) -> None:
    world.replicas[1].stop()  # else it notices, and repairs the directory
    flip(next(world.replicas[1].directory.glob("*.safetensors")), 0.5)


def unlike_the_trainer(world: World) -> None:
    world.bits(world.head)["head.weight"][7] ^= 1


def served_before(world: World) -> None:
    with world.replicas[0].events.open("a") as events:
        events.write(json.dumps({"type": "Serving", "version": 0}) + "\n")
    world.look()


def ended_by_nobody(world: World) -> None:
    world.replicas[2]._send(signal.SIGABRT)


def published_twice(world: World) -> None:
    world.truth.values.append(world.truth.values[1])
    shutil.copytree(world.stream.watch / "step_1", world.stream.watch / "step_999", copy_function=shutil.copyfile)


PLANTED: dict[Callable[[World], None], str] = {
    flipped: "r2 at version",
    unlike_the_trainer: "materialised, has other bits in head.weight",
    served_before: "and then version 0",
    ended_by_nobody: f"r3 ended with -{int(signal.SIGABRT)}",
    published_twice: "steps",
}


async def test_what_is_planted_is_found(places: dict[str, Any]) -> None:
    """One world, to which one wrong after the other is done, and taken back."""
    async with World(places.pop("home"), **places, seed=3, anchor_every=1, keep=9) as world:
        world.write()
        await world.settle()
        await check(world)
        for plant, words in PLANTED.items():
            found = ""
            try:
                await find(world, plant)
            except Failed as error:
                found = str(error)
            assert words in found, f"{plant.__name__} is not found"


async def find(world: World, plant: Callable[[World], None]) -> None:
    """Look for what was planted, as a round does, and undo it."""
    truth = {name: bits.copy() for name, bits in world.truth.values[1].items()}
    try:
        plant(world)
        await asyncio.sleep(1)
        world.look()
        await check(world)
    finally:
        world.truth.values[1] = truth
        world.replicas[1].resume()
        await world.within(20.0, lambda: world.truth.version_of(world.replicas[1].directory))


async def test_faults_of_every_kind_are_drawn_and_take_overs_are_played(places: dict[str, Any]) -> None:
    drawn = {type(fault) for seed in range(40) for round_ in draw_rounds(seed, 8) for fault in round_.faults}
    assert drawn >= set(KINDS) - FOR_ROOT
    (round_,) = draw_rounds(5, 1, {TakeOver: 1})
    async with World(places.pop("home"), **places, seed=4, anchor_every=2, keep=3) as world:
        await play(world, round_)
        assert world.holder is world.library
        (round_,) = draw_rounds(6, 1, {Wiped: 1})
        await play(world, round_)
        assert all(fault.struck for fault in round_.faults)
        await world.stop()


async def test_a_planned_fault_befalls_the_requests_that_it_names(places: dict[str, Any]) -> None:
    url, calls = places["weed"].server.stream(), list[str]()
    async with BadNetwork(places["weed"].server.endpoint_url) as network:
        store = await open_store(url, endpoint_url=network.url)
        for key in ("data/1", "data/2"):
            await store.create(key, b"0123456789")

        def of(key: str) -> Callable[[str, str], bool]:
            return lambda method, path: method == "GET" and path.endswith(key)

        network.plan(Planned(matches=of("data/1"), nth=2, edit=lambda body: b"x" + body[1:]))
        lost = Planned(matches=of("data/2"), fault=Answer.RESET_AFTER, after=lambda: calls.append("answered"))
        network.plan(lost)
        read = [await store.get("data/1", limit=100) for _ in range(3)]
        assert read == [b"0123456789", b"x123456789", b"0123456789"]
        assert not lost.met
        assert await store.get("data/2", limit=100) == b"0123456789", "the request is repeated"
        assert lost.met
        assert calls == ["answered"]
        network.clear()
        await store.close()


def test_a_record_with_another_time_is_a_record() -> None:
    body = b'{"kind":"seal","at":"2026-11-30T09:59:59Z","seq":7}'
    for where in (0.0, 0.5, 0.99):
        changed = other_time(body, where)
        assert sum(a != b for a, b in zip(body, changed, strict=True)) == 1
        assert json.loads(changed) | {"at": ""} == json.loads(body) | {"at": ""}


def test_results_add_up(tmp_path: Path) -> None:
    one = Soaked(1, "c1", versions=20, compared=50, restarts=3)
    one.played(2.0, ["full disk", "take-over"])
    one.played(4.0, ["full disk"])
    other = Soaked(2, "c2", versions=10, compared=7, failure="round 2: it was so")
    other.played(3.0, [])
    (tmp_path / "results").write_text("".join(json.dumps(asdict(done)) + "\n" for done in (one, other)))
    done = read_results(tmp_path / "results")
    assert done == [one, other]
    said = report(done)
    assert "3 rounds, 1 failed, 3 faults, 30 versions, 57 comparisons, 3 restarts" in said
    assert "struck: full disk 2, take-over 1" in said
    assert "median 3.0, most 4.0" in said
    text = table(done)
    assert "3 rounds passed, 1 failed" in text
    assert "c1 (2), c2 (1)" in text
    assert text.index("| full disk | 2 |") < text.index("| take-over | 1 |")
    page = (Path(__file__).parents[2] / "docs" / "PROTOCOL.md").read_text()
    assert page.index(MARKS[0]) < page.index(MARKS[1])
