"""Whatever an engine is in the middle of, whatever happens then: it never runs on a mixture, and it always comes back.

A table: each state of the engine, each event in it. After the event, and after every step of the repair, an engine that
runs must hold on all ranks, bit for bit, the version that it reports. The repair is what any subscriber does who knows
nothing of what was: attach, settle, prove or load, serve; and then the next version must arrive.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.vllm.toy_engine import ToyEngine, failing

from dcr_daemon.engine import messages
from dcr_daemon.engine.port import EngineStatus, Scrubbed, Swapped, Verdict
from dcr_daemon.errors import DcrError, EngineRefused
from dcr_daemon.vllm_plugin.weights import faults

pytestmark = pytest.mark.usefixtures("toy_loader")

Arrange = Callable[[ToyEngine], None]
States = dict[str, Arrange]


def unpolled(engine: ToyEngine, kind: Any, **fields: Any) -> Any:
    """A call whose client vanishes, and whose workers are slow: nobody ever asks for its end."""
    faults.inject("slow", times=100_000, seconds=0.002)
    answer = engine.send(engine.make(kind, **fields))
    assert isinstance(answer, messages.Pending)
    return answer


def proving(engine: ToyEngine) -> None:
    engine.attach()
    engine.ask(messages.Prove, version=0, vector=engine.vector_file(0), label="v0")


def attaching(engine: ToyEngine) -> None:
    unpolled(engine, messages.Attach, facts=engine.facts)


def preparing(engine: ToyEngine) -> None:
    unpolled(engine, messages.Prepare, txn=engine.transaction(1, name="t1"))


def prepared(engine: ToyEngine) -> None:
    engine.prepare(1, name="t1")


def coming_to_rest(engine: ToyEngine) -> None:
    prepared(engine)
    engine.host.busy = True
    engine.send(engine.make(messages.Swap, txn="t1"))
    engine.host.busy = False


def begun(engine: ToyEngine) -> None:
    """Neither applied nor rolled back: half of it is written, on all ranks."""
    prepared(engine)
    faults.inject("apply", times=4)
    faults.inject("rollback", times=4)
    assert engine.swap("t1").verdict is Verdict.BEGUN


def begun_on_one(engine: ToyEngine) -> None:
    """Rank 1 has not heard of the beginning, and rank 0 cannot give it back."""
    prepared(engine)
    drop_calls(engine, 1, "begin")
    faults.inject("rollback", times=2)
    engine.swap("t1")
    hear_calls(engine, 1)
    faults.inject("rollback", times=0)


def half_committed(engine: ToyEngine) -> None:
    prepared(engine)
    drop_calls(engine, 1, "commit")
    assert engine.swap("t1").verdict is Verdict.BEGUN
    hear_calls(engine, 1)


def rolled_back(engine: ToyEngine) -> None:
    prepared(engine)
    faults.inject("apply", times=4)
    assert engine.swap("t1").verdict is Verdict.ROLLED_BACK


def committed(engine: ToyEngine) -> None:
    prepared(engine)
    assert engine.swap("t1").verdict is Verdict.COMMITTED


def load(engine: ToyEngine, version: int) -> Swapped:
    fields = {"version": version, "files": [engine.anchor(version)], "vector": engine.vector_file(version)}
    found: Swapped = engine.ask(messages.Load, Swapped, **fields, label=f"v{version}")
    return found


def loading(engine: ToyEngine) -> None:
    """In the middle of writing everything."""
    fields = {"version": 1, "files": [engine.anchor(1)], "vector": engine.vector_file(1), "label": "v1"}
    faults.inject("slow", times=100_000, seconds=0.02)
    call = engine.make(messages.Load, **fields)
    engine.send(call)
    while engine.status().begun is None:
        engine.send(messages.Poll(id=call.id))


def wrongly_loaded(engine: ToyEngine) -> None:
    fields = {"version": 1, "files": [engine.anchor(0)], "vector": engine.vector_file(1), "label": "v1"}
    assert engine.ask(messages.Load, Swapped, **fields).verdict is Verdict.BEGUN


def scrubbing(engine: ToyEngine) -> None:
    unpolled(engine, messages.Scrub, rate=1.0)


def damaged(engine: ToyEngine) -> None:
    engine.workers[1].dcr_call({"op": "fault", "call": "x", "token": 0, "arg": {"damage": "o"}})
    (found,) = engine.ask(messages.Scrub, Scrubbed, rate=0).differing
    assert (found.tensor, found.ranks, found.replica) == ("o", [1], False)


def damaged_copy(engine: ToyEngine) -> None:
    engine.workers[1].dcr_call({"op": "fault", "call": "x", "token": 0, "arg": {"damage": "norm"}})
    (found,) = engine.ask(messages.Scrub, Scrubbed, rate=0).differing
    assert (found.tensor, found.ranks, found.replica) == ("norm", [1], True)


STATES: States = {
    state.__name__: state
    for state in (
        *(attaching, preparing, prepared, coming_to_rest, begun, begun_on_one, half_committed, rolled_back, committed),
        *(loading, wrongly_loaded, scrubbing, damaged, damaged_copy),
    )
}


# -- events -----------------------------------------------------------------------------------------------------------


def drop_calls(engine: ToyEngine, rank: int, op: str) -> None:
    """One kind of call does not reach a rank, which answers with a failure."""
    real = engine.workers[rank].dcr_call

    def deaf(env: dict[str, Any]) -> dict[str, Any]:
        return failing(real({**env, "op": "status"})) if env["op"] == op else real(env)

    engine.workers[rank].dcr_call = deaf  # type: ignore[method-assign]


def hear_calls(engine: ToyEngine, rank: int) -> None:
    engine.workers[rank].__dict__.pop("dcr_call", None)


def nothing(engine: ToyEngine) -> None:
    pass


def another_owner(engine: ToyEngine) -> None:
    engine.attach()


def another_owner_vanishes(engine: ToyEngine) -> None:
    engine.send(engine.make(messages.Attach, facts=engine.facts))


def everybody_rewrites(engine: ToyEngine) -> None:
    """A reload by somebody else, which leaves weights that nobody knows."""
    for one in engine.workers:
        one.reload_weights()
        one.flip("norm")
    engine.core.state.poll_external_writes()  # as the wrapped executor does


def one_rewrites(engine: ToyEngine) -> None:
    engine.workers[1].add_lora(None)
    engine.workers[1].flip("o")
    engine.core.state.poll_external_writes()


def storage_moves(engine: ToyEngine) -> None:
    """As sleep and wake do: other memory with other bits, through an entry point that is watched."""
    import torch

    one = engine.workers[0]
    one.reload_weights()
    one.toy.o.data = torch.zeros_like(one.toy.o.data)
    engine.core.state.poll_external_writes()


def owner_goes_on(engine: ToyEngine) -> None:
    """The owner does not know that anything went wrong."""
    for kind, fields in (
        (messages.Serve, {}),
        (messages.Swap, {"txn": "t1"}),
        (messages.Drop, {}),
        (messages.Prove, {"version": 0, "vector": engine.vector_file(0), "label": "v0"}),
        (messages.Prepare, {"txn": engine.transaction(1, name="t2")}),
        (messages.Scrub, {"rate": 0}),
        (messages.Swap, {"txn": "t2"}),
        (messages.Serve, {}),
    ):
        with_errors(engine, kind, **fields)


def with_errors(engine: ToyEngine, kind: Any, **fields: Any) -> None:
    with contextlib.suppress(DcrError):
        engine.ask(kind, Any, **fields)
    sound(engine)


def answers_get_lost(engine: ToyEngine) -> None:
    """Somebody else's failures are in both queues when the next calls are made."""
    for queue in engine.wire.left:
        queue.append(RuntimeError("somebody's"))
        queue.append("model output")
    with_errors(engine, messages.FinishAdopted, txn="t1")


