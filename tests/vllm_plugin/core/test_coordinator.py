"""Every edge of the transaction diagram, with every rank failing at every step, on a whole engine in one process."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.vllm.toy_engine import Ended, ToyEngine, failing
from support.vllm.toy_model import LAYOUT

from dcr_daemon.checkpoint.safetensors import write_safetensors
from dcr_daemon.engine import messages
from dcr_daemon.engine.port import Prepared, Swapped, Transaction, Verdict
from dcr_daemon.errors import Corrupt, DcrError, EngineRefused, ResourceExhausted
from dcr_daemon.vllm_plugin.weights import faults

pytestmark = pytest.mark.usefixtures("toy_loader")


@pytest.fixture
def engine(tmp_path: Path) -> ToyEngine:
    return ToyEngine(tmp_path).ready()


class Failing:
    """Lets the answers of one operation on one rank fail, a number of times; the work itself may still be done."""

    def __init__(self, engine: ToyEngine, op: str, rank: int, times: int) -> None:
        self.engine, self.op, self.rank, self.left = engine, op, rank, times
        engine.wire.edit = self

    def __call__(self, rank: int, call: dict[str, Any], reply: dict[str, Any]) -> Any:
        if (call["op"], rank) == (self.op, self.rank) and self.left:
            self.left -= 1
            return failing(reply)
        return reply


def test_prepare_writes_nothing_and_swap_writes_everything(engine: ToyEngine) -> None:
    version = engine.step()
    prepared = engine.prepare(version)
    assert prepared.changed > 0
    assert prepared.fits == 1
    assert engine.holds(0)
    assert engine.status().prepared == "txn"
    swapped = engine.swap()
    assert (swapped.verdict, swapped.version, swapped.tries, swapped.serving) == (Verdict.COMMITTED, version, 1, True)
    assert engine.holds(version)
    assert engine.host.shown == f"v{version}"


def test_the_order_is_check_begin_apply_commit_with_every_rank_at_each_step(engine: ToyEngine) -> None:
    engine.prepare(engine.step())
    engine.wire.sent.clear()
    engine.swap()
    steps = [op for op in engine.wire.sent if op != "status"]
    assert steps == ["check", "check", "begin", "apply", "commit"]


def test_a_paused_engine_stays_paused_after_commit_and_after_rollback(engine: ToyEngine) -> None:
    engine.host.halt()
    version = engine.step()
    assert engine.refit(version).serving is False
    assert engine.status().version == version
    faults.inject("apply", times=4)  # both ranks, twice
    swapped = engine.refit(engine.step(), name="second")
    assert (swapped.verdict, swapped.serving) == (Verdict.ROLLED_BACK, False)


def test_a_swap_waits_for_the_engine_to_come_to_rest(engine: ToyEngine) -> None:
    version = engine.step()
    engine.prepare(version)
    engine.host.busy = True
    call = engine.make(messages.Swap, txn="txn")
    answer = engine.send(call)
    assert isinstance(answer, Future)
    assert engine.core.state.why_not_resume() == "a swap is under way"
    assert engine.holds(0)
    engine.host.rest()
    done = messages.result_of(messages.decode_answer(messages.encode(answer.result(1))), Swapped)
    assert done.verdict is Verdict.COMMITTED
    assert engine.host.running


def test_an_engine_that_does_not_come_to_rest_goes_on_as_before(engine: ToyEngine) -> None:
    engine.prepare(engine.step())
    engine.host.busy = True
    answer = engine.send(engine.make(messages.Swap, txn="txn"))
    engine.host.rest(RuntimeError("the connector's cache was not reset"))
    with pytest.raises(RuntimeError, match="connector"):
        answer.result(1)
    assert engine.host.running
    assert engine.core.state.why_not_resume() == ""


def test_a_swap_whose_owner_was_fenced_while_it_waited_writes_nothing(engine: ToyEngine) -> None:
    engine.prepare(engine.step())
    engine.host.busy = True
    answer = engine.send(engine.make(messages.Swap, txn="txn"))
    engine.attach()
    assert engine.host.running
    engine.host.rest()
    assert answer.result(1).kind == "Fenced"
    assert engine.holds(0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("op", ["apply", "begin", "check"])
def test_one_failure_on_one_rank_never_leaves_a_mixture(engine: ToyEngine, op: str, rank: int) -> None:
    version = engine.step()
    engine.prepare(version)
    Failing(engine, op, rank, 1)
    if op == "check":
        with pytest.raises(EngineRefused, match="failed by a test"):
            engine.swap()
        assert engine.holds(0)
    else:
        swapped = engine.swap()
        assert swapped.verdict is (Verdict.COMMITTED if op == "apply" else Verdict.ROLLED_BACK)
        assert engine.holds(version if op == "apply" else 0)
    assert engine.host.running
    assert engine.core.state.why_not_resume() == ""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["apply", "flip"])
def test_two_failed_applies_roll_back_every_rank(engine: ToyEngine, fault: str, rank: int) -> None:
    version = engine.step()
    engine.prepare(version)
    faults.inject(fault, times=4)
    swapped = engine.swap()
    assert (swapped.verdict, swapped.version, swapped.tries) == (Verdict.ROLLED_BACK, 0, 2)
    assert engine.holds(0)
    assert engine.host.running
    faults.inject(fault, times=0)
    assert engine.refit(version, name="again").verdict is Verdict.COMMITTED
    assert engine.holds(version)


def test_a_swap_says_what_its_pause_was_spent_on(engine: ToyEngine) -> None:
    prepared = engine.prepare(engine.step())
    assert set(prepared.spent) == {"read", "decode", "gather", "sum", "stage"}
    swapped = engine.swap()
    assert list(swapped.phases) == ["rest", "begin", "apply", "sums", "commit", "resume"]
    assert 0 < sum(swapped.phases.values()) <= swapped.pause
    engine.prepare(engine.step(), name="other")
    faults.inject("apply", times=4)
    assert "rollback" in engine.swap("other").phases


@pytest.mark.parametrize("rank", [0, 1])
def test_after_the_first_commit_only_forward(engine: ToyEngine, rank: int) -> None:
    version = engine.step()
    engine.prepare(version)
    Failing(engine, "commit", rank, 1)
    swapped = engine.swap()
    assert swapped.verdict is Verdict.COMMITTED
    assert engine.holds(version)
    assert "rollback" not in engine.wire.sent


def test_a_rank_that_cannot_commit_is_settled_forward_by_the_next_owner(engine: ToyEngine) -> None:
    version = engine.step()
    engine.prepare(version)

    def edit(rank: int, call: dict[str, Any], reply: dict[str, Any]) -> Any:
        return failing(reply) if (call["op"], rank) == ("commit", 1) else reply

    real = engine.workers[1].dcr_call

    def stuck(env: dict[str, Any]) -> dict[str, Any]:
        if env["op"] == "commit":  # it is refused before the worker sees it
            return failing(real({**env, "op": "status"}))
        return real(env)

    engine.workers[1].dcr_call = stuck  # type: ignore[method-assign]
    swapped = engine.swap()
    assert (swapped.verdict, swapped.serving) == (Verdict.BEGUN, False)
    del engine.workers[1].dcr_call
    assert engine.core.state.why_not_resume()
    attached = engine.attach()
    assert attached.adopted == "txn"
    settled = engine.ask(messages.FinishAdopted, Swapped, txn="txn")
    assert (settled.verdict, settled.version) == (Verdict.COMMITTED, version)
    assert engine.holds(version)
    assert "rollback" not in engine.wire.sent


def leave_begun(engine: ToyEngine) -> int:
    version = engine.step()
    engine.prepare(version)
    faults.inject("apply", times=4)
    faults.inject("rollback", times=4)
    swapped = engine.swap()
    assert (swapped.verdict, swapped.version, swapped.serving) == (Verdict.BEGUN, None, False)
    return version


def test_what_was_begun_is_adopted_and_settled_forward(engine: ToyEngine) -> None:
    version = leave_begun(engine)
    status = engine.status()
    assert (status.begun, status.version) == ("txn", None)
    assert "begun" in engine.core.state.why_not_resume()
    attached = engine.attach()
    assert (attached.adopted, attached.vector, attached.version) == ("txn", b"", None)
    for kind, fields in ((messages.Serve, {}), (messages.Inspect, {}), (messages.Drop, {})):
        with pytest.raises(DcrError):
            engine.ask(kind, **fields)
    with pytest.raises(EngineRefused, match="begun"):
        engine.prepare(version, name="other")
    assert engine.ask(messages.Outcome, Swapped, txn="txn").verdict is Verdict.BEGUN
    settled = engine.ask(messages.FinishAdopted, Swapped, txn="txn")
    assert (settled.verdict, settled.version, settled.serving) == (Verdict.COMMITTED, version, True)
    assert engine.holds(version)
    assert engine.ask(messages.FinishAdopted, Swapped, txn="txn") == settled


def test_settling_goes_back_when_it_cannot_go_forward(engine: ToyEngine) -> None:
    leave_begun(engine)
    faults.inject("apply", times=4)
    settled = engine.ask(messages.FinishAdopted, Swapped, txn="txn")
    assert (settled.verdict, settled.version, settled.serving) == (Verdict.ROLLED_BACK, 0, True)
    assert engine.holds(0)


def test_only_what_is_begun_can_be_settled(engine: ToyEngine) -> None:
    with pytest.raises(EngineRefused, match="not begun"):
        engine.ask(messages.FinishAdopted, Swapped, txn="never")


# -- dense repair -----------------------------------------------------------------------------------------------------


def load(engine: ToyEngine, version: int, of: int | None = None) -> Any:
    files = [engine.anchor(version if of is None else of)]
    return engine.ask(
        messages.Load, Swapped, version=version, files=files, vector=engine.vector_file(version), label=f"v{version}"
    )


def test_a_dense_load_repairs_what_can_neither_go_forward_nor_back(engine: ToyEngine) -> None:
    version = leave_begun(engine)
    loaded = load(engine, version)
    assert (loaded.verdict, loaded.version, loaded.serving) == (Verdict.COMMITTED, version, True)
    assert engine.holds(version)
    assert engine.refit(engine.step(), name="next").verdict is Verdict.COMMITTED


def test_a_dense_load_on_an_unproved_engine_leaves_it_paused_until_served(tmp_path: Path) -> None:
    engine = ToyEngine(tmp_path)
    version = engine.step()
    engine.attach()
    loaded = load(engine, version)
    assert (loaded.verdict, loaded.serving) == (Verdict.COMMITTED, False)
    engine.ask(messages.Serve)
    assert engine.host.running
    assert engine.holds(version)


@pytest.mark.parametrize("how", ["missing", "cut", "short of a tensor"])
def test_files_that_are_not_whole_are_refused_before_anything_is_paused(
    engine: ToyEngine, tmp_path: Path, how: str
) -> None:
    version = engine.step()
    path = tmp_path / "spoiled.safetensors"
    if how == "cut":
        path.write_bytes(Path(engine.anchor(version)).read_bytes()[:-64])
    elif how != "missing":
        write_safetensors(path, list(zip(LAYOUT, engine.lanes[version], strict=True))[2:])
    vector = engine.vector_file(version)
    with pytest.raises(DcrError, match="spoiled" if how != "short of a tensor" else "lacks bias, embed"):
        engine.ask(messages.Load, Swapped, version=1, files=[str(path)], vector=vector, label="")
    assert (engine.host.running, engine.status().version, engine.status().begun) == (True, 0, None)
    assert engine.holds(0)
    assert load(engine, version).verdict is Verdict.COMMITTED
    assert engine.holds(version)


def test_the_wrong_weights_twice_end_the_engine_process(engine: ToyEngine) -> None:
    engine.step()
    assert load(engine, 1, of=0).verdict is Verdict.BEGUN
    assert not engine.host.running
    with pytest.raises(Ended, match="not version 1"):
        load(engine, 1, of=0)


# -- refused at prepare -----------------------------------------------------------------------------------------------


def refused(engine: ToyEngine, txn: Transaction, kind: type[DcrError], text: str) -> None:
    with pytest.raises(kind, match=text):
        engine.ask(messages.Prepare, Prepared, txn=txn)
    assert engine.holds(0)
    assert engine.host.running
    assert engine.status().prepared is None
    assert engine.refit(1, name="good").verdict is Verdict.COMMITTED


def changed_hop(engine: ToyEngine, **fields: Any) -> Transaction:
    engine.step()
    txn = engine.transaction(1)
    return msgspec.structs.replace(txn, hops=[msgspec.structs.replace(txn.hops[0], **fields)])


def test_another_base_is_refused(engine: ToyEngine) -> None:
    refused(engine, changed_hop(engine, base=7), EngineRefused, "made from 7, not from 0")


def test_a_base_vector_that_is_not_live_is_refused_with_its_tensors(engine: ToyEngine) -> None:
    engine.step()
    refused(
        engine, changed_hop(engine, before=engine.vector_file(1)), EngineRefused, "not the base of version 1: .*norm"
    )


def test_a_seal_that_its_chunks_do_not_reach_is_refused_with_its_tensors(engine: ToyEngine) -> None:
    refused(engine, changed_hop(engine, after=engine.vector_file(0)), EngineRefused, "do not lead .*: .*norm")


def test_a_missing_chunk_is_refused(engine: ToyEngine) -> None:
    engine.step()
    txn = engine.transaction(1)
    hop = msgspec.structs.replace(txn.hops[0], chunks=txn.hops[0].chunks[1:])
    refused(engine, msgspec.structs.replace(txn, hops=[hop]), EngineRefused, "do not lead")


def test_a_chunk_twice_is_refused(engine: ToyEngine) -> None:
    engine.step()
    txn = engine.transaction(1)
    hop = msgspec.structs.replace(txn.hops[0], chunks=[*txn.hops[0].chunks, txn.hops[0].chunks[0]])
    with pytest.raises(DcrError):
        engine.ask(messages.Prepare, Prepared, txn=msgspec.structs.replace(txn, hops=[hop]))
    assert engine.holds(0)


def test_a_damaged_chunk_is_corrupt(engine: ToyEngine) -> None:
    engine.step()
    txn = engine.transaction(1)
    path = Path(txn.hops[0].chunks[0])
    body = path.read_bytes()
    path.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    refused(engine, txn, Corrupt, "corrupt")


def test_a_weight_that_changed_unseen_is_refused_with_its_tensor(engine: ToyEngine) -> None:
    engine.step(0.6)
    for one in engine.workers:
        one.flip("norm")
    with pytest.raises(EngineRefused, match=r"not what version 1 was made from: norm"):
        engine.prepare(1)
    assert engine.status().prepared is None


def test_a_replica_that_changed_unseen_is_named_with_its_rank(engine: ToyEngine) -> None:
    engine.step(0.6)
    engine.workers[1].flip("norm")
    with pytest.raises(EngineRefused, match=r"a copy differs on rank .*1: norm"):
        engine.prepare(1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_that_fails_on_one_rank_leaves_no_rank_prepared(engine: ToyEngine, rank: int) -> None:
    version = engine.step()
    Failing(engine, "join", rank, 1)
    with pytest.raises(EngineRefused, match="failed by a test"):
        engine.prepare(version)
    engine.wire.edit = lambda rank, call, reply: reply
    assert {str(one._dcr_session.status().state) for one in engine.workers} == {"none"}
    assert engine.refit(version).verdict is Verdict.COMMITTED


def test_versions_must_follow_one_another(engine: ToyEngine) -> None:
    for _ in range(3):
        engine.step()
    txn = engine.transaction(1, 2, 3)
    with pytest.raises(EngineRefused, match="made from 2, not from 1"):
        engine.ask(messages.Prepare, Prepared, txn=msgspec.structs.replace(txn, hops=[txn.hops[0], txn.hops[2]]))
    with pytest.raises(EngineRefused, match="no versions"):
        engine.ask(messages.Prepare, Prepared, txn=msgspec.structs.replace(txn, hops=[]))


# -- routes and caps --------------------------------------------------------------------------------------------------


def test_a_route_is_one_change_that_rolls_back_to_its_beginning(engine: ToyEngine) -> None:
    for _ in range(3):
        engine.step()
    assert engine.prepare(1, 2, 3).fits == 3
    faults.inject("flip", times=4)
    assert engine.swap().version == 0
    assert engine.holds(0)
    faults.inject("flip", times=0)
    engine.prepare(1, 2, 3, name="again")
    assert engine.swap("again").version == 3
    assert engine.holds(3)


def test_a_route_over_the_cap_of_any_rank_stops_where_all_ranks_can(tmp_path: Path) -> None:
    engine = ToyEngine(tmp_path, cap=1200).ready()
    for _ in range(4):
        engine.step(0.15)
    prepared = engine.prepare(1, 2, 3, 4)
    assert 1 <= prepared.fits < 4
    swapped = engine.swap()
    assert swapped.version == prepared.fits
    assert engine.holds(prepared.fits)
    assert engine.host.shown == str(prepared.fits)


def test_one_version_over_the_cap_is_exhausted(tmp_path: Path) -> None:
    engine = ToyEngine(tmp_path, cap=300).ready()
    engine.step(0.9)
    with pytest.raises(ResourceExhausted):
        engine.prepare(1)
    assert engine.holds(0)
    assert engine.host.running


# -- versions that change nothing here --------------------------------------------------------------------------------


def unchanged(engine: ToyEngine, *, touch: str = "") -> int:
    """A version that leaves everything as it is, but one tensor that no rank holds."""
    fresh = [lanes.copy() for lanes in engine.lanes[-1]]
    if touch:
        fresh[LAYOUT.index(touch)][:3] ^= 1
    engine.lanes.append(fresh)
    return len(engine.lanes) - 1


@pytest.mark.parametrize("touch", ["", "head"])
def test_a_version_that_changes_nothing_here_is_committed_without_a_pause_or_a_cache_reset(
    engine: ToyEngine, touch: str
) -> None:
    version, rests = unchanged(engine, touch=touch), engine.host.rests
    assert engine.prepare(version).changed == 0
    engine.wire.sent.clear()
    engine.host.busy = True  # a pause would have to wait
    swapped = engine.swap()
    assert (swapped.verdict, swapped.version, swapped.serving) == (Verdict.COMMITTED, version, True)
    assert (swapped.pause, swapped.tries) == (0.0, 0)
    assert engine.host.rests == rests
    assert [op for op in engine.wire.sent if op != "status"] == ["check", "drop"]
    assert (engine.status().version, engine.status().prepared) == (version, None)
    assert engine.host.shown == f"v{version}"
    assert engine.swap() == swapped == engine.ask(messages.Outcome, Swapped, txn="txn")
    engine.host.busy = False
    assert engine.refit(engine.step(), name="next").verdict is Verdict.COMMITTED
    assert engine.holds(version + 1)


def test_a_paused_engine_stays_paused_over_a_version_without_changes(engine: ToyEngine) -> None:
    engine.host.halt()
    swapped = engine.refit(unchanged(engine))
    assert (swapped.version, swapped.serving) == (1, False)


def test_a_version_without_changes_is_not_committed_over_weights_that_somebody_wrote(engine: ToyEngine) -> None:
    engine.prepare(unchanged(engine))
    for one in engine.workers:
        one.reload_weights()
    with pytest.raises(EngineRefused, match="not known"):
        engine.swap()
    assert (engine.status().version, engine.host.running) == (None, False)


def test_a_change_among_versions_without_one_is_written(engine: ToyEngine) -> None:
    unchanged(engine)
    engine.step()
    unchanged(engine)
    assert engine.prepare(1, 2, 3).changed > 0
    rests = engine.host.rests
    assert engine.swap().version == 3
    assert engine.host.rests == rests + 1
    assert engine.holds(3)
