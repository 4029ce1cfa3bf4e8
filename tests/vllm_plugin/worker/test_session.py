"""One worker's states: every edge of the transaction, ownership, jobs, the guard, whoever else writes weights."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.vllm.toy_model import LAYOUT, Toy, heldless, loaded, placed
from support.vllm.worker_rig import Driver, Stub, random_lanes, step, vector, write_version

from dcr_daemon.checkpoint.safetensors import write_safetensors
from dcr_daemon.codec.chunk import Codec
from dcr_daemon.vllm_plugin import calls
from dcr_daemon.vllm_plugin.calls import EXIT_DIRTY, Code, JobState, Op, TxnState
from dcr_daemon.vllm_plugin.loader import place_model
from dcr_daemon.vllm_plugin.weights import faults
from dcr_daemon.vllm_plugin.weights.memory import HostMemory
from dcr_daemon.vllm_plugin.worker import extension
from dcr_daemon.vllm_plugin.worker.session import WorkerSession

LANES = heldless(random_lanes(LAYOUT, 1))


class Hosted(Stub, extension.WorkerExtension):
    """The toy in a worker, with guards and wraps as in vLLM's."""

    def __init__(self, toy: Toy) -> None:
        super().__init__(toy, None)
        self._dcr_session = WorkerSession(rank=0, model=toy, config=None, platform="cpu", device=torch.device("cpu"))
        extension.guard(self, self._dcr_session)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    def attach(model: Any, config: Any, layout: Any, platform: str) -> Any:
        placement, homes = placed(model)
        return placement, homes.live

    monkeypatch.setattr(place_model, "attach_model", attach)  # how vLLM's loader is recorded has its own tests
    monkeypatch.setattr(faults, "ENABLED", True)
    yield loaded(LANES)
    for name in faults.NAMES:
        faults.inject(name, times=0)


@pytest.fixture
def driver(toy: Toy, tmp_path: Path) -> Driver:
    driver = Driver(Hosted(toy))
    driver.attach(LAYOUT, tmp_path)
    return driver


@pytest.fixture
def hops(tmp_path: Path):
    states = [LANES]
    versions = []
    for number in range(1, 3):
        states.append(heldless(step(states[-1], 0.2, number)))
        versions.append(write_version(tmp_path / "chunks", LAYOUT, states[-2], states[-1], version=number))
    return states, versions


def refused(driver: Driver, op: Op, code: Code = Code.REFUSED, /, **arg: Any) -> str:
    reply = driver.reply(op, **arg)
    assert (reply.ok, reply.code) == (False, code), reply
    return reply.error


def test_the_whole_way_and_the_outcome_kept(driver: Driver, toy: Toy, hops) -> None:
    states, versions = hops
    prepared = driver.prepare("t", versions)
    assert driver.ok(Op.APPROVE, calls.Status, txn="t").state == TxnState.PREPARED
    assert driver.ok(Op.CHECK, calls.Status, txn="t").dirty is False
    begun = driver.ok(Op.BEGIN, calls.Status, txn="t")
    assert (begun.state, begun.dirty, toy.state()) == (TxnState.BEGUN, True, loaded(LANES).state())
    assert driver.ok(Op.APPLY, calls.Sums, txn="t") == prepared.after
    done = driver.ok(Op.COMMIT, calls.Status, txn="t")
    assert (done.state, done.dirty, done.txn, done.outcomes) == (TxnState.NONE, False, None, {"t": "committed"})
    assert driver.ok(Op.COMMIT, calls.Status, txn="t") == done, "a repeated commit says the same"
    assert toy.state() == loaded(states[-1]).state()


def test_steps_out_of_order_are_refused(driver: Driver, hops) -> None:
    _, versions = hops
    for op in (Op.APPROVE, Op.CHECK, Op.BEGIN, Op.APPLY, Op.COMMIT, Op.ROLLBACK, Op.CLOSE):
        assert "there is none" in refused(driver, op, txn="t")
    driver.prepare("t", versions)
    for op in (Op.CHECK, Op.BEGIN, Op.APPLY, Op.COMMIT, Op.ROLLBACK):
        assert "held" in refused(driver, op, txn="t")
    driver.ok(Op.APPROVE, txn="t")
    for op in (Op.APPLY, Op.COMMIT, Op.ROLLBACK):
        assert "prepared" in refused(driver, op, txn="t")
    driver.ok(Op.BEGIN, txn="t")
    assert "not written" in refused(driver, Op.COMMIT, txn="t")
    assert "not rolled back" in refused(driver, Op.CLOSE, txn="t")
    for op in (Op.DROP, Op.START):
        arg = {"id": "x", "kind": "prepare"} if op is Op.START else {}
        assert "begun" in refused(driver, op, **arg)
    driver.ok(Op.APPLY, txn="t")
    assert "is begun" in refused(driver, Op.COMMIT, txn="other")