EVENTS: States = {
    event.__name__: event
    for event in (
        *(nothing, another_owner, another_owner_vanishes, everybody_rewrites, one_rewrites, storage_moves),
        *(owner_goes_on, answers_get_lost),
    )
}


# -- what must hold ---------------------------------------------------------------------------------------------------


def sound(engine: ToyEngine) -> None:
    """Must E1: what runs is, on all ranks, what it says it is; what nobody may resume, nobody can."""
    if engine.host.running:
        assert not any(one._dcr_session.dirty for one in engine.workers)
        version = engine.status().version
        assert version is not None
        assert engine.holds(version)
    if any(one._dcr_session.dirty for one in engine.workers):
        assert engine.core.state.why_not_resume()


def recover(engine: ToyEngine) -> None:
    """As a subscriber that was started just now: it knows the stream, and nothing of the engine."""
    faults.inject("slow", times=0)
    attached = engine.attach()
    sound(engine)
    if attached.adopted is not None:
        engine.ask(messages.FinishAdopted, Swapped, txn=attached.adopted)
        sound(engine)
        attached = engine.attach()
        sound(engine)
    live = [n for n in range(len(engine.lanes)) if attached.vector == engine.live_vector(n)]
    if live:
        engine.ask(messages.Prove, version=live[0], vector=engine.vector_file(live[0]), label=f"v{live[0]}")
    else:
        assert load(engine, 1).verdict is Verdict.COMMITTED
    sound(engine)
    engine.ask(messages.Serve)
    sound(engine)


def catch_up(engine: ToyEngine) -> None:
    """It serves again, and the next version arrives, one by one."""
    assert engine.host.running
    version, fresh = engine.status().version, engine.step()
    while version < fresh:
        swapped = engine.refit(version + 1, name=f"next-{version}")
        assert (swapped.verdict, swapped.serving) == (Verdict.COMMITTED, True)
        version += 1
    assert engine.holds(fresh)


