"""A subscriber over the real engine core: restarts, damage, torn changes, other owners, and what it says about them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.events import RecordedEvents
from support.streams.replica import Replica
from support.streams.writer import StreamWriter
from support.vllm.toy_engine import failing
from support.vllm.toy_model import placed
from support.vllm.toy_server import ToyServer, toy_stream

from dcr_daemon.engine.port import EngineUnsupported, StreamFacts
from dcr_daemon.errors import Fenced, ResourceExhausted
from dcr_daemon.events import (
    Alarm,
    Blocked,
    ChunkFetched,
    Committed,
    Damaged,
    EngineLost,
    Event,
    Loading,
    Paused,
    Prepared,
    Repaired,
    RolledBack,
    ScrubEnded,
    Serving,
    StoreRequest,
    Unsupported,
)
from dcr_daemon.ledger import names
from dcr_daemon.observe.health import Health
from dcr_daemon.vllm_plugin.loader import place_model


class Watched(RecordedEvents):
    """Events that a probe listens to as well."""

    def __init__(self, health: Health) -> None:
        super().__init__()
        self.health = health

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        self.health(event)


class Live(Replica):
    """A replica whose engine is a toy server; `health` is what its probes say."""

    def __init__(self, stream: StreamWriter, server: ToyServer, home: Path) -> None:
        super().__init__(stream.url, home, home / "unused")
        self.stream, self.server, self.health = stream, server, Health("subscriber")
        self.events = Watched(self.health)

    async def run(self, engine: object = None, **options: object) -> None:
        self.events.health = self.health = Health("subscriber")
        await super().run(self.server.client(), **options)

    async def until(self, condition: Callable[[], object], task: asyncio.Task[None], seconds: float = 8) -> None:
        try:
            await super().until(condition, task, seconds)
        except TimeoutError:
            last = [event for event in self.events if not isinstance(event, StoreRequest | ChunkFetched)]
            raise AssertionError(f"{self.health.status}; last: {last[-12:]}; {self.server.asked[-12:]}") from None

    def serves(self, version: int) -> Callable[[], bool]:
        return lambda: self.health.ready and self.server.running and self.server.proved == version


@pytest.fixture
def make_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Awaitable[Live]]:
    def attach(model: Any, config: Any, layout: Any, platform: str) -> Any:
        placement, homes = placed(model)
        return placement, homes.live

    monkeypatch.setattr(place_model, "attach_model", attach)  # vLLM's loader is another test's

    async def make(count: int = 0, *, at: int | None = 0, **options: Any) -> Live:
        stream = await toy_stream(tmp_path / "toy", count)
        server = ToyServer(tmp_path / "toy", stream.versions, **options)
        if at is not None:
            server.start(at)
        home = tmp_path / "replica"
        home.mkdir()
        return Live(stream, server, home)

    return make


def unknown(server: ToyServer) -> list[np.ndarray]:
    """Weights of no version."""
    lanes = [bits.copy() for bits in server.versions.lanes(0)]
    lanes[0][3] ^= 1
    return lanes


async def test_it_follows_version_after_version_and_ends_leaving_the_engine_serving(make_live):
    live = await make_live(3)
    async with live.running() as task:
        await live.until(live.serves(0), task)
        await live.stream.publish(1)
        await live.until(live.serves(1), task)
        await live.stream.publish(2, 3)
        await live.until(live.serves(3), task)
    assert live.server.running
    assert live.server.holds(3)


# -- the engine restarts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 1, 3, "unknown"])
async def test_an_engine_that_comes_back_with_any_weights_is_noticed_and_brought_to_the_head(make_live, start):
    live = await make_live(3)
    await live.stream.publish(1)
    await live.stream.anchor(1)
    await live.stream.publish(2, 3)
    async with live.running() as task:
        await live.until(live.serves(3), task)
        live.server.start(unknown(live.server) if start == "unknown" else start)
        await live.until(lambda: live.events.of(EngineLost), task)
        assert not live.health.ready
        await live.until(live.serves(3), task)
    assert "restarted" in live.events.of(EngineLost)[0].reason
    assert live.server.holds(3)
    assert bool(live.events.of(Repaired)) == (start == "unknown")


async def test_an_engine_that_is_away_for_long_is_found_within_a_heartbeat_of_its_return(make_live):
    live = await make_live(1, at=None)
    await live.stream.publish(1)
    async with live.running() as task:
        await live.until(lambda: live.server.asked.count("attach") > 20, task)  # never rarer than a heartbeat
        assert len(live.events.of(EngineLost)) == 1
        live.server.start(0)
        await live.until(live.serves(1), task)


async def test_weights_that_nobody_knows_are_refused_with_the_reason_until_there_is_an_anchor(make_live):
    live = await make_live(2, at=None)
    live.server.start(unknown(live.server))
    await live.stream.publish(1)
    async with live.running() as task:
        await live.until(lambda: live.events.of(Blocked), task)
        attached = live.server.asked.count("attach")
        await live.stream.publish(2)
        await asyncio.sleep(0.5)
        assert live.server.asked.count("attach") == attached  # nothing about the engine has changed: it is left alone
        assert "of no version of this stream" in live.health.status
        assert "--base" in live.health.status
        assert not live.health.ready
        assert not live.server.running
        await live.stream.anchor(2)
        await live.until(live.serves(2), task)
    assert len(live.events.of(Blocked)) == 1 or live.events.of(Blocked)[-1].reason != live.events.of(Blocked)[0].reason
    assert live.server.holds(2)


async def test_the_base_and_the_whole_chain_repair_an_engine_where_there_is_no_anchor(make_live, tmp_path):
    live = await make_live(2, at=None)
    live.server.start(unknown(live.server))
    await live.stream.publish(1, 2)
    base = live.stream.versions.save(tmp_path / "base", 0)
    async with live.running(base=base) as task:
        await live.until(live.serves(2), task)
    assert [event.version for event in live.events.of(Loading)] == [0]
    assert [event.version for event in live.events.of(Serving)] == [2]  # version 0 was loaded and never served
    assert live.server.holds(2)


@pytest.mark.parametrize("call", ["prepare", "load"])
async def test_what_an_engine_dies_of_is_not_asked_of_it_again_and_again(make_live, call):
    live = await make_live(2)
    await live.stream.publish(1)
    if call == "load":
        await live.stream.anchor(1)
        live.server.start(unknown(live.server))
    live.server.deaths = [call] * 50
    async with live.running() as task:
        for lives in range(1, 3):
            await live.until(lambda n=lives: live.server.deaths.count(call) == 50 - n, task)
            live.server.start(unknown(live.server) if call == "load" else 0)
        await live.until(lambda: live.events.of(Blocked), task)
        await asyncio.sleep(0.3)
        assert live.server.deaths.count(call) == 48
        live.server.deaths = []
        await live.stream.publish(2)
        await live.stream.anchor(2)
        await live.until(live.serves(2), task)
    assert live.server.holds(2)


# -- changes that are torn ------------------------------------------------------------------------------------------


def break_op(server: ToyServer, op: str, times: int, *, rank: int = 1) -> list[str]:
    """The answers of one rank to `op` are failures, this often."""
    left = ["x"] * times

    def edit(number: int, call: dict[str, Any], reply: Any) -> Any:
        if number == rank and call["op"] == op and left:
            left.pop()
            return failing(reply)
        return reply

    server.engine.wire.edit = edit
    return left


async def test_an_apply_that_fails_once_is_repeated(make_live):
    live = await make_live(1)
    async with live.running() as task:
        await live.until(live.serves(0), task)
        left = break_op(live.server, "apply", 1)
        await live.stream.publish(1)
        await live.until(live.serves(1), task)
        assert not left
    assert live.server.holds(1)
    assert not live.events.of(RolledBack)


async def test_an_apply_that_fails_for_good_is_rolled_back_served_and_tried_again(make_live):
    live = await make_live(1)
    async with live.running() as task:
        await live.until(live.serves(0), task)
        break_op(live.server, "apply", 2)
        await live.stream.publish(1)
        await live.until(lambda: live.events.of(RolledBack), task)
        await live.until(live.serves(1), task)
    assert live.server.holds(1)
    assert not [event for event in live.events.of(Alarm) if event.must == "P4"]


async def test_a_commit_that_a_rank_does_not_confirm_is_not_served_until_an_attach_has_proved_it(make_live):
    live = await make_live(1)
    async with live.running() as task:
        await live.until(live.serves(0), task)
        break_op(live.server, "commit", 3)  # the swap tries it twice; the settle that follows once more
        await live.stream.publish(1)
        await live.until(lambda: live.events.of(EngineLost), task)
        assert not live.health.ready
        await live.until(live.serves(1), task)
    assert live.server.holds(1)
    assert live.server.asked.count("swap") == 1


@pytest.mark.parametrize("call", ["prepare", "swap", "prove", "serve"])
async def test_an_answer_that_is_lost_changes_nothing(make_live, call):
    """The call runs on inside the server; the client hears nothing."""
    live = await make_live(2)
    server, right = live.server, live.server.call
    lost: list[str] = []

    async def call_and_lose(body: bytes) -> bytes:
        from dcr_daemon.engine import messages

        answer = await right(body)
        if type(messages.decode_call(body)).__name__.lower() == call and not lost:
            lost.append(call)
            raise ConnectionResetError("the answer is lost")
        return answer

    server.call = call_and_lose
    async with live.running() as task:
        await live.stream.publish(1)
        await live.until(live.serves(1), task)
        await live.stream.publish(2)
        await live.until(live.serves(2), task)
        await live.until(lambda: lost, task)
    assert server.holds(2)
    assert sorted({event.version for event in live.events.of(Committed)}) == [1, 2]


# -- the subscriber dies at any call --------------------------------------------------------------------------------


class Cut:
    """Cancels a task at the n-th request to the engine or the store: before it, or once it has taken effect."""

    def __init__(self, n: int, *, after: bool) -> None:
        self.left, self.after = n, after
        self.task: asyncio.Task[None] | None = None
        self.passed = 0

    async def around(self, work: Callable[[], Any]) -> Any:
        self.left -= 1
        self.passed += 1
        if self.left == 0 and not self.after:
            self.task.cancel()
            await asyncio.sleep(0)
        result = await work()
        if self.left == 0:
            self.task.cancel()
            await asyncio.sleep(0)
        return result


async def cut_run(live: Live, n: int, *, after: bool, **options: Any) -> Cut:
    """Run until the cut, which may not come if the work is done before; the state directory is what remains."""
    cut, right = Cut(n, after=after), live.server.call
    live.server.call = lambda body: cut.around(lambda: right(body))
    cut.task = asyncio.ensure_future(live.run(once=True, **options))
    try:
        await asyncio.wait([cut.task])
    finally:
        live.server.call = right
    if not cut.task.cancelled():
        cut.task.result()
    return cut


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("start", ["base", "unknown"])
async def test_a_subscriber_that_dies_at_any_call_is_followed_by_one_that_goes_on(make_live, start, after):
    live = await make_live(2)
    await live.stream.publish(1)
    await live.stream.anchor(1)
    await live.stream.publish(2)
    for n in range(1, 40):
        live.server.start(0 if start == "base" else unknown(live.server))
        cut = await cut_run(live, n, after=after)
        if live.server.running:
            assert live.server.holds(live.server.proved)
        await live.once()
        assert live.server.running
        assert live.server.proved == 2
        assert live.server.holds(2)
        if not cut.task.cancelled():
            break
    assert n > 5
    assert not cut.task.cancelled()


async def test_a_change_left_begun_by_a_dead_subscriber_is_ended_by_the_next(make_live):
    live = await make_live(1)
    await live.once()
    break_op(live.server, "commit", 2)
    await live.stream.publish(1)
    task = asyncio.ensure_future(live.run())
    await live.until(lambda: live.server.engine.core.state.begun, task)
    task.cancel()
    await asyncio.wait([task])
    await live.once()
    assert live.server.running
    assert live.server.holds(1)


# -- scrub ----------------------------------------------------------------------------------------------------------

OFTEN = {"scrub_every": 0.05, "scrub_rate": 0}


async def test_damage_is_found_named_and_repaired_by_an_anchor(make_live):
    live = await make_live(2)
    await live.stream.publish(1)
    await live.stream.anchor(1)
    await live.stream.publish(2)
    async with live.running(**OFTEN) as task:
        await live.until(live.serves(2), task)
        await live.until(lambda: live.events.of(ScrubEnded), task)
        live.server.engine.workers[1].flip("o")
        await live.until(lambda: live.events.of(Damaged), task)
        assert not live.health.ready
        await live.until(live.serves(2), task)
    (damaged,) = live.events.of(Damaged)
    assert damaged.tensors == ["o"]
    assert "rank 1" in damaged.what
    assert [event.must for event in live.events.of(Alarm)] == ["F1"]
    assert live.server.holds(2)
    status = json.loads(await live.stream.store.get(names.replica("r1"), limit=10_000))
    assert status["scrubbed_at"]


async def test_a_copy_that_differs_from_its_owner_is_damage_too(make_live):
    live = await make_live(1)
    await live.stream.publish(1)
    await live.stream.anchor(1)
    async with live.running(**OFTEN) as task:
        await live.until(live.serves(1), task)
        live.server.engine.workers[1].flip("norm")
        await live.until(lambda: live.events.of(Damaged), task)
        await live.until(live.serves(1), task)
    assert "copy differs" in live.events.of(Damaged)[0].what
    assert live.server.holds(1)


async def test_damage_that_nothing_repairs_is_not_served_and_says_what_to_do(make_live):
    live = await make_live(2)
    await live.stream.publish(1)
    async with live.running(**OFTEN) as task:
        await live.until(live.serves(1), task)
        live.server.engine.workers[0].flip("scale")
        await live.until(lambda: live.events.of(Blocked), task)
        assert not live.server.running
        assert "--anchor-every 1" in live.health.status
        await live.stream.publish(2)
        await live.stream.anchor(2)
        await live.until(live.serves(2), task)
    assert live.server.holds(2)


async def test_a_scrub_holds_up_no_version(make_live):
    """At a byte a second a pass would take hours: every version goes past it, and each makes it faster."""
    live = await make_live(6)
    async with live.running(scrub_every=0.02, scrub_rate=1) as task:
        for version in range(7):
            if version:
                await live.stream.publish(version)
            await live.until(live.serves(version), task)
            await live.until(lambda v=version: live.server.asked.count("scrub") > v, task)
    assert live.server.holds(6)
    assert not live.events.of(Alarm)


# -- others ---------------------------------------------------------------------------------------------------------


async def test_an_idle_subscriber_that_is_fenced_learns_it_and_says_so(make_live):
    live = await make_live(0)
    path = live.server.home / "layout.json"
    async with live.running() as task:
        await live.until(live.serves(0), task)
        stream = live.stream.versions.stream
        digest = live.stream.versions.layout.digest
        await live.server.client().attach(StreamFacts(stream=stream, layout=str(path), layout_digest=digest))
        with pytest.raises(Fenced):
            await asyncio.wait_for(task, 30)
    assert not live.health.ready
    assert live.health.status.startswith("fenced")
    status = json.loads(await live.stream.store.get(names.replica("r1"), limit=10_000))
    assert (status["state"], status["serving"]) == ("fenced", False)


async def test_an_engine_that_somebody_else_paused_is_updated_and_left_paused(make_live):
    live = await make_live(2)
    async with live.running() as task:
        await live.until(live.serves(0), task)
        live.server.engine.host.pause()
        await live.until(lambda: live.events.of(Paused), task)
        assert not live.health.ready
        await live.stream.publish(1)
        await live.until(lambda: live.server.proved == 1, task)
        await asyncio.sleep(0.2)
        assert not live.server.running
        live.server.engine.host.resume()
        await live.until(live.serves(1), task)
    assert live.server.holds(1)


async def test_weights_that_somebody_else_writes_end_the_proof_and_are_repaired(make_live):
    live = await make_live(2)
    await live.stream.publish(1)
    await live.stream.anchor(1)
    async with live.running() as task:
        await live.until(live.serves(1), task)
        worker = live.server.engine.workers[0]
        worker.reload_weights()
        worker.flip("o")
        await live.stream.publish(2)  # it is refused: nobody knows what it would be written upon
        await live.until(lambda: live.events.of(Repaired), task)
        await live.until(live.serves(2), task)
    assert live.server.holds(2)


async def test_a_version_over_the_cap_says_what_to_raise_and_is_gone_round(make_live):
    live = await make_live(2, cap=300)
    await live.stream.publish(1)
    async with live.running() as task:
        await live.until(lambda: live.events.of(Blocked), task)
        assert "DCR_STAGE_CAP" in live.events.of(Blocked)[0].reason
        assert not live.events.of(Prepared)
        await live.stream.anchor(1)
        await live.until(live.serves(1), task)
    assert live.server.holds(1)
    assert not [event for event in live.events.of(Alarm) if event.must == "P4"]


async def test_once_a_version_over_the_cap_is_the_error(make_live):
    live = await make_live(1, cap=300)
    await live.stream.publish(1)
    with pytest.raises(ResourceExhausted, match="version 1 alone needs more"):
        await live.once()


async def test_a_replica_never_serves_less_than_it_has_served(make_live):
    """The pod restarts with an older checkpoint, and what leads on from it is gone."""
    live = await make_live(2)
    await live.stream.publish(1, 2)
    await live.once()
    live.server.start(1)
    for chunk in (live.stream.home / "data" / "2").rglob("*.dcr"):
        chunk.unlink()
    async with live.running(patience=0.05) as task:
        await live.until(lambda: live.events.of(Blocked), task)
        await asyncio.sleep(0.2)
        assert not live.server.running
        assert not live.health.ready
    await live.once(pin=1)  # an operator says so
    assert live.server.running
    live.server.start(1)
    async with live.running(patience=0.05) as task:
        await live.until(lambda: live.events.of(Blocked), task)
        await live.stream.anchor(2)
        await live.until(live.serves(2), task)


def refuse(server: ToyServer, reason: str) -> None:
    """Every attach of the present engine process is refused for a reason that no retry changes."""
    assert server.engine is not None

    def edit(rank: int, call: dict[str, Any], reply: dict[str, Any]) -> Any:
        return {**reply, "result": {**reply["result"], "refusals": {"": reason}}} if call["op"] == "attach" else reply

    server.engine.wire.edit = edit


async def test_an_engine_that_can_never_be_served_is_seldom_asked_and_says_why(make_live):
    live = await make_live(1)
    refuse(live.server, "sleep mode unmaps weights")
    async with live.running() as task:
        await live.until(lambda: live.server.asked.count("status") > 5, task)  # it looks whether another one has come
        assert live.server.asked.count("attach") == 1
        (told,) = live.events.of(Unsupported)
        assert "sleep mode unmaps weights" in told.reason
        assert live.events.of(Blocked) == []
        assert (live.health.ready, live.health.status) == (False, f"unsupported engine: {told.reason}")
        shown = json.loads(await live.stream.store.get(names.replica("r1"), limit=1 << 16))
        assert (shown["state"], shown["detail"], shown["serving"]) == ("unsupported", told.reason, False)


@pytest.mark.parametrize("away", [False, True], ids=["restarted", "away for a while"])
async def test_another_start_of_an_unsupported_engine_is_noticed_at_once(make_live, away):
    live = await make_live(1)
    refuse(live.server, "sleep mode unmaps weights")
    async with live.running() as task:
        await live.until(lambda: live.server.asked.count("status") > 1, task)
        if away:
            live.server.stop()
            await live.until(lambda: live.events.of(EngineLost), task)
        live.server.start(0)
        await live.until(live.serves(0), task)
        await live.stream.publish(1)
        await live.until(live.serves(1), task)


async def test_an_unsupported_engine_is_an_error_with_once(make_live):
    live = await make_live(1)
    refuse(live.server, "sleep mode unmaps weights")
    with pytest.raises(EngineUnsupported, match="sleep mode") as told:
        await live.once()
    assert (told.value.exit_code, told.value.kind) == (16, "EngineRefused")
