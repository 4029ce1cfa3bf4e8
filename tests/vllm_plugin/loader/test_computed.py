"""Tensors that a loader computes with: fed whole, bit for bit what a fresh load gives, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.vllm.computing_model import LAYOUT, LOADED, Computing, drawn, loaded, next_of, place, state
from support.vllm.toy_engine import ToyEngine, ToyWorker
from support.vllm.worker_rig import Driver, Version, Worker, vector, write_version

from dcr_daemon.checkpoint.safetensors import write_safetensors
from dcr_daemon.engine import messages
from dcr_daemon.engine.port import Swapped, TensorClass, Verdict
from dcr_daemon.errors import Corrupt, EngineRefused
from dcr_daemon.vllm_plugin import calls
from dcr_daemon.vllm_plugin.calls import Code, HopFiles, Op, TensorHandling, TxnState
from dcr_daemon.vllm_plugin.loader import place_model
from dcr_daemon.vllm_plugin.settings import Settings
from dcr_daemon.vllm_plugin.weights import faults


class Case:
    """A worker over the model, and its versions with the files that come beside them."""

    def __init__(self, home: Path, kind: type[Computing]) -> None:
        self.home, self.kind = home, kind
        self.states = [drawn(0)]
        self.model = loaded(self.states[0], kind)
        self.driver = Driver(Worker(self.model, None))
        self.attached = self.driver.attach(LAYOUT, home)

    def step(self) -> int:
        self.states.append(next_of(self.states[-1], len(self.states)))
        return len(self.states) - 1

    def beside(self, version: int, *tensors: int) -> tuple[str, str]:
        """The file of some tensors (default: the loaded ones) at a version, and its vector's."""
        path, sums = self.home / f"loaded-{version}-{len(tensors)}.safetensors", self.home / f"vector-{version}.bin"
        path.unlink(missing_ok=True)
        write_safetensors(path, [(LAYOUT[t], self.states[version][t]) for t in tensors or LOADED])
        sums.write_bytes(vector(LAYOUT, self.states[version]).astype("<u8").tobytes())
        return str(path), str(sums)

    def hop(self, version: int, **fields: Any) -> Version:
        old, new = self.states[version - 1], self.states[version]
        made = write_version(self.home / "chunks", LAYOUT, old, new, version=version)
        beside, after = self.beside(version)
        plain = {"version": version, "base": version - 1, "attempt": version * 10, "chunks": made.hop.chunks}
        return Version(HopFiles(**{**plain, "loaded": beside, "after": after, **fields}), made.segments)

    def holds(self, version: int) -> bool:
        """Every byte is that of a fresh load."""
        return state(self.model) == state(loaded(self.states[version], self.kind))

    def prepare_fails(self, hops: list[Version]) -> calls.Reply:
        self.driver.ok(Op.START, id="t", kind="prepare", hops=[hop.hop for hop in hops])
        self.driver.finish("t")
        return self.driver.reply(Op.JOIN, id="t")


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Case]]:
    monkeypatch.setattr(place_model, "attach_model", lambda model, *rest: place(model))
    monkeypatch.setattr(faults, "ENABLED", True)
    yield lambda kind=Computing: Case(tmp_path, kind)
    for name in faults.NAMES:
        faults.inject(name, times=0)


def test_what_the_loader_computes_is_classed_as_loaded_and_nothing_else() -> None:
    placement, _ = place(loaded(drawn(0)))
    assert placement.refusals == {}
    assert placement.held == [
        TensorHandling.PLACED if spec.name == "w" else TensorHandling.LOADER_COMPUTED for spec in LAYOUT
    ]
    assert placement.computed[LAYOUT.index("half.b")] == ("halves",)
    assert {row.parameter for row in placement.rows} == {"w"}


def test_parameters_after_several_versions_are_those_of_a_fresh_load(make) -> None:
    case = make()
    for name in ("one", "two", "three"):
        version = case.step()
        before = state(case.model)
        case.driver.prepare(name, [case.hop(version)])
        assert state(case.model) == before, "the loader ran on scratch"
        case.driver.swap(name)
        case.driver.ok(Op.COMMIT, txn=name)
        assert case.holds(version)


