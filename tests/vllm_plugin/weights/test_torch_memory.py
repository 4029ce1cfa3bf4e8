"""What the device memory takes from its device, and what happens when the device has no more: a counting device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.vllm.toy_model import LAYOUT, heldless, loaded, placed
from support.vllm.worker_rig import Driver, Worker, random_lanes, step, write_version
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcr_daemon.errors import ResourceExhausted
from dcr_daemon.vllm_plugin import calls
from dcr_daemon.vllm_plugin.calls import Code, Op
from dcr_daemon.vllm_plugin.loader import place_model
from dcr_daemon.vllm_plugin.loader.computed import ComputedParameter, write_computed
from dcr_daemon.vllm_plugin.weights.arena import Arena, ArenaFull, DeviceArena
from dcr_daemon.vllm_plugin.weights.memory import ValueSet
from dcr_daemon.vllm_plugin.weights.torch_memory import TorchMemory
from dcr_daemon.vllm_plugin.worker import attachment
from dcr_daemon.vllm_plugin.worker.prepare import Preparation

CPU = torch.device("cpu")
LANES = heldless(random_lanes(LAYOUT, 1))


class Device(TorchDispatchMode):
    """Counts the operations that return memory of their own, as allocations of a device; fails the one `fails`."""

    def __init__(self, fails: int = -1) -> None:
        super().__init__()
        self.count, self.fails = 0, fails

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        given = {_storage(value) for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)}
        made = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        if any(value.numel() and _storage(value) not in given for value in made):
            self.count += 1
            if self.count - 1 == self.fails:
                raise torch.OutOfMemoryError("the device is full")
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A worker whose model lies on a device: `TorchMemory` over host tensors."""

    def attach_model(model: Any, *_: Any) -> Any:
        placement, live_tensors = placed(model)
        return placement, live_tensors.live

    def open_memory(placement: Any, homes: Any, *, layout: Any, arena: Any) -> TorchMemory:
        return TorchMemory(placement, homes, layout=layout, arena=DeviceArena(1 << 16, CPU))

    monkeypatch.setattr(place_model, "attach_model", attach_model)
    monkeypatch.setattr(attachment, "open_memory", open_memory)
    driver = Driver(Worker(loaded(LANES), None))
    driver.attach(LAYOUT, tmp_path)
    return driver


@pytest.fixture
def version(tmp_path: Path) -> Any:
    return write_version(tmp_path / "v", LAYOUT, LANES, NEW, version=1)


NEW = heldless(step(LANES, 0.3, 2))


def memory_of(driver: Driver) -> TorchMemory:
    return driver.worker._dcr_session._attachment.live


def test_a_changed_bf16_element_takes_eight_bytes_on_the_device(tmp_path: Path) -> None:
    toy = loaded(LANES)
    placement, live_tensors = placed(toy)
    arena = DeviceArena(1 << 16, CPU)
    memory = TorchMemory(placement, live_tensors, layout=LAYOUT, arena=arena)
    version = write_version(tmp_path, LAYOUT, LANES, NEW, version=1)
    txn = Preparation(layout=LAYOUT, placement=placement, memory=memory, arena=Arena(1 << 20)).run("t", [version.hop])
    widths = {lanes.new.element_size(): lanes for lanes in memory._device_kernels._lanes}
    assert sorted(widths) == [1, 2, 4, 8]
    for width, lanes in widths.items():
        count = sum(group.element.size for group in txn.groups if group.new.itemsize == width)
        held = (lanes.element, lanes.old, lanes.new)
        assert sum(part.numel() * part.element_size() for part in held) == (4 + 2 * width) * count
    everything = sum(group.element.size * (4 + 2 * group.new.itemsize) for group in txn.groups)
    assert arena._used <= everything + 8 * len(txn.groups) + arena.alignment * 13, "and a sum for each group"