def test_back_and_forth_until_closed(driver: Driver, toy: Toy, hops) -> None:
    states, versions = hops
    prepared = driver.prepare("t", versions)
    driver.swap("t")
    assert driver.ok(Op.ROLLBACK, calls.Sums, txn="t") == prepared.before
    assert "rolled back" in refused(driver, Op.COMMIT, txn="t"), "a rolled back transaction is not committed"
    assert driver.ok(Op.APPLY, calls.Sums, txn="t") == prepared.after
    assert toy.state() == loaded(states[-1]).state()
    driver.ok(Op.ROLLBACK, txn="t")
    closed = driver.ok(Op.CLOSE, calls.Status, txn="t")
    assert (closed.dirty, closed.outcomes) == (False, {"t": "rolled back"})
    assert driver.ok(Op.CLOSE, calls.Status, txn="t") == closed
    assert toy.state() == loaded(LANES).state()


def test_a_failing_rollback_stays_dirty_and_can_be_repeated(driver: Driver, toy: Toy, hops) -> None:
    driver.prepare("t", hops[1])
    driver.swap("t")
    driver.ok(Op.FAULT, name="rollback")
    reply = driver.reply(Op.ROLLBACK, txn="t")
    assert (reply.ok, reply.dirty) == (False, True)
    driver.ok(Op.ROLLBACK, txn="t")
    driver.ok(Op.CLOSE, txn="t")
    assert toy.state() == loaded(LANES).state()


def test_an_attach_fences_the_owner_before_and_drops_what_is_prepared(driver: Driver, hops, tmp_path: Path) -> None:
    driver.prepare("t", hops[1])
    other = Driver(driver.worker)
    other.token = 1
    assert other.attach(LAYOUT, tmp_path).adopted is None
    assert "token 1" in refused(driver, Op.APPROVE, Code.FENCED, txn="t")
    stale = driver.reply(Op.ATTACH, layout="x", layout_digest="x", cap=0)
    assert (stale.ok, stale.code) == (False, Code.FENCED)
    assert "there is none" in refused(other, Op.APPROVE, txn="t")


def test_a_begun_transaction_is_adopted_untouched(driver: Driver, toy: Toy, hops, tmp_path: Path) -> None:
    """The undo values of a begun transaction survive its owner (must E6)."""
    prepared = driver.prepare("t", hops[1])
    driver.swap("t")
    other = Driver(driver.worker)
    other.token = 1
    attached = other.attach(LAYOUT, tmp_path, cap=1 << 10)
    assert (attached.adopted, attached.boxes, other.token) == ("t", [], 2)
    refused(driver, Op.ROLLBACK, Code.FENCED, txn="t")
    assert other.ok(Op.ROLLBACK, calls.Sums, txn="t") == prepared.before
    other.ok(Op.CLOSE, txn="t")
    assert toy.state() == loaded(LANES).state()


@pytest.mark.parametrize("name", ["reload_weights", "add_lora"])
def test_a_write_by_somebody_else_voids_what_is_known(driver: Driver, hops, tmp_path: Path, name: str) -> None:
    driver.prepare("t", hops[1])
    driver.ok(Op.APPROVE, txn="t")
    getattr(driver.worker, name)(None)
    status = driver.ok(Op.STATUS, calls.Status)
    assert (status.generation, status.changed_by, status.state) == (1, name, TxnState.NONE)
    assert name in refused(driver, Op.START, Code.UNPROVED, id="x", kind="fingerprint")
    driver.attach(LAYOUT, tmp_path)
    driver.prepare("t2", hops[1])


def test_a_write_by_somebody_else_inside_a_transaction_leaves_only_the_way_back(driver: Driver, hops) -> None:
    driver.prepare("t", hops[1])
    driver.swap("t")
    driver.worker.reload_weights()
    refused(driver, Op.COMMIT, Code.UNPROVED, txn="t")
    driver.ok(Op.ROLLBACK, txn="t")
    assert driver.ok(Op.CLOSE, calls.Status, txn="t").generation == 1


def test_moved_storage_is_found_before_the_first_write(driver: Driver, toy: Toy, hops) -> None:
    driver.prepare("t", hops[1])
    driver.ok(Op.APPROVE, txn="t")
    toy.o.data = toy.o.data.clone()
    assert "storage of o" in refused(driver, Op.CHECK, Code.UNPROVED, txn="t")
    assert "storage of o" in refused(driver, Op.BEGIN, Code.UNPROVED, txn="t")
    assert driver.ok(Op.STATUS, calls.Status).dirty is False