@pytest.fixture
def engine(tmp_path: Path) -> ToyEngine:
    engine = ToyEngine(tmp_path).ready()
    engine.step()
    return engine


@pytest.mark.parametrize(("state", "event"), list(itertools.product(STATES, EVENTS)))
def test_whatever_happens_in_any_state_it_comes_back(engine: ToyEngine, state: str, event: str) -> None:
    STATES[state](engine)
    sound(engine)
    EVENTS[event](engine)
    sound(engine)
    recover(engine)
    catch_up(engine)
    assert [len(queue) for queue in engine.wire.left] == [0, 0]


STEPS = ("attach", "settle", "attach again", "load", "serve")


@pytest.mark.parametrize("state", ["begun", "half_committed", "loading", "wrongly_loaded", "damaged", "begun_on_one"])
@pytest.mark.parametrize("step", range(4))
def test_the_repair_may_die_after_each_of_its_steps(engine: ToyEngine, state: str, step: int) -> None:
    """A second repairer starts from wherever the first one was killed; then a third ends it."""
    STATES[state](engine)
    for _ in range(2):
        faults.inject("slow", times=0)
        attached = engine.attach()
        if step > 0 and attached.adopted is not None:
            engine.send(engine.make(messages.FinishAdopted, txn=attached.adopted))
        if step > 1:
            fields = {"version": 1, "files": [engine.anchor(1)], "vector": engine.vector_file(1), "label": "v1"}
            faults.inject("slow", times=100_000, seconds=0.01)
            call = engine.make(messages.Load, **fields)
            engine.send(call)
            for _ in range(step):
                engine.send(messages.Poll(id=call.id))
        sound(engine)
    recover(engine)
    catch_up(engine)


def test_a_load_whose_owner_died_is_gone_on_with_from_its_files(engine: ToyEngine) -> None:
    loading(engine)
    faults.inject("slow", times=0)
    attached = engine.attach()
    assert attached.adopted
    settled = engine.ask(messages.FinishAdopted, Swapped, txn=attached.adopted)
    assert (settled.verdict, settled.version, settled.serving) == (Verdict.COMMITTED, 1, True)
    assert engine.holds(1)
    assert engine.ask(messages.Outcome, Swapped, txn=attached.adopted) == settled


def test_a_load_whose_files_are_gone_is_still_begun_and_says_so(engine: ToyEngine) -> None:
    loading(engine)
    faults.inject("slow", times=0)
    attached = engine.attach()
    Path(engine.anchor(1)).unlink()
    settled = engine.ask(messages.FinishAdopted, Swapped, txn=attached.adopted)
    assert (settled.verdict, settled.serving) == (Verdict.BEGUN, False)
    assert "files" in settled.reason
    assert not engine.host.running
    assert load(engine, 1).verdict is Verdict.COMMITTED
    assert engine.holds(1)


def test_a_foreign_write_on_a_quiet_stream_is_noticed_by_the_heartbeat(engine: ToyEngine) -> None:
    for one in engine.workers:
        one.reload_weights()
    status = engine.ask(messages.Status, EngineStatus, **engine.owner)
    assert (status.version, status.serving) == (None, False)


def test_a_scrub_beside_another_call_is_told_to_come_again(engine: ToyEngine) -> None:
    preparing(engine)
    found = engine.ask(messages.Scrub, Scrubbed, rate=0, first=3)
    assert (found.tensors, found.next, found.differing) == (0, 3, [])
    faults.inject("slow", times=0)


def test_a_scrub_names_the_copy_that_differs_from_its_owner(engine: ToyEngine) -> None:
    damaged_copy(engine)
    with pytest.raises(EngineRefused, match="proved"):
        engine.ask(messages.Serve)


def test_a_scrub_counts_damage_only_if_a_second_look_finds_it_too(engine: ToyEngine) -> None:
    one = {"op": "fault", "call": "x", "token": 0, "arg": {"damage": "o"}}

    def heal(rank: int, call: dict[str, Any], reply: dict[str, Any]) -> Any:
        if call["op"] == "join" and not healed:
            healed.append(engine.workers[1].dcr_call(one))
        return reply

    healed: list[Any] = []
    engine.workers[1].dcr_call(one)
    engine.wire.edit = heal
    found = engine.ask(messages.Scrub, Scrubbed, rate=0)
    assert (found.differing, found.next, engine.status().version) == ([], None, 0)


def test_a_scrub_keeps_its_reference_over_composed_versions(engine: ToyEngine) -> None:
    engine.step()
    engine.step()
    engine.prepare(1, 2, 3, name="route")
    engine.swap("route")
    found = engine.ask(messages.Scrub, Scrubbed, rate=0)
    assert (found.version, found.differing, found.next) == (3, [], None)