def test_of_several_versions_the_last_ones_bytes_are_fed_once(make) -> None:
    case = make()
    case.step(), case.step()
    case.driver.prepare("t", [case.hop(1, loaded="", after=""), case.hop(2)])
    case.driver.swap("t")
    assert case.holds(2)


def test_apply_and_rollback_can_be_repeated_in_any_order(make) -> None:
    case = make()
    case.step()
    case.driver.prepare("t", [case.hop(1)])
    case.driver.swap("t")
    for op, version in ((Op.APPLY, 1), (Op.ROLLBACK, 0), (Op.APPLY, 1), (Op.ROLLBACK, 0), (Op.ROLLBACK, 0)):
        case.driver.ok(op, txn="t")
        assert case.holds(version)
    assert case.driver.ok(Op.CLOSE, calls.Status, txn="t").state == TxnState.NONE
    assert case.holds(0)


def test_a_write_that_does_not_arrive_is_no_success(make) -> None:
    case = make()
    case.step()
    case.driver.prepare("t", [case.hop(1)])
    for op in (Op.APPROVE, Op.CHECK, Op.BEGIN):
        case.driver.ok(op, txn="t")
    faults.inject("feed")
    assert "did not take" in case.driver.reply(Op.APPLY, txn="t").error
    assert not case.driver.reply(Op.COMMIT, txn="t").ok
    case.driver.ok(Op.ROLLBACK, txn="t")
    assert case.holds(0)


def test_a_change_without_the_bytes_that_it_needs_is_refused(make) -> None:
    case = make()
    case.step()
    reply = case.prepare_fails([case.hop(1, loaded="", after="")])
    assert (reply.code, "A_log" in reply.error) == (Code.REFUSED, True)


@pytest.mark.parametrize("spoil", ["other version", "a tensor missing"])
def test_bytes_that_are_not_the_versions_are_refused(make, spoil: str) -> None:
    case = make()
    case.step()
    file = case.beside(0)[0] if spoil == "other version" else case.beside(1, *LOADED[1:])[0]
    reply = case.prepare_fails([case.hop(1, loaded=file)])
    assert (reply.code, "A_log" in reply.error) == (Code.CORRUPT, True)
    assert case.holds(0)


def test_a_comparison_names_what_live_memory_does_not_hold(make) -> None:
    case = make()
    case.step()
    for version, differ in ((0, []), (1, ["A", "bias", "down", "halves"])):
        file, sums = case.beside(version)
        case.driver.ok(Op.START, id=f"c{version}", kind="compare", loaded=file, vector=sums)
        case.driver.finish(f"c{version}")
        assert case.driver.ok(Op.JOIN, calls.ComparedRank, id=f"c{version}").differ == differ
    assert case.holds(0)


def test_a_load_feeds_from_the_anchors_files(make) -> None:
    case = make()
    case.step()
    everything, sums = case.beside(1, *range(len(LAYOUT)))
    case.driver.ok(Op.BEGIN, txn="l", kind="load")
    case.driver.ok(Op.START, id="l", kind="load", files=[everything], vector=sums)
    case.driver.finish("l")
    assert not case.driver.reply(Op.COMMIT, txn="l").ok, "not before the loader has run"
    case.driver.ok(Op.JOIN, calls.JobStatus, id="l")
    case.driver.ok(Op.COMMIT, txn="l")
    assert case.holds(1)


class Fused(Computing):
    """One half is copied as it is into the parameter that the other is cast into."""

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if name == "w":
            self.halves.data[0].copy_(tensor[0])
        super().load_one(name, tensor)


class Postprocessing(Computing):
    """Given a part of the checkpoint, it scales a parameter that belongs to the rest."""

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        given = dict(weights)
        super().load_weights(iter(given.items()))
        if "w" not in given:
            self.w.data.mul_(2)


def test_a_parameter_shared_with_exact_tensors_refuses_by_name() -> None:
    placement, _ = place(loaded(drawn(0), Fused))
    assert placement.refusals.keys() == {"half.a", "half.b"}
    assert all("halves also holds tensors" in reason for reason in placement.refusals.values())


def test_a_loader_that_reaches_beyond_what_it_is_given_is_refused() -> None:
    placement, _ = place(loaded(drawn(0), Postprocessing))
    assert any("w also holds tensors" in reason for reason in placement.refusals.values())