def test_a_running_job_is_waited_for_by_nobody_but_the_one_who_cancels(driver: Driver, hops) -> None:
    driver.ok(Op.FAULT, name="slow", times=10_000, seconds=0.05)
    driver.ok(Op.START, id="t", kind="prepare", hops=[v.hop for v in hops[1]])
    assert "is running" in refused(driver, Op.JOIN, id="t") or "queued" in refused(driver, Op.JOIN, id="t")
    assert "join or cancel" in driver.reply(Op.START, id="x", kind="fingerprint").hint
    refused(driver, Op.APPROVE, txn="t")
    driver.ok(Op.CANCEL, id="t")
    assert driver.finish("t").state == JobState.CANCELLED
    assert "cancelled" in refused(driver, Op.JOIN, id="t")
    driver.ok(Op.FAULT, name="slow", times=0)
    driver.prepare("t2", hops[1])


@pytest.mark.parametrize("how", ["attach", "drop", "reload"])
def test_whoever_needs_quiet_gets_it(driver: Driver, hops, tmp_path: Path, how: str) -> None:
    driver.ok(Op.FAULT, name="slow", times=10_000, seconds=0.05)
    driver.ok(Op.START, id="t", kind="prepare", hops=[v.hop for v in hops[1]])
    if how == "attach":
        driver.attach(LAYOUT, tmp_path)
    elif how == "drop":
        driver.ok(Op.DROP)
    else:
        driver.worker.reload_weights()
    assert driver.ok(Op.POLL, calls.JobStatus, id="t").state == JobState.CANCELLED


def test_a_fingerprint_from_before_a_swap_is_void(driver: Driver, hops) -> None:
    driver.prepare("t", hops[1])
    driver.ok(Op.START, id="f", kind="fingerprint")
    driver.finish("f")
    driver.swap("t")
    driver.ok(Op.COMMIT, txn="t")
    assert "void" in refused(driver, Op.JOIN, Code.UNPROVED, id="f")


def test_a_dropped_transaction_does_not_come_back(driver: Driver, hops) -> None:
    driver.prepare("t", hops[1])
    driver.ok(Op.DROP)
    assert "void" in refused(driver, Op.JOIN, Code.UNPROVED, id="t")
    assert "there is none" in refused(driver, Op.APPROVE, txn="t")


def test_a_scrub_leaves_a_prepared_transaction_alone_and_is_cancelled_by_its_begin(driver: Driver, hops) -> None:
    prepared = driver.prepare("t", hops[1])
    driver.ok(Op.FAULT, name="slow", times=10_000, seconds=0.2)
    driver.ok(Op.START, id="f", kind="fingerprint")
    assert driver.swap("t") == prepared.after
    assert driver.ok(Op.POLL, calls.JobStatus, id="f").state in (JobState.CANCELLED, JobState.DONE)
    driver.ok(Op.COMMIT, txn="t")


