"""Who owns an engine and whether it may run, on a whole engine in one process."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.vllm.toy_engine import ToyEngine, failing, spoiled
from support.vllm.toy_model import LAYOUT

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.engine import messages
from dcr_daemon.engine.messages import RankChecksums, Report
from dcr_daemon.engine.port import EngineGone, EngineUnsupported, StreamFacts, Swapped, TensorClass, Verdict
from dcr_daemon.errors import Corrupt, EngineRefused, Fenced
from dcr_daemon.vllm_plugin.calls import Op
from dcr_daemon.vllm_plugin.weights import faults

pytestmark = pytest.mark.usefixtures("toy_loader")


@pytest.fixture
def fresh(tmp_path: Path) -> ToyEngine:
    """Born, and nobody has attached."""
    return ToyEngine(tmp_path)


@pytest.fixture
def engine(fresh: ToyEngine) -> ToyEngine:
    return fresh.ready()


def test_an_engine_is_born_paused_and_resumed_by_nobody(fresh: ToyEngine) -> None:
    assert not fresh.host.running
    assert "not proved" in fresh.core.state.why_not_resume()
    fresh.attach()
    assert "not proved" in fresh.core.state.why_not_resume()
    with pytest.raises(EngineRefused, match="not proved"):
        fresh.ask(messages.Serve)
    assert not fresh.host.running


def test_attach_tells_the_live_vector_with_absent_tensors_left_out(fresh: ToyEngine) -> None:
    attached = fresh.attach()
    head = LAYOUT.index("head")
    wanted = fresh.vector(0)
    assert attached.classes[head] is TensorClass.ABSENT
    assert set(attached.classes) == {TensorClass.EXACT, TensorClass.ABSENT}
    wanted[head] = 0
    assert attached.vector == wanted.tobytes()
    assert (attached.adopted, attached.version, attached.serving) == (None, None, False)


def test_only_the_live_version_is_proved_and_then_served(fresh: ToyEngine) -> None:
    fresh.attach()
    version = fresh.step()
    with pytest.raises(EngineRefused, match=r"not version 1: .*norm"):
        fresh.ask(messages.Prove, version=1, vector=fresh.vector_file(version), label="v1")
    fresh.ask(messages.Prove, version=0, vector=fresh.vector_file(0), label="v0")
    assert fresh.host.shown == "v0"
    fresh.ask(messages.Serve)
    status = fresh.status()
    assert (status.version, status.serving) == (0, True)


def test_a_vector_of_the_wrong_length_is_corrupt_and_a_missing_one_refused(fresh: ToyEngine, tmp_path: Path) -> None:
    fresh.attach()
    short = tmp_path / "short.bin"
    short.write_bytes(b"\0" * 8)
    with pytest.raises(Corrupt, match=r"short\.bin"):
        fresh.ask(messages.Prove, version=0, vector=str(short), label="v0")
    with pytest.raises(EngineRefused, match="cannot read"):
        fresh.ask(messages.Prove, version=0, vector=str(tmp_path / "none"), label="v0")


def test_a_layout_that_is_not_the_one_named_is_refused(fresh: ToyEngine) -> None:
    fresh.facts = StreamFacts(stream="s", layout=fresh.facts.layout, layout_digest="0" * 64)
    with pytest.raises(Corrupt):
        fresh.attach()


def test_every_refused_tensor_is_named_with_its_reason(fresh: ToyEngine) -> None:
    def edit(rank: int, call: dict[str, Any], reply: dict[str, Any]) -> Any:
        if call["op"] != "attach":
            return reply
        held = ["refused" if spec.name in ("q", "norm") else one for spec, one in
                zip(LAYOUT, reply["result"]["held"], strict=True)]  # fmt: skip
        refusals = {"norm": "computed"} | ({"q": "repacked"} if rank == 1 else {})
        return spoiled(reply, result={**reply["result"], "held": held, "refusals": refusals})

    fresh.wire.edit = edit
    with pytest.raises(EngineRefused, match=r"norm: computed; q: repacked \(rank 1\)"):
        fresh.attach()


def test_workers_on_other_hosts_are_refused_by_host(fresh: ToyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    there = socket.gethostname()
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    with pytest.raises(
        EngineUnsupported, match=rf"other hosts than the engine \(here\): rank 0, 1 on {there}; start one"
    ):
        fresh.attach()
    assert Op.ATTACH not in fresh.wire.sent


def test_an_executor_whose_replies_cannot_be_told_apart_is_refused(fresh: ToyEngine) -> None:
    fresh.wire.unsupported = "the replies cannot be told apart; use another"
    with pytest.raises(EngineUnsupported, match="in place: the replies cannot be told apart; use another"):
        fresh.attach()


def test_a_rank_that_cannot_open_a_file_says_on_which_host_and_never_that_it_is_damaged(fresh: ToyEngine) -> None:
    fresh.facts = StreamFacts(stream="s", layout="/elsewhere/layout.json", layout_digest=fresh.facts.layout_digest)
    with pytest.raises(EngineRefused, match=f"rank 0, 1: cannot read /elsewhere/.* on {socket.gethostname()}: No such"):
        fresh.attach()


def test_a_tensor_that_no_rank_covers_is_named(fresh: ToyEngine) -> None:
    def edit(rank: int, call: dict[str, Any], reply: dict[str, Any]) -> Any:
        if call["op"] != "attach" or rank == 0:
            return reply
        boxes = [box for box in reply["result"]["boxes"] if box[0] != LAYOUT.index("o")]
        return spoiled(reply, result={**reply["result"], "boxes": boxes})

    fresh.wire.edit = edit
    with pytest.raises(EngineRefused, match="o: 32 of 64 elements"):
        fresh.attach()


def test_a_replica_that_differs_is_named_and_its_engine_of_no_version_until_loaded(
    fresh: ToyEngine, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.workers[1].flip("norm")
    attached = fresh.attach()
    assert "a copy differs on rank 1: norm" in caplog.text
    assert np.frombuffer(attached.vector, "<u8")[LAYOUT.index("norm")] == 0
    with pytest.raises(EngineRefused, match="not version 0: norm"):
        fresh.ask(messages.Prove, version=0, vector=fresh.vector_file(0), label="v0")
    files, vector = [fresh.anchor(0)], fresh.vector_file(0)
    loaded = fresh.ask(messages.Load, Swapped, version=0, files=files, vector=vector, label="v0")
    assert (loaded.verdict, fresh.holds(0)) == (Verdict.COMMITTED, True)


def test_another_owner_fences_the_first_in_every_call(engine: ToyEngine) -> None:
    version = engine.step()
    first = dict(engine.owner)
    engine.prepare(version)
    attached = engine.attach()
    assert (attached.version, attached.serving, attached.token) == (0, True, first["token"] + 1)
    second, engine.owner = engine.owner, first
    for kind, fields in (
        (messages.Serve, {}),
        (messages.Drop, {}),
        (messages.Swap, {"txn": "txn"}),
        (messages.Prepare, {"txn": engine.transaction(version)}),
        (messages.Inspect, {}),
    ):
        with pytest.raises(Fenced, match="owner token"):
            engine.ask(kind, **fields)
    engine.owner = second
    with pytest.raises(EngineRefused, match="not prepared"):
        engine.swap()


def test_a_token_drawn_elsewhere_is_never_undercut(engine: ToyEngine) -> None:
    attached = engine.ask(messages.Attach, Any, facts=engine.facts, at_least=40)
    assert attached["token"] == 40


def test_an_owner_that_is_fenced_cannot_attach_again_in_this_incarnation(engine: ToyEngine) -> None:
    first = dict(engine.owner)
    second = engine.attach()
    with pytest.raises(Fenced, match="owner token"):
        engine.ask(messages.Attach, Any, facts=engine.facts, **first)
    engine.ask(messages.Serve)  # the second is the owner as before
    again = engine.ask(messages.Attach, Any, facts=engine.facts, **engine.owner)
    assert again["token"] == second.token + 1
    restarted = {"token": first["token"], "incarnation": "0123456789abcdef"}
    assert engine.ask(messages.Attach, Any, facts=engine.facts, **restarted)["token"] == second.token + 2


def test_an_owner_of_a_dead_incarnation_is_told_to_attach(engine: ToyEngine) -> None:
    engine.owner["incarnation"] = "0123456789abcdef"
    with pytest.raises(EngineGone, match="restarted"):
        engine.ask(messages.Serve)


def test_attach_ends_a_running_prepare_and_its_client_is_fenced(engine: ToyEngine) -> None:
    faults.inject("slow", times=1000, seconds=0.01)
    version = engine.step()
    call = engine.make(messages.Prepare, txn=engine.transaction(version))
    assert isinstance(engine.send(call), messages.Pending)
    faults.inject("slow", times=0)
    engine.attach()
    answer = engine.finish(call, engine.send(messages.Poll(id=call.id)))
    assert isinstance(answer, messages.Refused)
    assert answer.kind == "Fenced"
    assert engine.refit(version).verdict is Verdict.COMMITTED


def test_one_flow_at_a_time_and_drop_ends_a_prepare(engine: ToyEngine) -> None:
    faults.inject("slow", times=1000, seconds=0.01)
    version = engine.step()
    call = engine.make(messages.Prepare, txn=engine.transaction(version))
    engine.send(call)
    with pytest.raises(EngineRefused, match="busy with prepare"):
        engine.ask(messages.Inspect)
    engine.ask(messages.Drop)
    faults.inject("slow", times=0)
    answer = engine.finish(call, engine.send(messages.Poll(id=call.id)))
    assert isinstance(answer, messages.Refused)
    assert engine.refit(version).verdict is Verdict.COMMITTED


def test_messages_name_calls_as_the_socket_does() -> None:
    settle = messages.FinishAdopted(id="1", token=1, incarnation="i", txn="t")
    assert messages.name_of(settle) == "settle"
    assert messages.name_of(messages.Poll(id="1")) == "poll"


def test_a_write_by_somebody_else_ends_proof_and_service_until_attach(engine: ToyEngine) -> None:
    version = engine.step()
    engine.prepare(version)
    for one in engine.workers:
        one.reload_weights()
    with pytest.raises(EngineRefused, match="attach again"):
        engine.swap()
    status = engine.status()
    assert (status.version, status.serving, status.prepared) == (None, False, None)
    assert engine.core.state.why_not_resume()
    engine.attach()  # the weights turn out to be the same, but what they are must be said anew
    assert engine.core.state.why_not_resume()
    engine.ask(messages.Prove, version=0, vector=engine.vector_file(0), label="v0")
    engine.ask(messages.Serve)
    assert engine.refit(version).verdict is Verdict.COMMITTED
    assert engine.holds(version)


def test_the_guard_sees_a_write_that_nobody_told_it_of(engine: ToyEngine) -> None:
    engine.host.halt()
    engine.workers[1].add_lora(None)
    assert "external writer" in engine.core.state.why_not_resume()


def test_the_guard_refuses_while_a_rank_is_dirty(engine: ToyEngine) -> None:
    engine.workers[1]._dcr_session.dirty = True
    assert "dirty" in engine.core.state.why_not_resume()


def test_an_inspection_finds_what_no_wrap_can_see(engine: ToyEngine) -> None:
    report = engine.ask(messages.Inspect, Report)
    by_name = {tensor.name: tensor for tensor in report.tensors}
    assert by_name["norm"].held == [8, 8]
    assert by_name["o"].held == [32, 32]
    assert by_name["head"].sum == ""
    assert report.version == 0
    for one in engine.workers:
        one.flip("norm")
    report = engine.ask(messages.Inspect, Report)
    assert (report.version, report.serving) == (None, False)
    assert engine.status().serving is False


def test_an_attach_that_finds_other_weights_than_were_proved_stops_generation(engine: ToyEngine) -> None:
    for one in engine.workers:
        one.flip("scale")
    attached = engine.attach()
    assert (attached.version, attached.serving) == (None, False)


def test_another_stream_does_not_inherit_the_proof(engine: ToyEngine) -> None:
    engine.facts = StreamFacts(stream="another", layout=engine.facts.layout, layout_digest=engine.facts.layout_digest)
    assert engine.attach().version is None


def test_checksums_are_those_of_a_fresh_load(engine: ToyEngine) -> None:
    ranks = engine.ask(messages.Checksums, list[RankChecksums])
    assert [one.rank for one in ranks] == [0, 1]
    assert "norm" in ranks[0].parameters
    assert "bias" in ranks[0].buffers
    assert ranks[0].parameters["norm"] == ranks[1].parameters["norm"]


def test_replies_left_behind_by_others_are_read_past(engine: ToyEngine) -> None:
    version = engine.step()
    engine.wire.left[1].append({"rank": 1, "call": "somebody's", "ok": True})
    engine.prepare(version)
    engine.wire.left[0].append(None)
    engine.wire.left[1].append("model output")
    assert engine.swap().verdict is Verdict.COMMITTED
    assert engine.holds(version)
    assert [len(queue) for queue in engine.wire.left] == [0, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_left_behind_loses_answers_and_nothing_else(engine: ToyEngine, rank: int) -> None:
    """vLLM raises at the first error it reads and drops what it had read before."""
    version = engine.step()
    engine.wire.left[rank].append(RuntimeError("somebody's"))
    engine.prepare(version)
    engine.wire.left[rank].append(RuntimeError("somebody's"))
    engine.wire.left[1].append(RuntimeError("somebody's"))
    assert engine.swap().verdict is Verdict.COMMITTED
    engine.wire.left[rank].append(RuntimeError("somebody's"))
    engine.attach()
    assert engine.holds(version)


def test_an_outcome_is_kept_and_an_unknown_transaction_is_said_to_be_so(engine: ToyEngine) -> None:
    version = engine.step()
    swapped = engine.refit(version)
    again = engine.ask(messages.Outcome, type(swapped), txn="txn")
    assert again == swapped == engine.swap()
    assert engine.ask(messages.Outcome, type(swapped), txn="never").verdict is Verdict.UNKNOWN


def test_a_failing_attach_on_one_rank_names_it(fresh: ToyEngine) -> None:
    fresh.wire.edit = lambda rank, call, reply: failing(reply) if (call["op"], rank) == ("attach", 1) else reply
    with pytest.raises(EngineRefused, match="attach: rank 1: failed by a test"):
        fresh.attach()


def test_layout_objects_in_another_form_are_refused(fresh: ToyEngine, tmp_path: Path) -> None:
    path = tmp_path / "loose.json"
    path.write_bytes(Layout(LAYOUT.specs).encoded + b" ")
    fresh.facts = StreamFacts(stream="s", layout=str(path), layout_digest=LAYOUT.digest)
    with pytest.raises(Corrupt):
        fresh.attach()


def test_a_poll_of_a_call_that_nobody_made_is_fenced(engine: ToyEngine) -> None:
    answer = engine.send(messages.Poll(id="nobody"))
    assert isinstance(answer, messages.Refused)
    assert answer.kind == "Fenced"


def test_the_vector_of_an_attach_is_u64_little_endian_in_layout_order(fresh: ToyEngine) -> None:
    vector = np.frombuffer(fresh.attach().vector, "<u8")
    assert vector.size == len(LAYOUT)
    assert vector[LAYOUT.index("norm")] == fresh.vector(0)[LAYOUT.index("norm")]