def test_above_the_cap_all_are_refused_by_name_and_size() -> None:
    placement, _ = place(loaded(drawn(0)), cap=100)
    assert placement.refusals.keys() == {LAYOUT[tensor].name for tensor in LOADED}
    assert all("the cap is 100" in reason for reason in placement.refusals.values())


class Accumulating(Computing):
    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if name == "gate.bias" and not self.bias.is_meta:
            self.bias.add_(tensor)
        else:
            super().load_one(name, tensor)


class Straying(Computing):
    """Reaches for another parameter only when it is real, so that no recording shows it."""

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        super().load_one(name, tensor)
        if name == "A_log" and not self.A.is_meta and bool(self.w.any()):
            self.w.data.zero_()


class Failing(Computing):
    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if name == "down" and not self.A.is_meta and bool(self.w.any()):
            raise KeyError("no such layer")
        super().load_one(name, tensor)


@pytest.mark.parametrize(
    ("kind", "word"), [(Accumulating, "twice"), (Straying, "live parameter"), (Failing, "no such layer")]
)
def test_a_loader_that_misbehaves_on_scratch_changes_nothing(make, kind: type[Computing], word: str) -> None:
    case = make(kind)
    case.step()
    before, parameters = state(case.model), dict(case.model.named_parameters())
    reply = case.prepare_fails([case.hop(1)])
    assert (reply.ok, reply.dirty) == (False, False)
    assert word in reply.error
    assert state(case.model) == before
    assert all(one is parameters[name] for name, one in case.model.named_parameters()), "no twin stays behind"


# -- a whole engine ---------------------------------------------------------------------------------------------------


class ComputingWorker(ToyWorker):
    model = staticmethod(lambda lanes, rank, of: loaded(lanes))


class ComputingEngine(ToyEngine):
    """Two ranks, each with all of the model."""

    layout = LAYOUT

    def first(self) -> Any:
        return drawn(0)

    def worker(self, rank: int, of: int) -> ToyWorker:
        return ComputingWorker(self.lanes[0], rank, of)

    def step(self, share: float = 0.0) -> int:
        self.lanes.append(next_of(self.lanes[-1], len(self.lanes)))
        return len(self.lanes) - 1

    def beside(self, version: int) -> str:
        path = self.home / f"loaded-{version}.safetensors"
        if not path.exists():
            write_safetensors(path, [(LAYOUT[t], self.lanes[version][t]) for t in LOADED])
        return str(path)

    def hop(self, version: int) -> Any:
        return msgspec.structs.replace(super().hop(version), loaded=self.beside(version))

    def holds(self, version: int) -> bool:
        return all(state(one.toy) == state(loaded(self.lanes[version])) for one in self.workers)

    def prove(self, version: int, *, beside: int | None = None) -> None:
        file = self.beside(version if beside is None else beside)
        self.ask(messages.Prove, version=version, vector=self.vector_file(version), label=f"v{version}", loaded=file)

    def ready(self) -> ComputingEngine:
        self.attach()
        self.prove(0)
        self.ask(messages.Serve)
        return self


@pytest.fixture
def engine(make, tmp_path: Path) -> ComputingEngine:
    return ComputingEngine(tmp_path).ready()


def test_an_engine_says_what_it_computes_and_leaves_it_out_of_its_vector(engine: ComputingEngine) -> None:
    attached = engine.attach()
    kinds = [TensorClass.EXACT if spec.name == "w" else TensorClass.LOADER_COMPUTED for spec in LAYOUT]
    assert attached.classes == kinds
    found, wanted = np.frombuffer(attached.vector, "<u8"), engine.vector(0)
    assert [int(x) for x in found] == [
        int(x) if k is TensorClass.EXACT else 0 for x, k in zip(wanted, kinds, strict=True)
    ]


def test_versions_are_committed_on_all_ranks_and_the_pause_state_kept(engine: ComputingEngine) -> None:
    for version in (1, 2, 3):
        engine.step()
        swapped = engine.refit(version, name=f"t{version}")
        assert (swapped.verdict, swapped.serving, swapped.tries) == (Verdict.COMMITTED, True, 1)
        assert engine.holds(version)