def test_a_damaged_chunk_is_a_corrupt_reply_and_a_missing_one_a_refusal(driver: Driver, hops) -> None:
    path = Path(hops[1][0].hop.chunks[0])
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(bytes(body))
    for code in (Code.CORRUPT, Code.REFUSED):
        driver.ok(Op.START, id="t", kind="prepare", hops=[hops[1][0].hop])
        assert driver.finish("t").state == JobState.FAILED
        refused(driver, Op.JOIN, code, id="t")
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO])
def test_a_process_or_disk_in_trouble_refuses_no_version(
    driver: Driver, hops, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Two refusals would poison the version (must P4)."""

    def fail(path: Path) -> bytes:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        driver.ok(Op.START, id="t", kind="prepare", hops=[hops[1][0].hop])
        driver.finish("t")
        assert os.strerror(number) in refused(driver, Op.JOIN, Code.EXHAUSTED, id="t")
    driver.prepare("u", hops[1])


@pytest.mark.parametrize("error", [MemoryError("no room"), torch.OutOfMemoryError("no room on the device")])
def test_a_transaction_that_memory_has_no_room_for_refuses_no_version(
    driver: Driver, hops, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(HostMemory, "set_groups", fail)
        driver.ok(Op.START, id="t", kind="prepare", hops=[hops[1][0].hop])
        driver.finish("t")
    assert "no room" in refused(driver, Op.JOIN, Code.EXHAUSTED, id="t")
    driver.prepare("u", hops[1])


@pytest.mark.parametrize("end", ["commit", "rollback", "drop"])
def test_the_memory_of_a_transaction_is_free_when_it_has_ended(
    driver: Driver, hops, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    counts: list[int] = []
    set_groups = HostMemory.set_groups

    def counting(memory: HostMemory, groups: Any) -> None:
        counts.append(len(groups))
        set_groups(memory, groups)

    monkeypatch.setattr(HostMemory, "set_groups", counting)
    driver.prepare("t", hops[1])
    if end == "drop":
        driver.ok(Op.DROP)
    else:
        driver.swap("t")
        if end == "rollback":
            driver.ok(Op.ROLLBACK, calls.Sums, txn="t")
        driver.ok(Op.COMMIT if end == "commit" else Op.CLOSE, txn="t")
    assert counts[0] > 0
    assert counts[-1] == 0


def test_a_lack_of_descriptors_in_a_load_is_an_exhausted_reply(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.ok(Op.BEGIN, txn="L", kind="load")
    path = anchor(tmp_path / "a.safetensors", LANES)

    def fail(*arguments: Any, **keywords: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr("mmap.mmap", fail)  # a map takes a descriptor of its own
        assert load(driver, path).code == Code.EXHAUSTED
    assert load(driver, path).state == JobState.DONE, "and may be tried again"


def test_a_version_over_the_cap_is_an_exhausted_reply(driver: Driver, hops, tmp_path: Path) -> None:
    driver.attach(LAYOUT, tmp_path, cap=64)
    driver.ok(Op.START, id="t", kind="prepare", hops=[v.hop for v in hops[1]])
    driver.finish("t")
    assert "64 bytes" in refused(driver, Op.JOIN, Code.EXHAUSTED, id="t")


def anchor(path: Path, lanes, *, split: str = "", drop: str = "") -> str:
    """A safetensors file of all tensors, one of them optionally cut into regions."""
    from dcr_daemon.canonical.layout import TensorSpec

    items, metadata = [], {}
    for spec, bits in zip(LAYOUT, lanes, strict=True):
        if spec.name == drop:
            continue
        if spec.name != split:
            items.append((spec, bits))
            continue
        rows, columns = spec.shape
        matrix = bits.reshape(rows, columns)
        for n, (first, last) in enumerate(((0, 3), (3, columns))):
            part = TensorSpec(f"{spec.name}#{n}", spec.dtype, (rows, last - first))
            metadata[part.name] = f'["{spec.name}", {first}, [{rows}, {last - first}], [{columns}, 1]]'
            items.append((part, np.ascontiguousarray(matrix[:, first:last])))
    write_safetensors(path, items, metadata=metadata)
    return str(path)


def load(driver: Driver, path: str) -> calls.JobStatus:
    driver.ok(Op.START, id="j", kind="load", files=[path])
    return driver.finish("j")


@pytest.mark.parametrize("split", ["", "o"], ids=["whole", "in regions"])
def test_a_dense_load_goes_forward_only(driver: Driver, toy: Toy, tmp_path: Path, split: str) -> None:
    other = heldless(random_lanes(LAYOUT, 7))
    assert "needs a begun load" in refused(driver, Op.START, id="j", kind="load")
    driver.ok(Op.BEGIN, txn="L", kind="load")
    assert "not written" in refused(driver, Op.COMMIT, txn="L")
    assert load(driver, anchor(tmp_path / "a.safetensors", other, split=split)).state == JobState.DONE
    driver.ok(Op.JOIN, id="j")
    assert "cannot be applied or rolled back" in refused(driver, Op.ROLLBACK, txn="L")
    attached_boxes = driver.worker._dcr_session._attachment.placement.boxes
    probe = calls.AttachedRank(token=1, adopted=None, boxes=attached_boxes)
    wanted = vector(LAYOUT, other)
    wanted[LAYOUT.index("head")] = 0  # absent: left out on both sides
    assert (driver.fingerprint(LAYOUT, probe) == wanted).all()
    assert driver.ok(Op.COMMIT, calls.Status, txn="L").dirty is False
    assert toy.state() == loaded(other).state()


def test_an_anchor_that_lacks_a_tensor_writes_nothing(driver: Driver, toy: Toy, tmp_path: Path) -> None:
    driver.ok(Op.BEGIN, txn="L", kind="load")
    path = anchor(tmp_path / "a.safetensors", random_lanes(LAYOUT, 7), drop="norm")
    assert load(driver, path).error.startswith("the anchor lacks norm")
    assert toy.state() == loaded(LANES).state()
    body = Path(anchor(tmp_path / "b.safetensors", LANES)).read_bytes()
    for damaged in (body[:-3], body[:40], b"x", b"\xff" * 64):
        Path(path).write_bytes(damaged)
        assert load(driver, path).code == Code.CORRUPT
    assert load(driver, anchor(tmp_path / "c.safetensors", LANES)).state == JobState.DONE, "and may be tried again"


def test_no_input_makes_a_worker_raise(driver: Driver) -> None:
    for env in ({}, {"op": "nonsense", "call": "c"}, {"op": "join", "call": "c", "arg": 3}, None, [],
                {"op": "start", "call": "c", "token": driver.token, "arg": {"id": "x", "kind": "dance"}}):  # fmt: skip
        reply = calls.parse(driver.worker.dcr_call(env), calls.Reply)
        assert reply.ok is False
        assert reply.error


def test_faults_are_refused_outside_tests(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "ENABLED", False)
    assert "DCR_TEST_FAULTS" in refused(driver, Op.FAULT, name="apply")


def test_clean_workers_go_forward_and_a_dirty_one_ends_its_process(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parents[2])]!r}
import torch
from support.vllm.worker_rig import Stub
from dcr_daemon.vllm_plugin.worker import extension
from dcr_daemon.vllm_plugin.worker.session import WorkerSession
stub = Stub(torch.nn.Linear(1, 1), None)
rank = WorkerSession(rank=0, model=None, config=None, platform="cpu", device=torch.device("cpu"))
extension.guard(stub, rank)
assert stub.execute_model() == "output" and stub.forwards == 1
rank.dirty = True
try:
    getattr(stub, sys.argv[1])()
finally:
    print("still here")
"""
    for name in ("execute_model", "execute_dummy_batch"):
        done = subprocess.run(
            [sys.executable, "-c", script, name], capture_output=True, text=True, timeout=300, env=dict(os.environ)
        )
        assert (done.returncode, done.stdout) == (EXIT_DIRTY, ""), done.stderr


def test_a_cap_that_no_machine_has_is_an_exhausted_reply(driver: Driver, toy: Toy, tmp_path: Path) -> None:
    path = tmp_path / f"{LAYOUT.digest}.json"
    driver.token += 1
    error = refused(driver, Op.ATTACH, Code.EXHAUSTED, layout=str(path), layout_digest=LAYOUT.digest, cap=1 << 60)
    assert str(1 << 60) in error
    refused(driver, Op.START, id="x", kind="fingerprint")
    driver.attach(LAYOUT, tmp_path)
    driver.ok(Op.START, id="x", kind="fingerprint")


def test_an_unforeseen_failure_is_a_reply_that_still_tells_the_state(driver: Driver, hops) -> None:
    driver.prepare("t", hops[1])
    driver.ok(Op.FAULT, name="apply")
    for op in (Op.APPROVE, Op.BEGIN):
        driver.ok(op, txn="t")
    driver.worker.reload_weights()
    reply = driver.reply(Op.APPLY, txn="t")
    assert (reply.ok, reply.code, reply.dirty, reply.generation) == (False, Code.FAILED, True, 1)
    assert "InjectedFault" in reply.error


def test_nothing_compiles_once_attached(driver: Driver, hops, tmp_path: Path) -> None:
    """A compile on the background thread would stop generation for seconds."""
    from dcr_daemon.codec import kernels as codec
    from dcr_daemon.engine.kernels import match
    from dcr_daemon.vllm_plugin.weights import kernels

    used = [codec.unpack_gaps, codec.unpack_bitmask, codec.unpack_steps, kernels.locate, kernels.gather, match,
            kernels.sum_bits, kernels.write_groups, kernels.walk]  # fmt: skip
    compiled = [len(kernel.signatures) for kernel in used]
    states = [LANES]
    for number, (codec_name, share) in enumerate(itertools.product(list(Codec), (0.001, 0.02, 0.3, 1.0)), start=1):
        states.append(heldless(step(states[-1], share, number)))
        versions = [write_version(tmp_path / str(number), LAYOUT, *states[-2:], version=number, codec=codec_name)]
        driver.prepare(f"t{number}", versions)
        driver.swap(f"t{number}")
        driver.ok(Op.COMMIT, txn=f"t{number}")
    assert [len(kernel.signatures) for kernel in used] == compiled


def test_the_background_thread_is_nice_and_not_pinned(driver: Driver) -> None:
    native = driver.worker._dcr_session._background._native
    assert os.getpriority(os.PRIO_PROCESS, native) == 19
    assert os.sched_getaffinity(native) == os.sched_getaffinity(os.getppid()) | os.sched_getaffinity(0)