def test_nothing_is_allocated_in_the_pause(driver: Driver, version: Any) -> None:
    prepared = driver.prepare("t", [version])
    driver.ok(Op.APPROVE, txn="t")
    driver.ok(Op.BEGIN, txn="t")
    with Device() as device:
        assert driver.ok(Op.APPLY, calls.Sums, txn="t") == prepared.after
        assert driver.ok(Op.ROLLBACK, calls.Sums, txn="t") == prepared.before
        assert driver.ok(Op.APPLY, calls.Sums, txn="t") == prepared.after
        driver.ok(Op.COMMIT, txn="t")
    assert device.count == 0
    assert driver.worker.model_runner.get_model().state() == loaded(NEW).state()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_what_the_loader_computed_is_written_and_compared_without_memory_of_its_own(dtype: torch.dtype) -> None:
    old, new = (torch.tensor(values).to(dtype) for values in ([0.0, 1.0, 2.0], [0.0, 1.0, 3.0]))
    live = old.clone()
    parameter = ComputedParameter("p", live, old, new)
    with Device() as device:
        for side, other in ((ValueSet.NEW, ValueSet.OLD), (ValueSet.OLD, ValueSet.NEW)):
            write_computed([parameter], side)
            assert parameter.holds(side)
            assert not parameter.holds(other)
    assert device.count == 0
    assert torch.equal(live, old)


def test_a_full_device_in_prepare_refuses_no_version_and_leaves_the_weights(
    driver: Driver, version: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever allocation fails: the answer is "exhausted", and the next try succeeds."""
    set_groups, gather = TorchMemory.set_groups, TorchMemory.gather
    device = Device()

    def under(method: Any) -> Any:
        def wrapped(self: TorchMemory, *arguments: Any) -> Any:
            with device:
                return method(self, *arguments)

        return wrapped

    monkeypatch.setattr(TorchMemory, "set_groups", under(set_groups))
    monkeypatch.setattr(TorchMemory, "gather", under(gather))
    before = driver.worker.model_runner.get_model().state()
    driver.prepare("count", [version])
    allocations = device.count
    assert allocations > 0
    for fails in range(allocations):
        device.count, device.fails = 0, fails
        name = f"t{fails}"
        driver.ok(Op.START, id=name, kind="prepare", hops=[version.hop])
        driver.finish(name)
        reply = driver.reply(Op.JOIN, id=name)
        assert (reply.ok, reply.code) == (False, Code.EXHAUSTED), f"allocation {fails}"
        assert driver.worker.model_runner.get_model().state() == before
    device.fails = -1
    driver.prepare("u", [version])
    driver.swap("u")
    assert driver.worker.model_runner.get_model().state() == loaded(NEW).state()


def test_the_next_transaction_uses_the_same_memory(driver: Driver, tmp_path: Path, version: Any) -> None:
    driver.prepare("t", [version])
    arena = memory_of(driver)._arena
    first, place = arena._used, arena._bytes.data_ptr()
    driver.swap("t")
    driver.ok(Op.COMMIT, txn="t")
    assert arena._used == 0
    back = write_version(tmp_path / "back", LAYOUT, NEW, LANES, version=2)
    driver.prepare("u", [back])
    assert (arena._used, arena._bytes.data_ptr()) == (first, place)


def test_versions_that_the_device_cannot_hold_wait_for_the_next_transaction(tmp_path: Path) -> None:
    states = [LANES]
    hops = []
    for number in range(1, 4):
        states.append(heldless(step(states[-1], 0.2, number)))
        hops.append(write_version(tmp_path / str(number), LAYOUT, *states[-2:], version=number).hop)
    toy = loaded(LANES)
    placement, live_tensors = placed(toy)

    def run(size: int, count: int) -> Any:
        arena = DeviceArena(1 << 16, CPU)
        arena.size = size
        memory = TorchMemory(placement, live_tensors, layout=LAYOUT, arena=arena)
        preparation = Preparation(layout=LAYOUT, placement=placement, memory=memory, arena=Arena(1 << 20))
        return preparation.run("t", hops[:count]), memory, arena

    _, _, arena = run(1 << 16, 2)
    txn, memory, _ = run(arena._used, 3)
    assert txn.fits == 2
    assert txn.apply(memory, placement) == txn.answer.after
    assert toy.state() == loaded(states[2]).state()
    with pytest.raises(ResourceExhausted, match="version 1 alone needs more than the 64 bytes of device memory"):
        run(64, 1)


def test_a_device_arena_hands_out_pieces_on_which_triton_does_not_compile_again() -> None:
    arena = DeviceArena(1 << 13, CPU)
    pieces = [arena.take(count, torch.int16) for count in (3, 5, 8)]
    first = pieces[0].data_ptr()
    assert [(piece.data_ptr() - first) % 16 for piece in pieces] == [0, 0, 0]
    with pytest.raises(ArenaFull):
        arena.take(1 << 13, torch.int8)