def test_a_version_that_changes_only_what_the_loader_computes_is_written_in_a_pause(engine: ComputingEngine) -> None:
    fresh = next_of(engine.lanes[-1], 1)
    fresh[LAYOUT.index("w")] = engine.lanes[-1][LAYOUT.index("w")].copy()
    engine.lanes.append(fresh)
    assert engine.prepare(1).changed == 0
    rests = engine.host.rests
    swapped = engine.swap()
    assert (swapped.verdict, swapped.tries, engine.host.rests) == (Verdict.COMMITTED, 1, rests + 1)
    assert engine.holds(1)


def test_a_rank_that_does_not_take_it_once_is_tried_again(engine: ComputingEngine) -> None:
    engine.step()
    engine.prepare(1)
    faults.inject("feed", times=1)
    swapped = engine.swap()
    assert (swapped.verdict, swapped.tries, engine.holds(1)) == (Verdict.COMMITTED, 2, True)


def test_a_rank_that_never_takes_it_is_rolled_back_and_serves_on(engine: ComputingEngine) -> None:
    engine.step()
    engine.prepare(1)
    engine.wire.edit = lambda rank, call, reply: (
        {**reply, "ok": False, "error": "spoiled"} if call["op"] == Op.APPLY else reply
    )
    swapped = engine.swap()
    assert (swapped.verdict, swapped.serving, engine.holds(0)) == (Verdict.ROLLED_BACK, True, True)
    engine.wire.edit = lambda rank, call, reply: reply
    assert engine.refit(1, name="again").verdict is Verdict.COMMITTED
    assert engine.holds(1)


def test_what_a_dead_owner_left_begun_is_settled_by_the_next(engine: ComputingEngine) -> None:
    engine.step()
    engine.prepare(1)
    engine.wire.edit = lambda rank, call, reply: (
        {**reply, "ok": False, "error": "spoiled"} if call["op"] in (Op.APPLY, Op.ROLLBACK) else reply
    )
    assert engine.swap().verdict is Verdict.BEGUN
    engine.wire.edit = lambda rank, call, reply: reply
    assert engine.attach().adopted == "txn"
    assert engine.ask(messages.FinishAdopted, Swapped, txn="txn").verdict is Verdict.COMMITTED
    assert engine.holds(1)


def test_a_proof_needs_the_bytes_and_they_must_be_the_versions(engine: ComputingEngine) -> None:
    engine.step()
    with pytest.raises(EngineRefused, match="A_log"):
        engine.ask(messages.Prove, version=0, vector=engine.vector_file(0), label="v0")
    with pytest.raises(Corrupt, match="A_log"):
        engine.prove(0, beside=1)
    assert engine.holds(0)


def test_proving_what_is_live_writes_nothing(engine: ComputingEngine) -> None:
    engine.attach()
    engine.wire.sent.clear()
    engine.prove(0)
    assert Op.BEGIN not in engine.wire.sent
    assert engine.status().serving


def test_a_proof_by_the_exact_tensors_feeds_the_others_once(engine: ComputingEngine) -> None:
    """Two versions with equal exact tensors: the server was started from the older one."""
    engine.step()
    engine.lanes[1][LAYOUT.index("w")] = engine.lanes[0][LAYOUT.index("w")]
    engine.attach()
    engine.prove(1)
    assert engine.holds(1)
    assert (engine.status().version, engine.status().serving, engine.status().begun) == (1, True, None)
    engine.wire.sent.clear()
    engine.prove(1)
    assert Op.BEGIN not in engine.wire.sent


def test_a_load_from_an_anchor_repairs_all_of_it(engine: ComputingEngine) -> None:
    engine.step()
    engine.workers[1].toy.bias.zero_()
    files, sums = [engine.anchor(1)], engine.vector_file(1)
    ended = engine.ask(messages.Load, Swapped, version=1, files=files, vector=sums, label="v1")
    assert (ended.verdict, engine.holds(1)) == (Verdict.COMMITTED, True)


def test_over_all_ranks_the_cap_holds_too(make, tmp_path: Path) -> None:
    engine = ComputingEngine(tmp_path)
    engine.core.settings = Settings(computed_cap=100)
    with pytest.raises(EngineRefused, match=r"A_log.*the cap is 100"):
        engine.attach()
